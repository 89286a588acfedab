"""Embeddings and losses over a vocabulary that is split (Shoeybi et al. 2019, section 3). No torch.

The loss of a split vocabulary takes, of each rank and row, the largest logit, the sum of the exponentials and the target's logit: three numbers
instead of the row.
"""

from packhorse.graph.ir import Arg, Ref, Value, contiguous_strides
from packhorse.parallel.split import Split
from packhorse.parallel.tensor.along_dims import along_one
from packhorse.parallel.tensor.placed import WHOLE, Place, Sum
from packhorse.parallel.tensor.spread import Spread

NLL = "aten.nll_loss_forward.default"


def embedding(spread: Spread) -> None:
    """(weight (V, H), indices (..)) -> (.., H). Of a split vocabulary each rank gives the rows that it has."""
    node = spread.node
    weight, indices = (arg.name for arg in node.args[:2] if isinstance(arg, Ref))
    place, result = spread.settled(weight), node.outputs[0]
    assert result is not None
    if isinstance(place, Split) and place.dim == 0 and len(place.blocks) > 1:
        spread.need_whole(weight)
        place = WHOLE
    if isinstance(place, Split) and place.dim == 0:
        args: tuple[Arg, ...] = (spread.ref(weight, place), spread.ref(indices, WHOLE), _start(spread, place), place.size - place.padding)
        spread.emit("packhorse.part_embedding.default", args, [(result, Sum())])
        return
    there = spread.settled(indices)
    target: Place = Split(len(result.shape) - 1, place.blocks) if isinstance(place, Split) else there
    args = (spread.ref(weight, place), spread.ref(indices, WHOLE if isinstance(place, Split) else there), *node.args[2:])
    spread.emit(node.op, args, [(result, target)], node.kwargs)


def embedding_backward(spread: Spread) -> None:
    """(grad (.., H), indices, number of rows, padding index, by frequency) -> (V, H)."""
    node = spread.node
    grad, indices = (arg.name for arg in node.args[:2] if isinstance(arg, Ref))
    result = node.outputs[0]
    assert result is not None
    wanted = spread.wanted.get(result.name)
    if wanted is not None and wanted.dim == 0 and len(wanted.blocks) == 1 and not node.args[4]:
        args: tuple[Arg, ...] = (spread.ref(grad, WHOLE), spread.ref(indices, WHOLE), *_own_rows(spread, wanted, node.args[3]))
        spread.emit("packhorse.part_embedding_backward.default", args, [(result, wanted)])
        return
    place = spread.settled(grad)
    last = len(spread.full[grad].shape) - 1
    if not isinstance(place, Split) or node.args[4]:
        spread.all_whole()
    elif place.dim == last:
        args = (spread.ref(grad, place), spread.ref(indices, WHOLE), *node.args[2:])
        spread.emit(node.op, args, [(result, Split(1, place.blocks, place.padding))])
    else:
        dim = place.dim - (last - len(spread.full[indices].shape))
        there: Place = Split(dim, place.blocks) if dim >= 0 else WHOLE
        spread.emit(node.op, (spread.ref(grad, place), spread.ref(indices, there), *node.args[2:]), [(result, Sum())])


def add_embedding_backward(spread: Spread) -> None:
    """The same, added to another gradient of the weight (graph/embedding_rows.py)."""
    node = spread.node
    total, grad, indices = (arg.name for arg in node.args[:3] if isinstance(arg, Ref))
    place, result = spread.settled(total), node.outputs[0]
    assert result is not None
    if isinstance(place, Split) and place.dim == 0 and len(place.blocks) == 1:
        args: tuple[Arg, ...] = (Ref(spread.local[total].name), spread.ref(grad, WHOLE), spread.ref(indices, WHOLE))
        spread.emit("packhorse.add_part_embedding_backward.default", (*args, *_own_rows(spread, place, node.args[4])), [(result, place)])
        return
    spread.all_whole()


def _own_rows(spread: Spread, split: Split, padding_index: Arg) -> tuple[Arg, ...]:
    return split.size // spread.degree, padding_index, _start(spread, split)


def _start(spread: Spread, split: Split) -> int:
    return split.parts(spread.rank, spread.degree)[0][0]


def _valid(spread: Spread, split: Split) -> int:
    """Columns of this rank that are no padding."""
    first, last = split.held(spread.rank, spread.degree)[0]
    return last - first


def log_softmax(spread: Spread) -> None:
    """(x (T, V), 1, _) -> log-probabilities. Where the vocabulary is split and a loss reads them, its targets' are picked on the way."""
    node = spread.node
    source = node.args[0]
    assert isinstance(source, Ref)
    place, whole, result = spread.settled(source.name), spread.full[source.name], node.outputs[0]
    assert result is not None
    over_vocabulary = isinstance(place, Split) and len(whole.shape) == 2 and node.args[1] in (1, -1) and place.dim == 1 and len(place.blocks) == 1
    if not over_vocabulary or node.args[2]:
        along_one(spread)
        return
    assert isinstance(place, Split)
    x, rows, dtype = spread.at(source.name, place), whole.shape[0], result.dtype
    loss = next((spread.graph.nodes[user] for user in spread.users.get(result.name, ()) if spread.graph.nodes[user].op == NLL), None)
    target = None
    if loss is not None and isinstance(loss.args[1], Ref) and loss.args[1].name in spread.local:
        target = spread.ref(loss.args[1].name, WHOLE)
    valid = _valid(spread, place)
    stats = spread.new("packhorse.vocab_stats.default", (Ref(x.name), target, _start(spread, place), valid), _row(dtype, 3, rows))
    every = spread.gathered_flat(stats, "loss")
    every = spread.view(every, (spread.degree, 3, rows), (3 * rows, rows, 1))
    lse, picked = spread.new_pair("packhorse.vocab_merge.default", (Ref(every.name),), _row(dtype, rows), _row(dtype, rows))
    if target is not None:
        spread.picked[result.name] = lse, picked
    spread.emit("packhorse.vocab_log_probs.default", (Ref(x.name), Ref(lse.name), valid), [(result, place)])


def _row(dtype: str, *shape: int) -> Value:
    return Value("", dtype, shape, contiguous_strides(shape))


def nll(spread: Spread) -> None:
    """nll_loss_forward (log-probabilities, target, weight, reduction, ignored index) -> (loss, total weight)."""
    node = spread.node
    source = node.args[0]
    assert isinstance(source, Ref)
    if source.name not in spread.picked:
        spread.all_whole()
        return
    lse, picked = spread.picked[source.name]
    rest = tuple(spread.ref(arg.name, WHOLE) if isinstance(arg, Ref) else arg for arg in node.args[1:])
    spread.emit(
        "packhorse.vocab_nll.default",
        (Ref(lse.name), Ref(picked.name), *rest, spread.full[source.name].shape[1]),
        [(value, WHOLE) for value in node.outputs],
    )


def nll_log_softmax_backward(spread: Spread) -> None:
    """The gradient of the logits, in one (graph/loss_rows.py): (grad, log-probabilities, target, weight, reduction, ignored index, total weight)."""
    node = spread.node
    source = node.args[1]
    assert isinstance(source, Ref)
    place = spread.settled(source.name)
    if not isinstance(place, Split) or place.dim != 1:
        spread.all_whole()
        return
    args = tuple(spread.ref(arg.name, place if arg == source else WHOLE) if isinstance(arg, Ref) else arg for arg in node.args)
    spread.emit("packhorse.vocab_nll_backward.default", (*args, _start(spread, place)), [(node.outputs[0], place)])
