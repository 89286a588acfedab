"""What a plan is: graphs with a home for every value and an offset for every buffer. No torch. Which graphs they are, choose.py decides."""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Protocol

from packhorse.device.device import Device
from packhorse.graph.ir import Graph
from packhorse.memory.bounds import lower_bound
from packhorse.memory.buffers import Buffer, Layout
from packhorse.memory.layout import lay_out, lay_out_around
from packhorse.mesh import Mesh
from packhorse.parallel.volume import CHECKSUM_BYTES, GREETING_BYTES, sent_bytes
from packhorse.parallel.zero import Zero
from packhorse.planning.flops import graph_flops, node_flops
from packhorse.planning.persistent import ALIGNMENT, Persistent
from packhorse.planning.placement import Placement, place
from packhorse.planning.timeline import timeline
from packhorse.units import align_up

NOTHING = Layout({}, 0, 0, ALIGNMENT, "empty")


@dataclass(frozen=True)
class GraphPlan:
    """One graph with a home for every value and an offset for every arena buffer.

    lent: when, and where, the lent runs of gradients are in use (Persistent.lent); floor: bytes of the arena's memory that are theirs; lent_offsets:
    where each of them begins. host: offsets in the host's pool of what waits there.
    """

    graph: Graph
    placement: Placement
    layout: Layout
    lent: tuple[tuple[Buffer, int], ...] = ()
    floor: int = 0
    lent_offsets: dict[str, int] = field(default_factory=dict)
    host: Layout = NOTHING

    @property
    def host_bytes(self) -> int:
        return self.host.height

    @property
    def arena_bytes(self) -> int:
        """Above the lent runs."""
        return max(0, self.layout.height - self.floor)

    def external_bytes_at(self) -> list[int]:
        """Bound on the bytes of external tensors alive while each node runs; one entry a node."""
        change = [0] * (len(self.graph.nodes) + 2)
        for storage in self.placement.storages:
            if storage.space == "external":
                change[storage.lower] += storage.size
                change[min(storage.upper, len(self.graph.nodes) + 1)] -= storage.size
        total, result = 0, []
        for step in change[: max(len(self.graph.nodes), 1)]:
            total += step
            result.append(total)
        return result

    @property
    def external_bytes(self) -> int:
        return max(self.external_bytes_at())

    @property
    def overhead_flops(self) -> int:
        """Flops of its mirrors."""
        return sum(node_flops(node, self.graph.values) for node in self.graph.nodes if node.phase == "recompute")

    def seconds(self, device: Device, mesh: Mesh) -> float:
        """What a run of it takes on a device, of one rank of a mesh."""
        return timeline(self.graph, device, mesh).seconds


@dataclass(frozen=True)
class LaidOut:
    """The plan of one program on this rank, and the bytes and seconds that it takes on the rank that needs most, of those that decide for all."""

    planned: GraphPlan
    arena_bytes: int
    external_bytes: int
    seconds: float = 0.0
    host_bytes: int = 0


class Needs(Protocol):
    """Whatever has an arena and external tensors."""

    @property
    def arena_bytes(self) -> int: ...

    @property
    def external_bytes(self) -> int: ...


@dataclass(frozen=True)
class Rest:
    """What a step needs besides the program that is being chosen: persistent bytes, and the other programs' arena and external tensors."""

    persistent_bytes: int
    arena_bytes: int = 0
    external_bytes: int = 0

    def peak(self, other: Needs) -> int:
        """Peak of the step with that program."""
        return self.persistent_bytes + max(self.arena_bytes, other.arena_bytes) + max(self.external_bytes, other.external_bytes)

    def along(self, planned: Needs) -> "Rest":
        """The same with one more program."""
        return Rest(self.persistent_bytes, max(self.arena_bytes, planned.arena_bytes), max(self.external_bytes, planned.external_bytes))


