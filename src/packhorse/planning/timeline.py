"""When everything in a run of a graph happens, as a device file foretells it. No torch.

The computation runs the nodes one after another. What a node starts beside it (a collective, a copy to or from the host) queues up on its stream:
one for each axis of the mesh, one for each direction of copies. A wait holds the computation up until what it names has ended. So overlap is exactly
as the program has it; what streams take from each other (memory bandwidth, links that they share) is not counted.
"""

from collections import defaultdict
from dataclasses import dataclass

from packhorse.device.device import Device
from packhorse.graph.ir import Graph, Node
from packhorse.graph.operators import ALL_REDUCE, TENSOR_SUM, TO_HOST, WAIT, is_collective, is_copy, is_tensor_collective
from packhorse.mesh import Mesh
from packhorse.parallel.volume import sent_by

COMPUTATION = "computation"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that ran beside the computation, or that it waited for at once. stream: an axis of the mesh, "to host" or "from host"; name: its tag;
    node: index of the node that started it."""

    stream: str
    name: str
    node: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One run of a graph, in seconds from its beginning.

    seconds: until everything has ended. busy: stream -> seconds in use, of COMPUTATION too. stalls: stream -> seconds that the computation waited
    for it. events: all that was not computation, in the order of the program. positions: when the computation comes to each node.
    """

    seconds: float
    busy: dict[str, float]
    stalls: dict[str, float]
    events: tuple[Event, ...]
    positions: tuple[float, ...]


def timeline(graph: Graph, device: Device, mesh: Mesh) -> Timeline:
    """The run of a graph by one rank of a mesh, every rank doing the same at the same time.

    Raises UserError where the device's links do not join as many ranks as the mesh has.
    """
    now, computed = 0.0, []
    free: dict[str, float] = {}  # stream -> when what was started on it has ended
    ends: dict[tuple[str, str], tuple[str, float]] = {}  # axis and tag -> stream and end
    busy: dict[str, float] = defaultdict(float)
    stalls: dict[str, float] = defaultdict(float)
    events, positions = [], []

    def hold_up(stream: str, until: float) -> float:
        if until > now:
            stalls[stream] += until - now
        return max(now, until)

    for index, node in enumerate(graph.nodes):
        positions.append(now)
        if node.op == WAIT:
            now = hold_up(*ends[_axis_and_tag(node)])
            continue
        stream = _stream(node, device)
        if stream is None:
            computed.append(device.seconds(node, graph.values))
            now += computed[-1]
            continue
        begin = max(now, free.get(stream, 0.0))
        took = seconds_beside(node, graph, device, mesh)
        free[stream] = begin + took
        busy[stream] += took
        axis, tag = _axis_and_tag(node)
        events.append(Event(stream, tag, index, begin, free[stream]))
        if is_tensor_collective(node.op):
            now = hold_up(stream, free[stream])
        else:
            ends[axis, tag] = stream, free[stream]
    busy[COMPUTATION] = sum(computed)
    # of a run without stalls this is the sum of its nodes to the last bit
    seconds = busy[COMPUTATION] + sum(stalls.values()) + max(0.0, max(free.values(), default=0.0) - now)
    return Timeline(seconds, dict(busy), dict(stalls), tuple(events), tuple(positions))


def seconds_beside(node: Node, graph: Graph, device: Device, mesh: Mesh) -> float:
    """What a collective or a copy takes on its stream, from its start; 0 for any other node, and where the device has no link for it.

    A collective over tp is one of neighbouring ranks; groups of dp and of all ranks reach over the whole mesh.
    """
    if is_copy(node.op):
        out = node.outputs[0]
        assert out is not None
        return 0.0 if device.host_link is None else device.host_link.seconds(out.extent_bytes)
    if not device.levels or node.op == WAIT or not (is_collective(node.op) or is_tensor_collective(node.op)):
        return 0.0
    given = dict(node.kwargs)
    ranks = given["ranks"]
    assert isinstance(ranks, int)
    span = mesh.tp if given["axis"] == "tp" else mesh.world_size
    rounds = 2 if node.op == TENSOR_SUM or node.op.startswith(ALL_REDUCE) else 1
    return device.collective_seconds(sent_by(node, graph), ranks, span, rounds)


def _stream(node: Node, device: Device) -> str | None:
    """Where what the node starts runs; None for what the computation does itself."""
    if is_copy(node.op):
        return "to host" if node.op == TO_HOST else "from host"
    if is_collective(node.op) or (device.levels and is_tensor_collective(node.op)):
        return _axis_and_tag(node)[0]
    return None


def _axis_and_tag(node: Node) -> tuple[str, str]:
    given = dict(node.kwargs)
    return str(given["axis"]), str(given["tag"])
