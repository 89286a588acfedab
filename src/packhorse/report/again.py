"""What a plan makes again: by operator and module, how often, the bytes that it frees between forward and backward, and the flops. No torch."""

import re
from dataclasses import dataclass, replace

from packhorse.device.device import Device
from packhorse.graph.ir import Graph
from packhorse.graph.liveness import lifespans, reads
from packhorse.planning.flops import node_flops
from packhorse.planning.waiting import original


@dataclass(frozen=True, slots=True)
class Again:
    """One operator in one place of the model; the numbers of a path are written `*`, so that equal blocks are one row.

    values   storages made again, each counted once;  nodes  operator calls that make them again
    freed    bytes that would else be kept from forward to backward;  flops, seconds  of all those calls
    """

    module: str
    op: str
    source: str
    values: int
    nodes: int
    freed: int
    flops: int
    seconds: float


def made_again(graph: Graph, device: Device) -> list[Again]:
    """One row for each operator and place with a recomputing node (views left out), those that free the most bytes first."""
    freed = _freed(graph)
    counted: set[str] = set()
    rows: dict[tuple[str, str, str], Again] = {}
    for node in graph.nodes:
        if node.phase != "recompute" or node.is_view:
            continue
        key = (re.sub(r"\d+", "*", node.module), node.op, node.source)
        row = rows.get(key, Again(*key, values=0, nodes=0, freed=0, flops=0, seconds=0.0))
        fresh = {original(v.name) for v in node.outputs if v is not None and v.base is None} - counted
        counted |= fresh
        rows[key] = replace(
            row,
            values=row.values + len(fresh),
            nodes=row.nodes + 1,
            freed=row.freed + sum(freed.get(name, 0) for name in fresh),
            flops=row.flops + node_flops(node, graph.values),
            seconds=row.seconds + device.seconds(node, graph.values),
        )
    return sorted(rows.values(), key=lambda row: (-row.freed, -row.flops, row.module, row.op))


def _freed(graph: Graph) -> dict[str, int]:
    """Root -> bytes, for values that a backward node reads as a mirror made after the original was dead."""
    spans, freed = lifespans(graph), {}
    for node in graph.nodes:
        if node.phase == "backward" and not node.is_view:
            for name in reads(node):
                root = graph.values[name].root
                first = original(root)
                if first != root and first in spans and spans[first].upper <= spans[root].lower:
                    freed[first] = graph.values[first].extent_bytes
    return freed
