"""Matrix products on the tp ranks (Shoeybi et al. 2019, section 3). No torch.

Of A (.., i, k) @ B (.., k, j): split rows of A give split rows, split columns of B give split columns (a column-parallel layer); where both are split
along k each rank has a term of the result (a row-parallel layer). A bias is added to one term, once.
"""

from math import prod

from packhorse.graph.ir import Arg, Ref, Value
from packhorse.parallel.split import Split
from packhorse.parallel.tensor.placed import WHOLE, Place, Sum, Whole
from packhorse.parallel.tensor.spread import Spread

PRODUCTS = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}  # -> position of A


def product(spread: Spread) -> None:
    """mm, bmm, addmm, baddbmm."""
    node = spread.node
    at = PRODUCTS[node.op]
    a, b = (arg.name for arg in node.args[at : at + 2] if isinstance(arg, Ref))
    row = len(spread.full[a].shape) - 2
    for name in (a, b):
        other = spread.place[b if name == a else a]
        if not (isinstance(spread.place[name], Sum) and spread.place[name].lazy and isinstance(other, Whole)):  # type: ignore[union-attr]
            spread.settled(name)
    if isinstance(spread.place[a], Sum) and isinstance(spread.place[b], Sum):
        spread.settled(a), spread.settled(b)
    place_a, place_b, result = _places(spread, a, b, row)
    out = node.outputs[0]
    assert out is not None
    args: tuple[Arg, ...] = (spread.ref(a, place_a), spread.ref(b, place_b))
    kwargs = node.kwargs
    if at:
        bias = node.args[0]
        assert isinstance(bias, Ref)
        spread.settled(bias.name)
        args = (_bias(spread, bias.name, result, out), *args)
        if isinstance(result, Sum) and spread.rank:
            kwargs = (("beta", 0), *((key, arg) for key, arg in kwargs if key != "beta"))
    spread.emit(node.op, (*args, *node.args[at + 2 :]), [(out, result)], kwargs)


def _bias(spread: Spread, name: str, result: Place, out: Value) -> Ref:
    value = spread.full[name]
    dim = result.dim - len(out.shape) + len(value.shape) if isinstance(result, Split) else -1
    if isinstance(result, Split) and dim >= 0 and value.shape[dim] != 1:
        return spread.ref(name, Split(dim, result.blocks, result.padding))
    return spread.ref(name, WHOLE)


def _places(spread: Spread, a: str, b: str, row: int) -> tuple[Place, Place, Place]:
    """Where A and B have to be, and where their product is then."""
    here, there = spread.place[a], spread.place[b]
    if isinstance(here, Sum) or isinstance(there, Sum):
        return here, there, Sum()
    for split, of, other in ((here, a, b), (there, b, a)):  # each matrix of a batch by itself
        if isinstance(split, Split) and split.dim < row and spread.full[of].shape[:row] == spread.full[other].shape[:row]:
            return split, split, split
    rows, inner_a = _along(here, row), _along(here, row + 1)
    inner_b, columns = _along(there, row), _along(there, row + 1)
    if inner_a and inner_b and (inner_a.blocks, inner_a.padding) == (inner_b.blocks, inner_b.padding):  # padding is zero in both
        return here, there, Sum()
    if rows and (columns or inner_b) and not _keeps(spread, a, b):
        rows = None
    if inner_a and columns:
        inner_a = None
    if rows:
        return here, WHOLE, Split(row, rows.blocks, rows.padding)
    if columns:
        return WHOLE, there, Split(row + 1, columns.blocks, columns.padding)
    if inner_a and not inner_a.padding:
        return here, Split(row, inner_a.blocks), Sum()
    if inner_b and not inner_b.padding:
        return Split(row + 1, inner_b.blocks), there, Sum()
    return WHOLE, WHOLE, WHOLE


def _along(place: Place, dim: int) -> Split | None:
    return place if isinstance(place, Split) and place.dim == dim else None


def _keeps(spread: Spread, a: str, b: str) -> bool:
    """A keeps its rows, B is gathered: never a parameter, else what is smaller."""
    if spread.is_parameter(a) != spread.is_parameter(b):
        return spread.is_parameter(a)
    columns = isinstance(place := spread.place[b], Split) and place.dim == len(spread.full[b].shape) - 1
    return prod(spread.full[a].shape) >= prod(spread.full[b].shape) if columns else True
