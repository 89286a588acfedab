"""Operators that work along some dims and leave the others alone: sums, softmax, norms. No torch."""

from packhorse.graph.ir import Arg, Ref, Value
from packhorse.parallel.split import Split
from packhorse.parallel.tensor.placed import WHOLE, Place, Sum, is_dim
from packhorse.parallel.tensor.spread import Spread

REDUCTIONS = {
    f"aten.{name}"
    for name in "sum.dim_IntList mean.dim amax.default amin.default var.correction std.correction logsumexp.default any.dim all.dim".split()
} | {"aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default", "aten.var_mean.correction"}
ALONG_ONE = {  # -> position of the dim
    "aten._softmax.default": 1,
    "aten._safe_softmax.default": 1,
    "aten._log_softmax.default": 1,
    "aten.cumsum.default": 1,
    "aten.tril.default": None,
    "aten.triu.default": None,
    "aten._softmax_backward_data.default": 2,
    "aten._log_softmax_backward_data.default": 2,
}


def reduction(spread: Spread) -> None:
    """Sums, means, largest elements over some dims. Over a split dim a sum is one over ranks."""
    node = spread.node
    source = node.args[0]
    assert isinstance(source, Ref)
    shape = spread.full[source.name].shape
    place = spread.place[source.name]
    if isinstance(place, Sum) and not (node.op == "aten.sum.dim_IntList" and place.lazy):
        place = spread.settled(source.name)
    asked = node.args[1] if len(node.args) > 1 else None
    dims = {is_dim(int(d), shape) for d in (asked if isinstance(asked, tuple) else (asked,)) if d is not None}  # type: ignore[arg-type]
    dims = dims or set(range(len(shape)))
    keep = _keeps_dims(node.args, node.kwargs, 3 if node.op in _WITH_CORRECTION else 2)
    target: Place = place
    if isinstance(place, Split):
        if place.dim not in dims:
            target = place if keep else Split(place.dim - sum(d < place.dim for d in dims), place.blocks, place.padding)
        elif node.op == "aten.sum.dim_IntList" and not place.padding:
            target = Sum()
        else:
            spread.need_whole(source.name)
            place = target = WHOLE
    spread.emit(node.op, (spread.ref(source.name, place), *node.args[1:]), [(value, target) for value in node.outputs], node.kwargs)


_WITH_CORRECTION = {"aten.var.correction", "aten.std.correction", "aten.var_mean.correction"}


def _keeps_dims(args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], position: int) -> bool:
    return bool(dict(kwargs).get("keepdim", args[position] if len(args) > position else False))


def sum_of_all(spread: Spread) -> None:
    """The sum of every element."""
    node = spread.node
    source = node.args[0]
    assert isinstance(source, Ref)
    place = spread.place[source.name]
    if isinstance(place, Split) and not place.padding:
        spread.emit(node.op, (spread.ref(source.name, place),), [(node.outputs[0], Sum())], node.kwargs)
    else:
        spread.all_whole()


def along_one(spread: Spread) -> None:
    """Softmax and its gradient, running sums: every line of one dim by itself."""
    node = spread.node
    position = ALONG_ONE[node.op]
    refs = [arg.name for arg in node.args if isinstance(arg, Ref)]
    shape = spread.full[refs[0]].shape
    used = {is_dim(int(node.args[position]), shape)} if position is not None else {len(shape) - 1, len(shape) - 2}  # type: ignore[arg-type]
    target = next((place for name in refs if isinstance(place := spread.settled(name), Split)), None)
    if target is None:
        spread.again({name: spread.local[name] for name in refs})
        return
    if target.dim in used:
        spread.all_whole()
        return
    args = tuple(spread.ref(arg.name, target) if isinstance(arg, Ref) else arg for arg in node.args)
    spread.emit(node.op, args, [(value, target) for value in node.outputs], node.kwargs)


def layer_norm(spread: Spread) -> None:
    """native_layer_norm (x, shape, weight, bias, eps) and _fused_rms_norm (x, shape, weight, eps): each row by itself."""
    node = spread.node
    source = node.args[0]
    assert isinstance(source, Ref)
    place = spread.settled(source.name)
    rows = len(spread.full[source.name].shape) - len(node.args[1])  # type: ignore[arg-type]
    if isinstance(place, Split) and (place.dim >= rows or place.padding):
        spread.need_whole(source.name)
        place = WHOLE
    rest = tuple(spread.ref(arg.name, WHOLE) if isinstance(arg, Ref) else arg for arg in node.args[1:])
    spread.emit(node.op, (spread.ref(source.name, place), *rest), [(value, place) for value in node.outputs], node.kwargs)


def layer_norm_backward(spread: Spread) -> None:
    """Gradients of x, weight, bias. Those of weight and bias are sums over rows, and over ranks where rows are split."""
    node = spread.node
    of_layer = node.op == "aten.native_layer_norm_backward.default"
    by_row = (0, 1, 3, 4) if of_layer else (0, 1, 3)  # grad, x, mean and inverse deviation
    names = {at: arg.name for at in by_row if isinstance(arg := node.args[at], Ref)}
    rows = len(spread.full[names[1]].shape) - len(node.args[2])  # type: ignore[arg-type]
    places = [spread.settled(name) for name in names.values()]
    target: Place = next((place for place in places if isinstance(place, Split) and place.dim < rows and not place.padding), WHOLE)
    args: list[Arg] = []
    for at, arg in enumerate(node.args):
        if isinstance(arg, Ref):
            found = spread.at(arg.name, target if at in by_row else WHOLE)
            arg = Ref((spread.row_by_row(found) if at in by_row[2:] else found).name)
        args.append(arg)
    summed: Place = Sum() if isinstance(target, Split) else WHOLE
    results: list[tuple[Value | None, Place]] = [(value, summed if index else target) for index, value in enumerate(node.outputs)]
    spread.emit(node.op, tuple(args), results, node.kwargs)
