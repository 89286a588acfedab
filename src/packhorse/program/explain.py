"""The text of one stage of a plan, for people: `packhorse explain --stage graph|plan|program`."""

from collections.abc import Mapping

from packhorse.errors import UserError
from packhorse.graph.ir import Graph, Node
from packhorse.graph.operators import TO_HOST, WAIT, is_copy
from packhorse.graph.saved import saved_by_operator
from packhorse.graph.text import print_graph
from packhorse.parallel.volume import sent_by
from packhorse.planning.plan import GraphPlan, Plan
from packhorse.planning.waiting import WAYS, tally
from packhorse.program.lower import lower
from packhorse.program.program import Argument, Call, Copy, Operand, Program
from packhorse.units import format_bytes

STAGES = ("graph", "plan", "program")
_WAITING_ROWS = 40


def explain(plan: Plan, stage: str) -> str:
    """The graphs as text that parses back; the plan as a table of storages with lifespans and offsets; or the program's instructions.

    Raises UserError for another stage.
    """
    if stage == "graph":
        return "\n".join(print_graph(planned.graph) for planned in plan.programs.values())
    if stage == "plan":
        return "\n".join(
            [_persistent(plan), _saved(plan), _waiting(plan), *(_storages(name, planned) for name, planned in plan.programs.items()), str(plan)]
        )
    if stage == "program":
        return "\n".join(print_program(lower(planned), sent_by_time(planned.graph)) for planned in plan.programs.values())
    raise UserError(f"there is no stage {stage!r}; the stages of a step are {', '.join(STAGES)}")


def _persistent(plan: Plan) -> str:
    lines = [f"persistent storage: {format_bytes(plan.persistent_bytes)} ({plan.persistent_bytes} bytes)"]
    for run in plan.persistent.runs:
        lines.append(f"  run {run.name}: {run.kind}, {run.num_bytes} bytes, {run.padding_bytes} of them padding")
        lines += [f"    {slot.offset:>12}  {slot.target} {slot.value.dtype}{list(slot.value.shape)}" for slot in run.slots]
    return "\n".join(lines)


def _saved(plan: Plan) -> str:
    """What each operator of a micro-batch keeps for the backward pass."""
    saved = saved_by_operator(plan.programs["first"].graph)
    saved.pop(TO_HOST, None)  # what it makes is not on the device
    table = sorted(saved.items(), key=lambda item: -item[1])
    return "\n".join(["saved from forward to backward, by operator", *(f"  {num_bytes:>14}  {op}" for op, num_bytes in table)])


def _waiting(plan: Plan) -> str:
    """Where each saved value of a micro-batch waits: the largest first, the smallest in one line for each way."""
    found = tally(planned.graph for planned in plan.programs.values()).found
    lines = [f"where saved values wait\n  {'bytes':>14} {'on the device':>14} {'on the host':>14}  {'way':<18} value"]
    for w in found[:_WAITING_ROWS]:
        place = " ".join(part for part in (w.maker.module, w.maker.source) if part)
        lines.append(f"  {w.num_bytes:>14} {w.device_bytes:>14} {w.host_bytes:>14}  {w.way:<18} %{w.name}  {place}")
    for way in WAYS:
        some = [w for w in found[_WAITING_ROWS:] if w.way == way]
        if some:
            sums = (sum(getattr(w, key) for w in some) for key in ("num_bytes", "device_bytes", "host_bytes"))
            lines.append("  {:>14} {:>14} {:>14}".format(*sums) + f"  {way:<18} {len(some)} smaller one{'s' * (len(some) > 1)}")
    return "\n".join(lines)


