"""Where a value of the whole graph is, on the tp ranks. No torch.

Whole   every rank has all of it
Split   each rank has its part of one dim (parallel/split.py)
Sum     each rank has a term, all of its shape: the value is the sum of them
"""

from dataclasses import dataclass, replace

from packhorse.graph.ir import Value, contiguous_strides
from packhorse.parallel.split import Split


@dataclass(frozen=True)
class Whole:
    """Every rank has all of it."""


@dataclass(frozen=True)
class Sum:
    """Each rank has a term. lazy: most of the term is zero (the gradient of a part), so it is added up as late as possible."""

    lazy: bool = False


@dataclass(frozen=True)
class Owed:
    """A value that is at `place`, and a sum that is not yet added to it."""

    place: Whole | Split


Place = Whole | Split | Sum | Owed
WHOLE = Whole()


def local_value(value: Value, place: Place, degree: int, name: str | None = None) -> Value:
    """What a rank has of it, as a storage of its own: dense, with the dims in the order of the value's own strides."""
    shape = place.local(value.shape, degree) if isinstance(place, Split) else value.shape
    order = memory_order(value.shape, value.strides) if value.is_dense else tuple(range(len(shape)))
    return replace(value, name=name or value.name, shape=shape, strides=strides_in_order(shape, order), base=None, offset=0)


def memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The dims of a dense tensor from the outermost in memory to the innermost; dims of one element where their strides put them."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))


def strides_in_order(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides with the dims in this order in memory."""
    dense = contiguous_strides(tuple(shape[dim] for dim in order))
    return tuple(dense[order.index(dim)] for dim in range(len(shape)))


def is_dim(dim: int, shape: tuple[int, ...]) -> int:
    """A dim that may be counted from the end, counted from the start."""
    return dim % max(len(shape), 1)
