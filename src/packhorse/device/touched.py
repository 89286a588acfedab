"""Bytes that an operator reads and writes, from shapes alone. No torch."""

from math import prod

from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Arg, Node, Ref, Value
from packhorse.graph.operators import operator

# Positions of arguments of which a kernel reads as many elements as it is asked for, not all: as much as it writes.
_GATHERED = {
    "aten.embedding.default": 0,
    "packhorse.part_embedding.default": 0,
    "aten.index_select.default": 0,
    "aten.gather.default": 0,
    "aten.index.Tensor": 0,
    "aten.nll_loss_forward.default": 0,
}


def node_bytes(node: Node, values: dict[str, Value]) -> int:
    """Bytes that a node reads and writes: of its arguments and results, without arguments of which only the shape is read.

    A tensor of which elements are picked (the weight of an embedding) counts as many bytes as the result, at most its own.
    """
    total = written = sum(_bytes(value) for value in node.outputs if value is not None)
    unread, gathered = operator(node.op).unread, _GATHERED.get(node.op)
    for position, arg in enumerate(node.args):
        if isinstance(arg, (Ref, tuple)) and position not in unread:
            read = _read(arg, values)
            total += min(read, written) if position == gathered else read
    return total


def _bytes(value: Value) -> int:
    """Bytes that are touched: an expanded tensor has fewer than elements, a strided one fewer than its extent."""
    shape = value.shape
    if 0 in value.strides:
        shape = tuple(dim for dim, stride in zip(shape, value.strides) if stride or dim == 0)
    return prod(shape) * ITEMSIZE[value.dtype]


def _read(arg: Arg, values: dict[str, Value]) -> int:
    if isinstance(arg, Ref):
        return _bytes(values[arg.name])
    return sum(_read(item, values) for item in arg) if isinstance(arg, tuple) else 0
