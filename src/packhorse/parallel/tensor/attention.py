"""Attention kernels on the tp ranks: heads are split (Shoeybi et al. 2019, section 3). No torch.

Where there are fewer key/value heads than ranks they are whole on every rank, and each takes the one that its queries share (grouped-query
attention); the gradient of that one is a term of the sum over ranks.
"""

from packhorse.graph.ir import Arg, Ref, Value
from packhorse.parallel.split import Split
from packhorse.parallel.tensor.placed import WHOLE, Place, Sum, memory_order, strides_in_order
from packhorse.parallel.tensor.spread import Spread

FORWARD = {"aten._scaled_dot_product_flash_attention_for_cpu.default"}
BACKWARD = {"aten._scaled_dot_product_flash_attention_for_cpu_backward.default"}
HEADS = 1


def attention(spread: Spread) -> None:
    """(query, key, value (B, H, T, D), ..., attn_mask=) -> (out, log-sum-exp)."""
    node = spread.node
    query, key, value = (arg.name for arg in node.args[:3] if isinstance(arg, Ref))
    target = _heads(spread, (query, key, value))
    if target is None:
        return
    results: list[tuple[Value | None, Place]] = [(v, Split(HEADS, target.blocks)) for v in node.outputs]
    args = (spread.ref(query, target), *(Ref(_keys(spread, name, target)[0].name) for name in (key, value)), *node.args[3:])
    spread.emit(node.op, args, results, _kwargs(spread, target))


def attention_backward(spread: Spread) -> None:
    """(grad, query, key, value, out, log-sum-exp, ..., attn_mask=) -> gradients of query, key, value."""
    node = spread.node
    grad, query, key, value, out, lse = (arg.name for arg in node.args[:6] if isinstance(arg, Ref))
    target = _heads(spread, (query, key, value, grad, out))
    if target is None:
        return
    keys = [_keys(spread, name, target) for name in (key, value)]
    split_keys = isinstance(keys[0][1], Split)
    args: tuple[Arg, ...] = (
        spread.ref(grad, target),
        spread.ref(query, target),
        *(Ref(found.name) for found, _ in keys),
        spread.ref(out, target),
        spread.ref(lse, target) if spread.place[lse] == target else Ref(spread.row_by_row(spread.at(lse, target)).name),
        *node.args[6:],
    )
    of_query, *of_keys = node.outputs
    assert of_query is not None
    if split_keys:
        spread.emit(node.op, args, [(of_query, target), *((v, keys[0][1]) for v in of_keys)], _kwargs(spread, target))
        return
    _with_own_keys(spread, args, of_query, of_keys, target, keys[0][0])


def _with_own_keys(spread: Spread, args: tuple, of_query: Value, of_keys: list, target: Split, own: Value) -> None:
    """Gradients of the key/value heads that this rank took: zeros for the others."""
    first, count = own_key_heads(target.size, of_keys[0].shape[HEADS], spread.rank, spread.degree)
    parts = [Value(f".own.{v.name}", v.dtype, own.shape, _dense_like(v, own.shape)) for v in of_keys]
    spread.emit_as(args, [(of_query, target)], parts, _kwargs(spread, target))
    for whole, part in zip(of_keys, parts):
        spread.zeros_around(whole, part, HEADS, first, first + count)


def _dense_like(value: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    return strides_in_order(shape, memory_order(value.shape, value.strides))


def _heads(spread: Spread, names: tuple[str, ...]) -> Split | None:
    """How the queries' heads are split; None if they are not, and then the node is done."""
    found = [place for name in names if isinstance(place := spread.settled(name), Split)]
    query = spread.full[names[0]]
    alike = all(spread.full[name].shape[HEADS] == query.shape[HEADS] for name in names[1:3])  # else a rank's queries lie side by side
    target = next((p for p in found if p.dim == HEADS and p.size == query.shape[HEADS] and (alike or len(p.blocks) == 1)), None)
    if target is None:
        spread.all_whole()
    return target


def _keys(spread: Spread, name: str, target: Split) -> tuple[Value, Place]:
    """Key or value heads for this rank's queries, and where they are."""
    whole = spread.full[name]
    heads = whole.shape[HEADS]
    if heads == target.size:
        return spread.at(name, target), target
    if isinstance(place := spread.place[name], Split) and place.dim == HEADS and heads % spread.degree == 0:
        return spread.local[name], place
    if heads % spread.degree == 0:
        split = Split(HEADS, (heads,))
        return spread.at(name, split), split
    first, count = own_key_heads(target.size, heads, spread.rank, spread.degree)
    return spread.narrow(spread.at(name, WHOLE), HEADS, first, first + count), Sum(lazy=True)


def own_key_heads(query_heads: int, key_heads: int, rank: int, degree: int) -> tuple[int, int]:
    """(first, how many) of the key/value heads that the queries of a rank share, where the degree is a multiple of them."""
    group, own = query_heads // key_heads, query_heads // degree
    first = rank * own // group
    return first, (rank * own + own - 1) // group - first + 1


def _kwargs(spread: Spread, target: Split) -> tuple[tuple[str, Arg], ...]:
    """The mask is narrowed to the rank's heads where it has heads."""
    found = []
    for key, arg in spread.node.kwargs:
        if isinstance(arg, Ref):
            shape = spread.full[arg.name].shape
            arg = spread.ref(arg.name, target if len(shape) == 4 and shape[HEADS] == target.size else WHOLE)
        found.append((key, arg))
    return tuple(found)
