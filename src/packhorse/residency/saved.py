"""Values that the forward pass makes and the backward pass reads, and how they may wait in between. No torch."""

from dataclasses import dataclass

from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Graph, Value
from packhorse.graph.liveness import reads
from packhorse.graph.operators import is_collective
from packhorse.units import align_up

ALIGNMENT = 64  # of buffers: below it nothing is saved


@dataclass(frozen=True)
class Parked:
    """How a saved value waits. shard: as this rank's slice (P_a). host: in host memory."""

    shard: bool
    host: bool


@dataclass(frozen=True)
class Residency:
    """parked: (root value, how it waits); all others stay. depth: copies in each direction that may be under way at one time: with more, a
    computation that is faster than the link waits less for it and needs more memory."""

    parked: tuple[tuple[str, Parked], ...]
    depth: int = 2


KEPT = Residency(())


@dataclass(frozen=True)
class Saved:
    """A value that the forward pass makes and the backward pass reads. last: the node that makes it, or reads it last in the forward pass; first: the
    node that reads it first after that. replicated: all tensor parallel ranks have the same."""

    value: Value
    last: int
    first: int
    replicated: bool

    def waiting_bytes(self, how: Parked, tp: int) -> int:
        """Bytes of the device while it waits."""
        return 0 if how.host else align_up(slice_of(self.value, tp).extent_bytes, ALIGNMENT) if how.shard else self.value.extent_bytes


def saved_values(graph: Graph) -> list[Saved]:
    """Every value that may wait elsewhere, in the order in which they are made: what nobody hands out, and no collective makes."""
    values = graph.values
    pivot = backward_begins(graph)
    handed = {values[out.name].root for out in graph.outputs if out.role != "random"}
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        if node.is_view:
            continue
        for name in reads(node):
            root = values[name].root
            if index < pivot:
                last[root] = index
            else:
                first.setdefault(root, index)
    found = []
    for index, node in enumerate(graph.nodes[:pivot]):
        if is_collective(node.op):
            continue
        for value in node.outputs:
            if value is not None and value.base is None and value.name in first and value.name not in handed and value.extent_bytes:
                found.append(Saved(value, last.get(value.name, index), first[value.name], node.replicated))
    return found


def backward_begins(graph: Graph) -> int:
    """Index of the first node that is not of the forward pass."""
    return next((index for index, node in enumerate(graph.nodes) if node.phase in ("backward", "recompute")), len(graph.nodes))


def slice_of(value: Value, tp: int) -> Value:
    """One rank's part of a value's storage, of as many elements on each rank."""
    return Value(f".slice.{value.name}", value.dtype, (-(-elements_of(value) // tp),), (1,))


def elements_of(value: Value) -> int:
    """Of the storage, gaps included."""
    return value.extent_bytes // ITEMSIZE[value.dtype]
