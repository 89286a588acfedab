"""Bytes that a rank sends in the collectives of a graph. No torch."""

from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Graph, Node, Ref
from packhorse.graph.operators import (
    ALL_GATHER,
    ALL_GATHER_OTHERS,
    ALL_REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_OWN,
    TENSOR_GATHER,
    TENSOR_SCATTER,
    TENSOR_SUM,
    tensor_shard,
)
from packhorse.parallel.pieces import own_pieces

GREETING_BYTES = 16  # to each other rank before each step: the number of the step, and what it is going to run
CHECKSUM_BYTES = 8  # of the batch, told as well where there are several tp ranks


def sent_bytes(graph: Graph) -> int:
    """By one rank in one run. A gather sends the rank's shard to all others; a reduce-scatter sends each other rank what lies in its shard; an
    all-reduce is one of each, as everywhere in the field (2 (N-1)/N of the tensors; ZeRO, section 7.1)."""
    return sum(sent_by(node, graph) for node in graph.nodes)


def sent_by(node: Node, graph: Graph) -> int:
    """By one rank in one collective; 0 for any other node."""
    if node.op in (ALL_GATHER, ALL_GATHER_OTHERS, TENSOR_GATHER):
        assert isinstance(node.args[0], Ref)
        return graph.values[node.args[0].name].extent_bytes * (_kwarg(node, "ranks") - 1)
    of_tensor = node.op in (TENSOR_SUM, TENSOR_SCATTER)
    if not of_tensor and not node.op.startswith((REDUCE_SCATTER, REDUCE_SCATTER_OWN, ALL_REDUCE)):
        return 0
    given = [graph.values[arg.name] for arg in node.args if isinstance(arg, Ref)]
    itemsize, ranks, rank = ITEMSIZE[given[0].dtype], _kwarg(node, "ranks"), _kwarg(node, "rank")
    sizes = [value.num_elements for value in given]
    if of_tensor:
        offsets, shard = (0,), tensor_shard(node.op, sizes[0], ranks)
    else:
        offsets, shard = _kwarg(node, "offsets"), _kwarg(node, "shard")
    streams = [sum(count for _, _, count in own_pieces(offsets, sizes, shard, r)) for r in range(ranks)]
    scattered = sum(streams) - streams[rank]
    everywhere = node.op == TENSOR_SUM or node.op.startswith(ALL_REDUCE)
    gathered = streams[rank] * (ranks - 1) if everywhere else 0
    return (scattered + gathered) * itemsize


def _kwarg(node: Node, name: str):
    return dict(node.kwargs)[name]
