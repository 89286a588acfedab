"""Views, and what undoes them, on the tp ranks. No torch."""

from dataclasses import replace

from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Arg, Ref, Value, contiguous_strides
from packhorse.parallel.split import Split
from packhorse.parallel.tensor.placed import WHOLE, Owed, Place, Sum, Whole, is_dim
from packhorse.parallel.tensor.spread import Spread
from packhorse.parallel.tensor.views import RESHAPES, chosen, inserted, interval, permutation, split_after_view, sub_blocks, viewed_strides


def view(spread: Spread) -> None:
    """Any node whose results are views."""
    node = spread.node
    source = node.args[0]
    assert isinstance(source, Ref)
    name = source.name
    if isinstance(spread.place[name], Owed):
        spread.settled(name)
    if spread.local[name] == spread.full[name] and isinstance(spread.place[name], (Whole, Sum)) and _same_root(spread, name):
        place = spread.place[name]
        spread.views([(value, place) for value in node.outputs if value is not None])
        return
    if not _followed(spread, name):
        spread.need_whole(name)
        if isinstance(spread.place[name], Sum):
            spread.settled(name)
        spread.place[name], spread.local[name] = WHOLE, spread.at(name, WHOLE)
        if not _followed(spread, name):
            _as_in_memory(spread, name)


def _same_root(spread: Spread, name: str) -> bool:
    """What it is a view of lies as in the whole graph."""
    root = spread.full[name].root
    return spread.roots.get(root) == spread.full[root]


def _as_in_memory(spread: Spread, name: str) -> None:
    """A view of memory rather than of dims (as_strided, another dtype): of a whole value that lies as in the whole graph."""
    node, whole = spread.node, spread.full[name]
    value = spread.local[name]
    if (value.shape, value.strides) != (whole.shape, whole.strides):
        value = spread.copy_as(value, whole)
    results = [v for v in node.outputs if v is not None]
    spread.views([(replace(v, base=value.root, offset=value.offset + v.offset - whole.offset), WHOLE) for v in results])


def _followed(spread: Spread, name: str) -> bool:
    """The view of what this rank has. False if the place of the argument does not allow it."""
    node, value, whole, place = spread.node, spread.local[name], spread.full[name], spread.place[name]
    results = [v for v in node.outputs if v is not None]
    rank = len(whole.shape)
    if node.op in RESHAPES:
        return _reshaped(spread, name, results[0])
    if (order := permutation(node, rank)) is not None:
        moved = replace(place, dim=order.index(place.dim)) if isinstance(place, Split) else place
        _show(spread, value, [(results[0], moved, tuple(value.shape[d] for d in order), tuple(value.strides[d] for d in order), 0)])
        return True
    if (dims := inserted(node, whole, results[0])) is not None:
        moved = place
        if isinstance(place, Split):
            if place.dim not in dims:
                return False
            moved = replace(place, dim=dims.index(place.dim))
        sizes, steps = [], []
        for at, dim in enumerate(dims):
            size = results[0].shape[at]
            if dim is not None and (whole.shape[dim] == size or (isinstance(moved, Split) and moved.dim == at)):
                sizes.append(value.shape[dim])
                steps.append(value.strides[dim])
            else:  # a dim of one element that is new, or repeated
                sizes.append(size)
                steps.append(0 if node.op == "aten.expand.default" else results[0].strides[at])
        _show(spread, value, [(results[0], moved, tuple(sizes), tuple(steps), 0)])
        return True
    if (cuts := interval(node, whole.shape)) is not None:
        return _cut(spread, name, results, cuts)
    if (choices := chosen(node, whole.shape)) is not None:
        shown = []
        for result, (dim, index) in zip(results, choices):
            moved = place
            if isinstance(place, Split):
                if place.dim == dim:
                    return False
                moved = replace(place, dim=place.dim - (place.dim > dim))
            rest = [d for d in range(rank) if d != dim]
            shape, strides = tuple(value.shape[d] for d in rest), tuple(value.strides[d] for d in rest)
            shown.append((result, moved, shape, strides, index * value.strides[dim]))
        _show(spread, value, shown)
        return True
    return False


def _show(spread: Spread, of: Value, shown: list[tuple[Value, Place, tuple[int, ...], tuple[int, ...], int]]) -> None:
    size = ITEMSIZE[of.dtype]
    spread.views([(Value(v.name, v.dtype, shape, strides, of.root, of.offset + offset * size), place) for v, place, shape, strides, offset in shown])


def _reshaped(spread: Spread, name: str, result: Value) -> bool:
    value, whole, place = spread.local[name], spread.full[name], spread.place[name]
    moved = split_after_view(place, whole.shape, result.shape, spread.degree) if isinstance(place, Split) else place
    if moved is None:
        return False
    shape = moved.local(result.shape, spread.degree) if isinstance(moved, Split) else result.shape
    strides = viewed_strides(value.shape, value.strides, shape)
    if strides is None:  # it lies otherwise here than in the whole graph
        copied = spread.copy(value)
        value, strides = copied, contiguous_strides(shape)
        spread.local[name] = copied
    local = Value(result.name, result.dtype, shape, strides, value.root, value.offset)
    spread.views([(local, moved)])
    return True