def _storages(name: str, planned: GraphPlan) -> str:
    """One line a storage: lifespan, bytes, offset, and the values that live in it one after another."""
    layout = planned.layout
    lines = [
        f"program {name}: {len(planned.graph.nodes)} nodes, arena {layout.height} bytes (lower bound {layout.lower_bound}, "
        f"fragmentation {layout.fragmentation}, {layout.method}), external at most {planned.external_bytes} bytes"
        + (f", on the host {planned.host_bytes} bytes" if planned.host_bytes else ""),
        f"  {'lifespan':>14} {'bytes':>12} {'offset':>12}  values",
    ]
    makers: dict[str, Node] = {v.name: node for node in planned.graph.nodes for v in node.outputs if v is not None}
    for s in sorted(planned.placement.storages, key=lambda s: (s.lower, s.name)):
        offset = {"arena": str(layout.offsets.get(s.name)), "host": f"host {planned.host.offsets.get(s.name)}"}.get(s.space, "external")
        values = " -> ".join(f"%{root}" for root in s.roots) or s.name
        where = f"  {makers[s.roots[0]].module} {makers[s.roots[0]].source}" if s.roots else ""
        lines.append(f"  {f'[{s.lower}, {s.upper})':>14} {s.size:>12} {offset:>12}  {values}{where}")
    lines += [f"  copy after {c.time}: %{c.name} -> {c.home.key}+{c.home.offset}" for c in planned.placement.copies]
    return "\n".join(lines)


def sent_by_time(graph: Graph) -> dict[int, int]:
    """Time of a node that starts a collective -> bytes that this rank sends in it."""
    return {time: sent_by(node, graph) for time, node in enumerate(graph.nodes) if _is_beside(node) and node.op != WAIT and not is_copy(node.op)}


def print_program(program: Program, sent: Mapping[int, int] | None = None) -> str:
    """One instruction a line, with absolute byte offsets. A collective, and a copy to or from the host, has two: where it starts and where its end is
    waited for, under one tag.

    sent: time -> bytes, as `sent_by_time`.
    """
    lines = [f"program {program.name}: arena {program.arena_bytes} bytes, external at most {program.external_bytes} bytes"]
    for instruction in program.instructions:
        frees = f"  free {', '.join(instruction.frees)}" if instruction.frees else ""
        if isinstance(instruction, Copy):
            lines.append(f"{instruction.time:>5}  {_operand(instruction.target)} <- copy {_operand(instruction.source)}{frees}")
        else:
            lines.append((_beside(instruction, sent or {}) if _is_beside(instruction) else _call(instruction)) + frees)
    return "\n".join(lines)


def _call(call: Call) -> str:
    outs = ", ".join("_" if o is None else _operand(o) for o in call.outputs)
    args = ", ".join([*map(_argument, call.args), *(f"{k}={_argument(v)}" for k, v in call.kwargs)])
    scratch = f" scratch {_operand(call.scratch)}" if call.scratch else ""
    how = "adopt " if call.adopts else ""
    return f"{call.time:>5}  {outs} <- {how}{call.op}({args}){scratch}  # {call.phase} | {call.module} | {call.source}"


def _is_beside(call: Call | Node) -> bool:
    """It starts a collective or a copy to or from the host, or waits for the end of one: these alone have a tag."""
    return any(name == "tag" for name, _ in call.kwargs)


def _beside(call: Call, sent: Mapping[int, int]) -> str:
    tag = dict(call.kwargs)["tag"]
    if call.op == WAIT:
        return f"{call.time:>5}  wait   {tag}  # {call.phase}"
    outs = ", ".join(_operand(o) for o in call.outputs if o is not None)
    args = ", ".join(map(_argument, call.args))
    volume = f" sends {sent[call.time]} bytes" if call.time in sent else ""
    if is_copy(call.op):
        volume = f" copies {sum(o.extent_bytes for o in call.outputs if o is not None)} bytes"
    return f"{call.time:>5}  start  {tag}:{volume}  {outs} <- {call.op}({args})  # {call.phase} | {call.module}"


def _operand(operand: Operand) -> str:
    place = {
        "arena": f"arena+{operand.offset}",
        "host": f"host+{operand.offset}",
        "external": f"slot {operand.key}+{operand.offset}",
        "batch": f"batch {operand.key}+{operand.offset}",
    }
    where = place.get(operand.space, f"{operand.key}+{operand.offset}" if operand.space == "persistent" else "hollow")
    return f"%{operand.value}@[{where}]"


def _argument(arg: Argument) -> str:
    if isinstance(arg, Operand):
        return _operand(arg)
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(_argument, arg)) + "]"
    return str(getattr(arg, "name", arg))
