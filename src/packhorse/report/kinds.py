"""What each byte of a planned graph is for, at each time: which value lies in a storage from when to when, and of which kind it is. No torch."""

import re
from dataclasses import dataclass

from packhorse.graph.ir import Graph, Node
from packhorse.graph.liveness import reads
from packhorse.planning.plan import GraphPlan

KINDS = ("kept", "recomputed", "temporary", "output", "scratch")
_MIRROR = re.compile(r"\.mirror\d+\.(.+)")


@dataclass(frozen=True, slots=True)
class Stay:
    """One value in its storage, over the times [lower, upper): until it dies, or until a result takes the storage over.

    name     the value; "scratch" for what a kernel uses besides
    node     index of the node that makes it
    size     bytes of the storage
    offset   in the arena; None if the kernel allocates it (external)
    kind     one of KINDS: "kept" is made in forward and read in backward or by a recomputation, "recomputed" is made again
    """

    name: str
    node: int
    lower: int
    upper: int
    size: int
    offset: int | None
    kind: str


def original(name: str) -> str:
    """The name of the value of which `name` is a mirror; `name` itself if it is none."""
    match = _MIRROR.fullmatch(name)
    return name if match is None else match[1]


def stays(planned: GraphPlan) -> list[Stay]:
    """Every stay of one planned graph, by time. At each time their sizes add up to what is alive in arena and external slots."""
    graph, end = planned.graph, max(len(planned.graph.nodes), 1)
    maker = {v.name: time for time, node in enumerate(graph.nodes) for v in node.outputs if v is not None}
    outputs = {graph.values[out.name].root for out in graph.outputs if out.role != "random"}
    later = _read_later(graph)
    found = []
    for storage in planned.placement.storages:
        if storage.space == "host":
            continue
        offset = planned.layout.offsets[storage.name] if storage.space == "arena" else None
        if not storage.roots:
            found.append(Stay("scratch", storage.lower, storage.lower, min(storage.upper, end), storage.size, offset, "scratch"))
            continue
        roots = sorted(storage.roots, key=lambda root: maker[root])
        ends = [*(maker[root] for root in roots[1:]), min(storage.upper, end)]
        for root, upper in zip(roots, ends):
            node = graph.nodes[maker[root]]
            found.append(Stay(root, maker[root], maker[root], upper, storage.size, offset, _kind(root, node, later, outputs)))
    return sorted(found, key=lambda stay: (stay.lower, stay.name))


def _read_later(graph: Graph) -> set[str]:
    """Roots whose contents a backward or a recomputing node reads."""
    users = [node for node in graph.nodes if node.phase in ("backward", "recompute") and not node.is_view]
    return {graph.values[name].root for node in users for name in reads(node)}


def _kind(root: str, node: Node, later: set[str], outputs: set[str]) -> str:
    if node.phase == "recompute":
        return "recomputed"
    if node.phase == "forward" and root in later:
        return "kept"
    return "output" if root in outputs else "temporary"
