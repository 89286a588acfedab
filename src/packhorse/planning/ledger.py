"""What the bytes of a plan are, line by line, and which instant is the peak. Predicted here; `Step.ledger()` adds what was measured."""

from dataclasses import dataclass, field
from typing import Any

from packhorse.graph.ir import Node
from packhorse.graph.operators import ALL_GATHER, WAIT
from packhorse.parallel.zero import BUCKET
from packhorse.planning.placement import Storage
from packhorse.planning.plan import GraphPlan, Plan
from packhorse.planning.step_seconds import in_words, step_seconds
from packhorse.planning.waiting import parked_as, tally
from packhorse.units import format_bytes


@dataclass(frozen=True, slots=True)
class Alive:
    """One storage alive at the peak: its value, bytes, kind, and where it was made."""

    name: str
    num_bytes: int
    kind: str  # one of _LINES, or "external ..."
    place: str


@dataclass(frozen=True)
class Ledger:
    """All bytes of this rank. `lines`: (name, bytes) of what adds up to the peak; `alive`: the largest storages at the peak instant."""

    lines: tuple[tuple[str, int], ...]
    predicted_peak_bytes: int
    predicted_comm_bytes: int
    instant: str
    alive: tuple[Alive, ...]
    programs: tuple[tuple[str, int, int, int], ...]  # name, arena height, lower bound, external
    measured_peak_bytes: int | None = None
    measured_comm_bytes: int | None = None
    predicted_host_bytes: int = 0
    measured_host_bytes: int | None = None
    measured: tuple[tuple[str, int], ...] = ()
    outside_bytes: int | None = None
    differences: tuple[tuple[str, int, int], ...] = ()  # external tensors whose planned and measured bytes differ
    seconds_lines: tuple[str, ...] = ()  # the predicted step, in words
    residency_line: str = ""  # where saved values wait, in words
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; bytes as integers."""
        return {
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "predicted_host_bytes": self.predicted_host_bytes,
            "measured_host_bytes": self.measured_host_bytes,
            "predicted_comm_bytes": self.predicted_comm_bytes,
            "measured_comm_bytes": self.measured_comm_bytes,
            "lines": {name: num_bytes for name, num_bytes in self.lines},
            "measured": {name: num_bytes for name, num_bytes in self.measured},
            "outside_bytes": self.outside_bytes,
            "differences": [list(item) for item in self.differences],
            "instant": self.instant,
            "alive": [{"name": a.name, "bytes": a.num_bytes, "kind": a.kind, "place": a.place} for a in self.alive],
            "programs": [
                {"name": name, "arena_bytes": height, "lower_bound": bound, "fragmentation": height - bound, "external_bytes": external}
                for name, height, bound, external in self.programs
            ],
            **self.extra,
        }

    def _recomputation(self) -> list[str]:
        """What recomputation costs, in words; nothing where there is none."""
        told = self.extra
        if not told.get("overhead_flops") and not told.get("recomputed_nodes"):
            return []
        least = told["least_overhead_seconds"]
        bound = "" if least is None or least <= 0 else f"; no plan in this budget takes less than {least:.3g} s"
        share = told["overhead_seconds"] / max(told["seconds"] - told["overhead_seconds"], 1e-12)
        return [
            f"recomputation ({told['recompute']}): {told['recomputed_nodes']} calls again, {told['overhead_flops']} flops, predicted "
            f"{told['overhead_seconds']:.3g} s a step ({share:.1%}) on {told['device']}{bound}; keeping everything takes "
            f"{format_bytes(told['keep_everything_bytes'])}"
        ]

    def __str__(self) -> str:
        rows = [f"  {name:<34}{format_bytes(num_bytes):>14}" for name, num_bytes in self.lines if num_bytes]
        rows.append(f"  {'peak':<34}{format_bytes(self.predicted_peak_bytes):>14}   ({self.predicted_peak_bytes} bytes)")
        if self.measured_peak_bytes is not None:
            rows.append(f"  {'measured':<34}{format_bytes(self.measured_peak_bytes):>14}   ({self.measured_peak_bytes} bytes)")
        if self.predicted_comm_bytes:
            sent = "" if self.measured_comm_bytes is None else f", measured {format_bytes(self.measured_comm_bytes)}"
            rows.append(f"  {'sent to other ranks each step':<34}{format_bytes(self.predicted_comm_bytes):>14}{sent}")
        if self.predicted_host_bytes:
            there = "" if self.measured_host_bytes is None else f", measured {format_bytes(self.measured_host_bytes)}"
            rows.append(f"  {'on the host':<34}{format_bytes(self.predicted_host_bytes):>14}{there}")
            states = self.extra.get("states_on_host_bytes", 0)
            rows += [f"  {'of it optimizer states':<34}{format_bytes(states):>14}"] if states else []
        rows += [f"  {line}" for line in self.seconds_lines]
        rows += [f"  gathered whole: {what}" for what in self.extra.get("gathered_whole", ())]
        if self.outside_bytes is not None:
            rows.append(f"  {'kernel workspaces, outside the plan':<34}{format_bytes(self.outside_bytes):>13}")
        rows += [f"  %{name}: planned {planned} bytes, measured {measured}" for name, planned, measured in self.differences]
        rows += [*self._recomputation(), *([self.residency_line] if self.residency_line else [])]
        rows.append("programs" + " " * 20 + "arena         lower bound   fragmentation  external")
        for name, height, bound, external in self.programs:
            rows.append(
                f"  {name:<22}{format_bytes(height):>14}{format_bytes(bound):>14}{format_bytes(height - bound):>14}{format_bytes(external):>14}"
            )
        rows.append(f"peak instant: {self.instant}")
        rows += [f"  {format_bytes(a.num_bytes):>14}  {a.kind:<20} {a.name}  {a.place}" for a in self.alive[:10]]
        return "\n".join(["ledger (bytes of this rank)", *rows])


# kind of what is alive -> its line
_LINES = {
    "saved value": "saved values",
    "saved value, slice": "saved values",
    "saved value, back": "saved values that came back",
    "temporary": "temporaries",
    "output": "outputs",
    "scratch": "scratch",
    "gathered parameters": "gathered parameters",
    "communication": "communication",
}


def ledger_of(plan: Plan) -> Ledger:
    """The predicted ledger of a plan."""
    name, planned, time = _peak(plan)
    kinds = dict.fromkeys(_LINES.values(), 0)
    alive, external = [], 0
    for item in _alive(planned, time):
        alive.append(item)
        if item.kind.startswith("external"):
            external += item.num_bytes
        else:
            kinds[_LINES[item.kind]] += item.num_bytes
    persistent = [(f"persistent: {kind}", num_bytes) for kind, num_bytes in plan.persistent.bytes_by_kind().items()]
    rest = plan.arena_bytes - sum(kinds.values())
    lines = [*persistent, *((f"arena: {kind}", num_bytes) for kind, num_bytes in kinds.items())]
    if plan.persistent.lent:
        lines.append(("arena: in memory of gradients to come", min(rest, 0)))
    lines.append(("arena: alignment and gaps", max(rest, 0) if plan.persistent.lent else rest))
    lines.append(("external tensors (bound)", plan.external_bytes))
    node = planned.graph.nodes[time] if planned.graph.nodes else None
    seconds, waits = step_seconds(plan), tally(p.graph for p in plan.programs.values())
    return Ledger(
        tuple(lines),
        plan.peak_bytes,
        plan.comm_bytes,
        f"{name}, time {time} of {len(planned.graph.nodes)}" + (f": {_node_place(node)}" if node else ""),
        tuple(sorted(alive, key=lambda a: (-a.num_bytes, a.name))),
        tuple((n, p.arena_bytes, max(0, p.layout.lower_bound - p.floor), p.external_bytes) for n, p in plan.programs.items()),
        predicted_host_bytes=plan.host_bytes,
        seconds_lines=tuple(in_words(seconds, plan.device)),
        residency_line=waits.in_words(plan.options),
        extra={
            "peak_bytes": plan.peak_bytes,
            "persistent_bytes": plan.persistent_bytes,
            "arena_bytes": plan.arena_bytes,
            "external_bytes": plan.external_bytes,
            "comm_bytes": plan.comm_bytes,
            "host_bytes": plan.host_bytes,
            "states_on_host_bytes": plan.persistent.host_bytes,
            "communication_buffer_bytes": max((s.size for p in plan.programs.values() for s in p.placement.storages if _is_bucket(s)), default=0),
            "gathered_whole": _gathered_whole(plan),
            "recompute": plan.options.recompute,
            "residency": plan.options.residency,
            **waits.to_dict(),
            "recomputed_nodes": sum(_is_recomputed(node) for p in plan.programs.values() for node in p.graph.nodes),
            "device": plan.device.name,
            "overhead_flops": plan.overhead_flops,
            "overhead_seconds": plan.overhead_seconds,
            "least_overhead_seconds": plan.least_overhead_seconds,
            "keep_everything_bytes": plan.keep_everything_bytes,
            "flops": plan.flops,
            "seconds": plan.seconds,
            "busy_s": seconds.busy,
            "stalls_s": seconds.stalls,
            **({"seconds_band": list(plan.device.band)} if plan.device.levels else {}),
        },
    )


def _gathered_whole(plan: Plan) -> list[str]:
    """What tensor parallel ranks send because an operator has no rule for parts, once for each place."""
    found = () if plan.zero is None else plan.zero.gathered
    return list(
        dict.fromkeys(
            f"{g.num_elements} elements for {g.op} in module {g.module or '(outermost)'!r} at {g.source or 'an unknown line'}" for g in found
        )
    )


def _is_recomputed(node: Node) -> bool:
    return node.phase == "recompute" and not node.is_view and node.op not in (ALL_GATHER, WAIT)


def _is_bucket(storage: Storage) -> bool:
    return bool(storage.roots) and storage.roots[0].startswith(BUCKET)


def _peak(plan: Plan) -> tuple[str, GraphPlan, int]:
    """Program and time at which arena and external bytes alive are the most."""
    best: tuple[int, str, GraphPlan, int] | None = None
    for name, planned in plan.programs.items():
        change = [0] * (len(planned.graph.nodes) + 2)
        for storage in planned.placement.storages:
            if storage.space != "host":
                change[storage.lower] += storage.size
                change[min(storage.upper, len(planned.graph.nodes) + 1)] -= storage.size
        total = 0
        for time in range(max(len(planned.graph.nodes), 1)):
            total += change[time]
            if best is None or total > best[0]:
                best = (total, name, planned, time)
    assert best is not None
    return best[1:]


def _alive(planned: GraphPlan, time: int) -> list[Alive]:
    graph, outputs = planned.graph, {planned.graph.values[o.name].root for o in planned.graph.outputs if o.role != "random"}
    backward = {
        n
        for node in graph.nodes
        if node.phase in ("backward", "recompute") and not node.is_view
        for n in (graph.values[a].root for a in node.arg_names())
    }
    makers = {v.name: node for node in graph.nodes for v in node.outputs if v is not None}
    found = []
    for storage in planned.placement.storages:
        if storage.space == "host" or not storage.lower <= time < storage.upper:
            continue
        if not storage.roots:
            found.append(Alive(storage.name, storage.size, "scratch", _node_place(graph.nodes[storage.lower])))
            continue
        root = storage.roots[0]
        parked, _ = parked_as(root)
        if parked in ("whole", "fetched"):
            kind = "saved value, back"
        elif parked == "slice":
            kind = "saved value, slice"
        elif makers[root].op == ALL_GATHER and makers[root].phase != "update":
            kind = "gathered parameters"
        elif root.startswith(BUCKET):
            kind = "communication"
        elif makers[root].phase == "forward" and any(r in backward for r in storage.roots):
            kind = "saved value"
        else:
            kind = "output" if any(r in outputs for r in storage.roots) else "temporary"
        found.append(Alive(f"%{root}", storage.size, f"external {kind}" if storage.space == "external" else kind, _node_place(makers[root])))
    return found


def _node_place(node: Node) -> str:
    where = " ".join(part for part in (node.module, node.source) if part)
    return f"{node.phase} {node.op}" + (f" in {where}" if where else "")