@dataclass(frozen=True)
class Options:
    """What a plan was asked for. recompute: a name of recompute/table.py, or "auto". budget: as planning/budget.py reads it. residency: one of MODES
    of planning/residency.py, optimizer_residency one of STATES, host_budget as that file reads it. sketch: buffers get no offsets, an arena is as
    high as the most that is alive at one time, and this rank decides alone: for a search that looks at many plans and runs none."""

    recompute: str = "auto"
    budget: int | str | None = None
    num_micro_batches: int = 1
    clip_norm: float | None = None
    mesh: Mesh = field(default_factory=Mesh)
    in_place: bool = True
    share: bool = True
    rank: int = 0
    zero_stage: int = 0
    residency: str = "auto"
    host_budget: int | str | None = None
    sketch: bool = False
    optimizer_residency: str = "auto"


@dataclass(frozen=True)
class Plan:
    """The plan of one training step: `programs` maps "agree", "first", "next", "last", "loss", "norm", "update" to their planned graphs.

    All bytes are of this rank. peak_bytes = persistent_bytes + arena_bytes + external_bytes.
    device: where seconds come from. keep_everything_bytes, keep_everything_seconds: peak and predicted seconds of the step that recomputes nothing.
    least_overhead_seconds: no plan within the budget takes fewer extra seconds (None where there is no limit). Both may be below zero where a budget
    has room for parameters that stay whole, which are gathered once.
    zero: the pass over programs of several ranks. needed: what all programs need together on the ranks that decide for all. `job` is what
    `packhorse.compile` needs besides (optimizer, loss, constants); it takes no part in comparisons.
    """

    programs: dict[str, GraphPlan]
    persistent: Persistent
    options: Options
    device: Device
    keep_everything_bytes: int
    keep_everything_seconds: float
    least_overhead_seconds: float | None = None
    zero: Zero | None = field(default=None, compare=False, repr=False)
    job: Any = field(default=None, compare=False, repr=False)
    needed: Rest | None = field(default=None, compare=False, repr=False)

    @property
    def persistent_bytes(self) -> int:
        """Parameters, gradients, optimizer states, buffers, metrics, constants and padding."""
        return self.persistent.num_bytes

    @property
    def arena_bytes(self) -> int:
        return max(p.arena_bytes for p in self.programs.values())

    @property
    def external_bytes(self) -> int:
        """Bound on what kernels allocate for their results at one instant."""
        return max(p.external_bytes for p in self.programs.values())

    @property
    def peak_bytes(self) -> int:
        return self.persistent_bytes + self.arena_bytes + self.external_bytes

    @property
    def host_bytes(self) -> int:
        """Of the host's memory: what persists there, and for saved values that wait and what comes to be updated."""
        return self.persistent.host_bytes + max(p.host_bytes for p in self.programs.values())

    @property
    def comm_bytes(self) -> int:
        """Bytes sent by this rank per optimizer step; one rank sends none."""
        if self.zero is None:
            return 0
        mesh = self.options.mesh
        greeting = GREETING_BYTES + (CHECKSUM_BYTES if mesh.tp > 1 else 0)
        return self._of_step(lambda planned: sent_bytes(planned.graph)) + greeting * (mesh.world_size - 1)

    @property
    def overhead_flops(self) -> int:
        """Flops of products, convolutions and attention that a step spends on recomputation."""
        return self._of_step(lambda planned: planned.overhead_flops)

    @property
    def overhead_seconds(self) -> float:
        """Predicted seconds that a step takes longer than the one that keeps everything (and gathers parameters two units at a time)."""
        return self.seconds - self.keep_everything_seconds

    @property
    def flops(self) -> int:
        """Flops of matrix products, convolutions and attention in one optimizer step, recomputation included."""
        return self._of_step(lambda planned: graph_flops(planned.graph))

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step on the device of the plan."""
        return self._of_step(lambda planned: planned.seconds(self.device, self.options.mesh))

    def _of_step(self, of: Callable[[GraphPlan], Any]) -> Any:
        """A sum over the programs of one step, each as often as it runs."""
        return sum(of(planned) * self.times(name) for name, planned in self.programs.items())

    def times(self, name: str) -> int:
        """How often a step runs a program."""
        return times_of(name, self.programs, self.options)

    def __str__(self) -> str:
        from packhorse.planning.ledger import ledger_of

        return str(ledger_of(self))

    def to_dict(self) -> dict[str, Any]:
        """The figures of the plan as JSON-able values; bytes and flops as integers."""
        from packhorse.planning.ledger import ledger_of

        return ledger_of(self).to_dict()


def times_of(name: str, programs: Container[str], options: Options) -> int:
    """How often a step of these programs runs one of them."""
    if name == "next":
        return options.num_micro_batches - 1 - ("last" in programs)
    return int(name != "agree" or options.mesh.world_size == 1)  # with several ranks weights are made to agree once, before the first step


def plan_graph(graph: Graph, persistent: Persistent, options: Options) -> GraphPlan:
    """Homes, then offsets, for one graph."""
    placement = place(graph, persistent.places(), options.in_place)
    buffers = [Buffer(s.name, s.lower, s.upper, s.size) for s in placement.storages if s.space == "arena"]
    if options.sketch:
        return GraphPlan(graph, placement, *_sketched(graph, placement, buffers, persistent))
    on_host = [Buffer(s.name, s.lower, s.upper, s.size) for s in placement.storages if s.space == "host"]
    host = lay_out(on_host, alignment=ALIGNMENT) if on_host else NOTHING
    if persistent.lent:
        lent = lent_buffers(graph, placement, persistent)
        return GraphPlan(graph, placement, lay_out_around(lent, buffers, ALIGNMENT), lent, persistent.floor, persistent.lent_offsets, host)
    return GraphPlan(graph, placement, lay_out(buffers, alignment=ALIGNMENT) if options.share else side_by_side(buffers), host=host)


def _sketched(
    graph: Graph, placement: Placement, buffers: list[Buffer], persistent: Persistent
) -> tuple[Layout, tuple[tuple[Buffer, int], ...], int, dict[str, int], Layout]:
    """Layouts that say only how much is alive at most."""
    lent = lent_buffers(graph, placement, persistent) if persistent.lent else ()
    most = max(persistent.floor, lower_bound([*buffers, *(buffer for buffer, _ in lent)], ALIGNMENT))
    on_host = lower_bound([Buffer(s.name, s.lower, s.upper, s.size) for s in placement.storages if s.space == "host"], ALIGNMENT)
    layouts = [Layout({}, height, height, ALIGNMENT, "not laid out") for height in (most, on_host)]
    return layouts[0], lent, persistent.floor, persistent.lent_offsets, layouts[1]


def lent_buffers(graph: Graph, placement: Placement, persistent: Persistent) -> tuple[tuple[Buffer, int], ...]:
    """Lifespans and offsets of the gradients in the lent runs: of those that the program makes from when they are made, of others always."""
    end = len(graph.nodes) + 1
    read = {placement.homes[i.value.name].key for i in graph.inputs if i.role == "grad"}
    made: dict[tuple[str, int], int] = {}
    maker = {v.name: time for time, node in enumerate(graph.nodes) for v in node.outputs if v is not None}
    for root, home in placement.homes.items():
        if home.key in persistent.lent and root in maker:
            made[home.key, home.offset] = min(maker[root], made.get((home.key, home.offset), end))
    for copy in placement.copies:
        if copy.home.key in persistent.lent:
            made[copy.home.key, copy.home.offset] = min(copy.time, made.get((copy.home.key, copy.home.offset), end))
    found = []
    for name, base in persistent.lent_offsets.items():
        run = persistent.by_name[name]
        if name in read or not any(key == name for key, _ in made):
            found.append((Buffer(f"run {name}", 0, end, run.num_bytes), base))
            continue
        for slot in run.slots:
            lower = made.get((name, slot.offset), 0)
            found.append((Buffer(f"run {name} {slot.target}", lower, end, slot.value.extent_bytes), base + slot.offset))
    return tuple(found)


def side_by_side(buffers: list[Buffer]) -> Layout:
    """Every buffer with bytes of its own (`share=False`): what the step would take without memory sharing."""
    offsets, end = {}, 0
    for buffer in buffers:
        offsets[buffer.name] = end
        end += align_up(buffer.size, ALIGNMENT)
    return Layout(offsets, end, lower_bound(buffers, ALIGNMENT), ALIGNMENT, "no sharing")