def _cut(spread: Spread, name: str, results: list[Value], cuts: list[tuple[int, int, int, int]]) -> bool:
    value, whole, place = spread.local[name], spread.full[name], spread.place[name]
    shown = []
    for result, (dim, first, last, step) in zip(results, cuts):
        moved: Place = place
        if isinstance(place, Split) and place.dim == dim:
            if (first, last, step) == (0, whole.shape[dim], 1):
                begin, size = 0, value.shape[dim]
            else:
                taken = None if place.padding or step != 1 else sub_blocks(place, first, last, spread.degree)
                if taken is None:
                    return False
                moved, begin = Split(dim, taken[0]), taken[1]
                size = sum(taken[0]) // spread.degree
                spread.cuts[whole.shape, dim] = place
        else:
            begin, size = first, -(-(last - first) // step)
        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        strides = tuple(s * step if d == dim else s for d, s in enumerate(value.strides))
        shown.append((result, moved, shape, strides, begin * value.strides[dim]))
    _show(spread, value, shown)
    return True


def cut_backward(spread: Spread) -> None:
    """slice_backward: zeros around the gradient of what was cut out. select_backward: the same, of one index."""
    node = spread.node
    grad, sizes, dim = node.args[0], tuple(int(s) for s in node.args[1]), int(node.args[2])  # type: ignore[union-attr, arg-type]
    assert isinstance(grad, Ref)
    result = node.outputs[0]
    assert result is not None
    dim = is_dim(dim, sizes)
    is_slice = node.op == "aten.slice_backward.default"
    place = spread.place[grad.name]
    if isinstance(place, Sum) and not place.lazy:
        place = spread.settled(grad.name)
    if isinstance(place, Split):
        own = place.dim if is_slice or place.dim < dim else place.dim + 1
        if own != dim:
            split = Split(own, place.blocks, place.padding)
            args: tuple[Arg, ...] = (spread.ref(grad.name, place), split.local(sizes, spread.degree), dim, *node.args[3:])
            spread.emit(node.op, args, [(result, split)])
            return
        whole = spread.cuts.get((sizes, dim))
        if is_slice and node.args[5] == 1:
            first, last = int(node.args[3]), min(int(node.args[4]), sizes[dim])  # type: ignore[arg-type]
            if (first, last) == (0, sizes[dim]):
                whole = place
            taken = None if whole is None or (whole.padding and whole != place) else sub_blocks(whole, first, last + whole.padding, spread.degree)
            if taken is not None and whole is not None and taken[0] == place.blocks:
                begin, size = taken[1], sum(taken[0]) // spread.degree
                args = (spread.ref(grad.name, place), whole.local(sizes, spread.degree), dim, begin, begin + size, 1)
                spread.emit(node.op, args, [(result, whole)])
                return
        spread.need_whole(grad.name)
        place = WHOLE
    spread.emit(node.op, (spread.ref(grad.name, place), *node.args[1:]), [(result, place)])


def concatenate(spread: Spread) -> None:
    """cat: along a dim that is not split, or of parts that are split along it one by one."""
    node = spread.node
    names = [arg.name for arg in node.args[0] if isinstance(arg, Ref)]  # type: ignore[union-attr]
    result = node.outputs[0]
    assert result is not None
    dim = is_dim(int(node.args[1]) if len(node.args) > 1 else 0, result.shape)  # type: ignore[arg-type]
    filled = [name for name in names if spread.full[name].num_elements]
    if all(isinstance(spread.place[name], Sum) for name in filled):
        lazy = all(spread.place[name].lazy for name in filled)  # type: ignore[union-attr]
        refs = tuple(Ref(spread.local[name].name) for name in names)
        spread.emit(node.op, (refs, *node.args[1:]), [(result, Sum(lazy))], node.kwargs)
        return
    places = [place for name in filled if isinstance(place := spread.settled(name), Split)]
    target: Split | None = None
    if places and places[0].dim != dim:
        target = places[0]
        wanted: dict[str, Place] = {name: target for name in filled}
    elif len(places) == len(filled) and places and all(place.dim == dim and not place.padding for place in places):
        target = Split(dim, tuple(block for place in places for block in place.blocks))
        wanted = {name: spread.place[name] for name in filled}
    else:
        wanted = {name: WHOLE for name in filled}
        if places:
            spread.need_whole(*filled)
    refs = tuple(spread.ref(name, wanted[name]) if name in wanted else Ref(spread.local[name].name) for name in names)
    spread.emit(node.op, (refs, *node.args[1:]), [(result, target or WHOLE)], node.kwargs)


def pad(spread: Spread) -> None:
    """constant_pad_nd: of dims that are not split."""
    node = spread.node
    source = node.args[0]
    assert isinstance(source, Ref) and node.outputs[0] is not None
    place = spread.settled(source.name)
    padded = len(node.args[1]) // 2  # type: ignore[arg-type]
    if isinstance(place, Split) and place.dim >= len(spread.full[source.name].shape) - padded:
        spread.need_whole(source.name)
        place = WHOLE
    spread.emit(node.op, (spread.ref(source.name, place), *node.args[1:]), [(node.outputs[0], place)], node.kwargs)
