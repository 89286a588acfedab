"""Views on the tp ranks: what becomes of a split dim, and how the local view lies in memory. No torch.

What a view does is read off its node once (permutation, inserted, interval, chosen); how a split and how strides follow it are functions of that.
"""

from collections.abc import Sequence
from math import prod

from packhorse.graph.ir import Node, Value, contiguous_strides
from packhorse.parallel.split import Split
from packhorse.parallel.tensor.placed import is_dim


def split_after_view(split: Split, before: tuple[int, ...], after: tuple[int, ...], degree: int) -> Split | None:
    """A split of a tensor of shape `before` as one of the same elements in shape `after`.

    Dims that do not change keep their split. Where dims are merged a split of an inner one is one of many blocks; where one is taken apart, it is of
    the outermost dim that has whole parts.
    """
    for ours, theirs in groups(before, after):
        if split.dim not in ours:
            continue
        if len(ours) == 1 and len(theirs) == 1:
            return Split(theirs[0], split.blocks, split.padding)
        outer = prod(before[dim] for dim in ours if dim < split.dim)
        inner = prod(before[dim] for dim in ours if dim > split.dim)
        if outer == inner == 1 and before[split.dim] in (sizes := [after[dim] for dim in theirs]):  # dims of one element come and go
            return Split(theirs[sizes.index(before[split.dim])], split.blocks, split.padding)
        if split.padding:
            return None
        return _taken_apart([block * inner for block in split.blocks] * outer, [after[dim] for dim in theirs], theirs[0], degree)
    return None


def _taken_apart(blocks: list[int], shape: Sequence[int], first: int, degree: int) -> Split | None:
    """Blocks of one dim, as those of a dim of `shape`, which it is taken apart into; first: the number of that shape's first dim."""
    for place, size in enumerate(shape):
        outer, inner = prod(shape[:place]), prod(shape[place + 1 :])
        if not inner or len(blocks) % outer or any(block % (inner * degree) for block in blocks):
            continue
        count = len(blocks) // outer
        own = [block // inner for block in blocks[:count]]
        if [block * inner for block in own] * outer == blocks and sum(own) == size:
            return Split(first + place, tuple(own))
    return None


def groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Dims of two shapes of the same elements, in the smallest groups that hold the same ones."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ours: list[int] = []
        theirs: list[int] = []
        a = b = 1
        while True:
            if i < len(before) and (not ours or a < b):
                ours.append(i)
                a, i = a * before[i], i + 1
            elif j < len(after) and (not theirs or b < a):
                theirs.append(j)
                b, j = b * after[j], j + 1
            else:
                break
        found.append((ours, theirs))
    return found


def viewed_strides(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of the elements of (shape, strides), row by row, in the shape `wanted`; None if no strides do it."""
    if 0 in shape:
        return contiguous_strides(wanted)
    pieces: list[tuple[int, int]] = []  # (elements, stride of the innermost) of dims that lie as one
    for size, stride in zip(shape, strides):
        if size == 1:
            continue
        if pieces and pieces[-1][1] == size * stride:
            pieces[-1] = (pieces[-1][0] * size, stride)
        else:
            pieces.append((size, stride))
    found: list[int] = []
    left, step = 1, 1
    for size in reversed(wanted):
        if size == 1:
            found.append(step)
            continue
        if left == 1:
            if not pieces:
                return None
            left, step = pieces.pop()
        if left % size:
            return None
        found.append(step)
        left, step = left // size, step * size
    return tuple(reversed(found)) if left == 1 and not pieces else None


# -- one view each -------------------------------------------------------------------------------------------------------------------------


def permutation(node: Node, rank: int) -> list[int] | None:
    """The argument's dims in the order of the result's; None for other views."""
    dims = list(range(rank))
    if node.op == "aten.t.default":
        return dims[::-1]
    if node.op in ("aten.transpose.int", "aten.swapaxes.default"):
        a, b = (int(dim) % rank for dim in node.args[1:3])  # type: ignore[arg-type]
        dims[a], dims[b] = dims[b], dims[a]
        return dims
    if node.op == "aten.permute.default":
        return [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    return None


def inserted(node: Node, before: Value, after: Value) -> list[int | None] | None:
    """For each dim of the result the argument's dim that it is, or None for a new one of one element; None for other views."""
    rank = len(before.shape)
    if node.op == "aten.unsqueeze.default":
        at = int(node.args[1]) % (rank + 1)  # type: ignore[arg-type]
        return [*range(at), None, *range(at, rank)]
    if node.op.startswith("aten.squeeze."):
        asked = node.args[1] if len(node.args) > 1 else tuple(range(rank))
        dims = {is_dim(int(dim), before.shape) for dim in (asked if isinstance(asked, tuple) else (asked,))}  # type: ignore[arg-type]
        return [dim for dim in range(rank) if not (dim in dims and before.shape[dim] == 1)]
    if node.op == "aten.expand.default":
        return [dim if dim >= 0 else None for dim in range(rank - len(after.shape), rank)]
    return None


def interval(node: Node, shape: tuple[int, ...]) -> list[tuple[int, int, int, int]] | None:
    """(dim, start, end, step) of what each result is of the argument, for views that cut one dim; None for other views."""
    args = node.args
    if node.op == "aten.slice.Tensor":
        dim = is_dim(_number(args, 1, 0), shape)
        size = shape[dim]
        start, end = (_bound(args, 2, 0, size), _bound(args, 3, size, size))
        return [(dim, start, max(start, end), _number(args, 4, 1))]
    if node.op in ("aten.split.Tensor", "aten.unsafe_split.Tensor"):
        dim = is_dim(_number(args, 2, 0), shape)
        size, step = shape[dim], _number(args, 1, 1)
        return [(dim, start, min(start + step, size), 1) for start in range(0, size, step)]
    if node.op in ("aten.split_with_sizes.default", "aten.unsafe_split_with_sizes.default"):
        dim = is_dim(_number(args, 2, 0), shape)
        found, at = [], 0
        for part in args[1]:  # type: ignore[union-attr]
            found.append((dim, at, at + int(part), 1))  # type: ignore[arg-type]
            at += int(part)  # type: ignore[arg-type]
        return found
    return None


def chosen(node: Node, shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """(dim, index) that each result is of the argument, for views that lose a dim; None for other views."""
    if node.op == "aten.select.int":
        dim = is_dim(_number(node.args, 1, 0), shape)
        return [(dim, _number(node.args, 2, 0) % shape[dim])]
    if node.op == "aten.unbind.int":
        dim = is_dim(_number(node.args, 1, 0), shape)
        return [(dim, index) for index in range(shape[dim])]
    return None


RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")


def sub_blocks(split: Split, start: int, end: int, degree: int) -> tuple[tuple[int, ...], int] | None:
    """The blocks between two elements of a split dim, and where they begin on each rank; None if that is inside a block."""
    at = 0
    begin = None
    taken: list[int] = []
    for block in split.blocks:
        if start <= at and at + block <= end:
            begin = at // degree if begin is None else begin
            taken.append(block)
        elif at < end and start < at + block:
            return None
        at += block
    return None if begin is None else (tuple(taken), begin)


def _number(args: tuple, index: int, default: int) -> int:
    return int(args[index]) if len(args) > index and args[index] is not None else default


def _bound(args: tuple, index: int, default: int, size: int) -> int:
    value = _number(args, index, default)
    return min(max(value + size if value < 0 else value, 0), size)
