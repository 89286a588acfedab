"""What each byte of a planned graph is for, at each time: which value lies in a storage from when to when, and of which kind it is. No torch."""

from dataclasses import dataclass

from packhorse.graph.ir import Graph, Node
from packhorse.graph.liveness import reads
from packhorse.graph.operators import ALL_GATHER
from packhorse.planning.placement import Storage
from packhorse.planning.plan import GraphPlan
from packhorse.planning.waiting import parked_as

KINDS = ("kept", "recomputed", "slice", "leaving", "back", "gathered", "temporary", "output", "scratch")
ON_HOST = "on the host"  # the kind of what lies in the host's pool


@dataclass(frozen=True, slots=True)
class Stay:
    """One value in its storage, over the times [lower, upper): until it dies, or until a result takes the storage over.

    name     the value; "scratch" for what a kernel uses besides
    node     index of the node that makes it
    size     bytes of the storage
    offset   in the arena, or in the host's pool; None if the kernel allocates it (external)
    kind     one of KINDS, or ON_HOST. "kept" is made in forward and read in backward or by a recomputation, "recomputed" is made again. Of saved
             values that wait elsewhere: "leaving" until they are cut or copied, "slice", "back" when they have come back. "gathered": parameters
    """

    name: str
    node: int
    lower: int
    upper: int
    size: int
    offset: int | None
    kind: str


def stays(planned: GraphPlan) -> list[Stay]:
    """Every stay of one planned graph on the device, by time. At each time their sizes add up to what is alive in arena and external slots."""
    return _stays(planned, [s for s in planned.placement.storages if s.space != "host"])


def stays_on_host(planned: GraphPlan) -> list[Stay]:
    """The same in the host's pool."""
    return _stays(planned, [s for s in planned.placement.storages if s.space == "host"])


def _stays(planned: GraphPlan, storages: list[Storage]) -> list[Stay]:
    graph, end = planned.graph, max(len(planned.graph.nodes), 1)
    maker = {v.name: time for time, node in enumerate(graph.nodes) for v in node.outputs if v is not None}
    outputs = {graph.values[out.name].root for out in graph.outputs if out.role != "random"}
    later = _read_later(graph)
    parked = {name for kind, name in map(parked_as, maker) if kind in ("slice", "host")}
    offsets = {"arena": planned.layout.offsets, "host": planned.host.offsets}
    found = []
    for storage in storages:
        offset = offsets[storage.space][storage.name] if storage.space in offsets else None
        if not storage.roots:
            found.append(Stay("scratch", storage.lower, storage.lower, min(storage.upper, end), storage.size, offset, "scratch"))
            continue
        roots = sorted(storage.roots, key=lambda root: maker[root])
        ends = [*(maker[root] for root in roots[1:]), min(storage.upper, end)]
        for root, upper in zip(roots, ends):
            node = graph.nodes[maker[root]]
            kind = ON_HOST if storage.space == "host" else _kind(root, node, later, outputs, parked)
            found.append(Stay(root, maker[root], maker[root], upper, storage.size, offset, kind))
    return sorted(found, key=lambda stay: (stay.lower, stay.name))


def _read_later(graph: Graph) -> set[str]:
    """Roots whose contents a backward or a recomputing node reads."""
    users = [node for node in graph.nodes if node.phase in ("backward", "recompute") and not node.is_view]
    return {graph.values[name].root for node in users for name in reads(node)}


def _kind(root: str, node: Node, later: set[str], outputs: set[str], parked: set[str]) -> str:
    waits, _ = parked_as(root)
    if waits:
        return "slice" if waits == "slice" else "back"
    if root in parked:
        return "leaving"
    if node.op == ALL_GATHER and node.phase != "update":
        return "gathered"
    if node.phase == "recompute":
        return "recomputed"
    if node.phase == "forward" and root in later:
        return "kept"
    return "output" if root in outputs else "temporary"
