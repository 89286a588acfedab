"""Plan -> Program: every value becomes an operand at an absolute byte offset; views vanish; slots are freed after their last use."""

from bisect import bisect_right
from dataclasses import replace

from packhorse.graph.ir import Arg, Ref, Value
from packhorse.graph.operators import operator
from packhorse.planning.placement import CopyOut
from packhorse.planning.plan import GraphPlan
from packhorse.program.program import Argument, Call, Copy, Instruction, Operand, Program


class _Lowering:
    def __init__(self, planned: GraphPlan):
        self.planned, self.graph = planned, planned.graph
        self.homes = planned.placement.homes
        self.starts = {"arena": planned.layout.offsets, "host": planned.host.offsets}

    def operand(self, value: Value, unread: bool = False) -> Operand:
        home = self.homes[value.root]
        if unread and home.space in ("arena", "external"):
            return Operand("hollow", "", 0, value.dtype, value.shape, value.strides, value.name, value.root, value.extent_bytes)
        space, start = home.space, self.starts[home.space][home.key] if home.space in self.starts else home.offset
        if home.key in self.planned.lent_offsets and space == "persistent":
            space, start = "arena", self.planned.lent_offsets[home.key] + home.offset
        return Operand(space, home.key, start + value.offset, value.dtype, value.shape, value.strides, value.name, value.root, value.extent_bytes)

    def arg(self, arg: Arg, unread: bool = False) -> Argument:
        if isinstance(arg, Ref):
            return self.operand(self.graph.values[arg.name], unread)
        if isinstance(arg, tuple):
            return tuple(self.arg(item, unread) for item in arg)
        return arg

    def instructions(self) -> list[Instruction]:
        copies: dict[int, list[CopyOut]] = {}
        for copy in self.planned.placement.copies:
            copies.setdefault(copy.time, []).append(copy)
        found: list[Instruction] = []
        for time, node in enumerate(self.graph.nodes):
            if not node.is_view:
                row = operator(node.op)
                args = tuple(self.arg(a, position in row.unread) for position, a in enumerate(node.args))
                kwargs = tuple((key, self.arg(value)) for key, value in node.kwargs)
                outputs = tuple(None if v is None else self.operand(v) for v in node.outputs)
                adopts = row.kind == "adopt"
                found.append(Call(node.op, args, kwargs, outputs, self.scratch(time), adopts, (), time, node.phase, node.module, node.source))
            found += [self.copy(copy, time) for copy in copies.get(time, ())]
        return self.free(found)

    def free(self, found: list[Instruction]) -> list[Instruction]:
        """Each external slot is let go with the last instruction of its lifespan."""
        times = [instruction.time for instruction in found]
        for storage in self.planned.placement.storages:
            if storage.space == "external":
                last = bisect_right(times, storage.upper - 1) - 1
                found[last] = replace(found[last], frees=(*found[last].frees, storage.name))
        return found

    def copy(self, copy: CopyOut, time: int) -> Copy:
        value = self.graph.values[copy.name]
        kept = f"{copy.target[0]} {copy.target[1]}"
        space, offset = "persistent", copy.home.offset
        if copy.home.key in self.planned.lent_offsets:
            space, offset = "arena", self.planned.lent_offsets[copy.home.key] + copy.home.offset
        target = Operand(space, copy.home.key, offset, value.dtype, value.shape, copy.strides, kept, kept, value.extent_bytes)
        return Copy(self.operand(value), target, (), time)

    def scratch(self, time: int) -> Operand | None:
        name = self.planned.placement.scratch.get(time)
        if name is None:
            return None
        storage = next(s for s in self.planned.placement.storages if s.name == name)
        return Operand(storage.space, name, self.starts[storage.space][name], "u8", (storage.size,), (1,), name, name, storage.size)


def lower(planned: GraphPlan) -> Program:
    """The program of one planned graph."""
    lowering = _Lowering(planned)
    after = len(planned.graph.nodes)
    copied = {copy.target: lowering.copy(copy, after - 1).target for copy in planned.placement.copies}
    outputs = tuple(
        (out.role, out.target, copied.get((out.role, out.target)) or lowering.operand(planned.graph.values[out.name]))
        for out in planned.graph.outputs
        if out.role != "random"
    )
    return Program(
        planned.graph.name,
        tuple(lowering.instructions()),
        planned.arena_bytes,
        planned.external_bytes,
        outputs,
        planned.placement.hollow_bytes,
        planned.floor,
        planned.host_bytes,
    )
