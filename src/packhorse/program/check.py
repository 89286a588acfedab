"""The checker of Program: a slow simulation of who wrote which byte. It shares nothing with liveness, placement, layout or lowering;
of the operators it knows which arguments a result may lie over."""

from packhorse.errors import CheckError
from packhorse.graph.operators import WAIT, is_tensor_collective, operator
from packhorse.program.program import Call, Operand, Program, operands_of


class _Memory:
    """Byte ranges of one space -> the name of the storage that was last written there."""

    def __init__(self) -> None:
        self.owned: list[tuple[int, int, str]] = []  # disjoint [start, end) owner

    def write(self, start: int, end: int, owner: str) -> None:
        kept = []
        for a, b, name in self.owned:
            if a < start:
                kept.append((a, min(b, start), name))
            if b > end:
                kept.append((max(a, end), b, name))
        if end > start:
            kept.append((start, end, owner))
        self.owned = [(a, b, name) for a, b, name in kept if b > a]

    def owners(self, start: int, end: int) -> set[str]:
        """Names that own a byte of [start, end); "" for bytes that nobody wrote."""
        found, covered = set(), 0
        for a, b, name in self.owned:
            overlap = min(b, end) - max(a, start)
            if overlap > 0:
                found.add(name)
                covered += overlap
        return found if covered == end - start else found | {""}


def check_program(program: Program, persistent_bytes: dict[str, int]) -> None:
    """Raises CheckError unless every operand holds, when it is read, exactly the storage that it names, and every byte lies inside its space.

    persistent_bytes: run name -> bytes. External slots must be filled before they are read and freed once.
    """
    pools, runs = {"arena": _Memory(), "host": _Memory()}, {name: _Memory() for name in persistent_bytes}
    slots: dict[str, str | None] = {}
    freed: set[str] = set()
    under_way: dict[str, tuple[list[Operand], list[Operand]]] = {}  # collective -> what it reads, what it writes
    for index, instruction in enumerate(program.instructions):
        where = f"program {program.name}, instruction {index} (time {instruction.time})"
        read, written = operands_of(instruction)
        scratch = instruction.scratch if isinstance(instruction, Call) else None
        for operand in [*read, *written, *([scratch] if scratch else [])]:
            _inside(operand, program, persistent_bytes, where)
        if isinstance(instruction, Call) and instruction.op == WAIT:
            tag = str(dict(instruction.kwargs)["tag"])
            if under_way.pop(tag, None) is None:
                raise CheckError(f"{where}: waits for {tag!r}, which is not under way")
        for tag, (reads, writes) in under_way.items():
            if any(_overlap(a, b) for a in [*read, *written] for b in writes) or any(_overlap(a, b) for a in written for b in reads):
                raise CheckError(f"{where}: touches what the collective {tag!r} works on, before the wait for it")
        begins = isinstance(instruction, Call) and instruction.op != WAIT and not is_tensor_collective(instruction.op)
        if isinstance(instruction, Call) and begins and "tag" in dict(instruction.kwargs):
            under_way[str(dict(instruction.kwargs)["tag"])] = (read, written)
        for operand in read:
            start, end = operand.offset, operand.offset + operand.extent_bytes
            held = pools[operand.space].owners(start, end) if operand.space in pools and start < end else {operand.root}
            if operand.space == "arena" and end <= program.floor:  # a gradient that was there before
                held = held - {""} or {operand.root}
            if held != {operand.root}:
                raise CheckError(f"{where}: reads %{operand.value} at [{start}, {end}), but those bytes hold {sorted(held)}")
            if operand.space == "external" and slots.get(operand.key) != operand.root:
                raise CheckError(f"{where}: reads %{operand.value} from slot {operand.key}, which holds {slots.get(operand.key)}")
            if operand.space == "persistent":
                # what stands there at the start of the program is an input; after a write, only that value may be read
                wrong = runs[operand.key].owners(start, end) - {operand.root, ""}
                if wrong and start < end:
                    raise CheckError(f"{where}: reads %{operand.value} from {operand.key}, but {sorted(wrong)} was written there")
        if isinstance(instruction, Call) and not instruction.adopts:
            _check_overlaps(instruction, where)
        if scratch is not None:
            pools["arena"].write(scratch.offset, scratch.offset + scratch.extent_bytes, scratch.root)
        for operand in written:
            start, end = operand.offset, operand.offset + operand.extent_bytes
            if scratch is not None and operand.space == "arena" and max(start, scratch.offset) < min(end, scratch.offset + scratch.extent_bytes):
                raise CheckError(f"{where}: the scratch overlaps its own result %{operand.value}")
            if operand.space in pools:
                pools[operand.space].write(start, end, operand.root)
            elif operand.space == "persistent":
                runs[operand.key].write(start, end, operand.root)
            else:
                slots[operand.key] = operand.root
        for name in instruction.frees:
            if name not in slots or name in freed:
                raise CheckError(f"{where}: frees slot {name}, which is not filled")
            freed.add(name)
            slots[name] = None
    if under_way:
        raise CheckError(f"program {program.name}: nobody waits for {sorted(under_way)}")
    if any(owner is not None for owner in slots.values()):
        raise CheckError(f"program {program.name}: slots {[n for n, o in slots.items() if o is not None]} are never freed")
    for role, target, operand in program.outputs:
        memory = runs.get(operand.key) if operand.space == "persistent" else pools.get(operand.space)
        held = memory.owners(operand.offset, operand.offset + operand.extent_bytes) if memory else set()
        if operand.extent_bytes and not held <= {operand.root, ""}:
            raise CheckError(f"program {program.name}: at the end {role} {target!r} should hold {operand.root}, but holds {sorted(held)}")


def _check_overlaps(call: Call, where: str) -> None:
    """A result may lie over an argument only where the operator allows it, byte for byte like it; and never over another result."""
    row = operator(call.op)
    results = [(k, out) for k, out in enumerate(call.outputs) if out is not None and out.extent_bytes]
    for k, out in results:
        for other, second in results:
            if other < k and _overlap(out, second):
                raise CheckError(f"{where}: results %{out.value} and %{second.value} overlap")
        for position, arg in enumerate(call.args):
            if position in row.unread:
                continue
            for read in arg if isinstance(arg, tuple) else (arg,):
                if not isinstance(read, Operand) or not _overlap(out, read):
                    continue
                same = (out.offset, out.shape, out.strides, out.dtype) == (read.offset, read.shape, read.strides, read.dtype)
                allowed = (k == 0 and position in row.in_place) or (k, position) in row.updates
                if not same or not allowed:
                    raise CheckError(f"{where}: {call.op} writes %{out.value} over its argument %{read.value}, which it still reads")


def _overlap(a: Operand, b: Operand) -> bool:
    pools = ("arena", "host")
    if (a.space, "" if a.space in pools else a.key) != (b.space, "" if b.space in pools else b.key) or a.space == "hollow":
        return False
    return max(a.offset, b.offset) < min(a.offset + a.extent_bytes, b.offset + b.extent_bytes)


def _inside(operand: Operand, program: Program, persistent_bytes: dict[str, int], where: str) -> None:
    end = operand.offset + operand.extent_bytes
    limit = {"arena": program.end, "host": program.host_bytes, "persistent": persistent_bytes.get(operand.key, 0)}.get(operand.space)
    if operand.offset < 0 or (limit is not None and end > limit):
        raise CheckError(f"{where}: %{operand.value} covers [{operand.offset}, {end}) of {operand.space} {operand.key}, which has {limit} bytes")
