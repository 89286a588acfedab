"""Where what outlives a step lies: parameters, gradients, optimizer states, buffers, metrics, constants, as runs of flat storage.

A run is one contiguous piece of memory of one dtype. Parameters are sorted into runs by (dtype, trained or not, parameter group); inside a run
each starts at a multiple of 64 bytes, and what that wastes is padding, a line of its own in the ledger. The gradient of a run and each
of its optimizer states have the same offsets, so that an optimizer works on whole runs, not on single parameters.

With several data parallel ranks a run is cut into as many equal shards, one a rank (ZeRO, section 5.1). A rank holds the whole run and owns one shard
of it, or holds its shard alone: then the slots are pieces, the part of each tensor that lies in the shard.

Of a parameter that is cut over tensor parallel ranks a slot is this rank's part (parallel/part.py), and a run holds such parts only or none. A part's
padding is real memory, zero in parameters and gradients, and a line of its own in the ledger ("stated padding").
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Graph, Value
from packhorse.parallel.part import Part
from packhorse.units import align_up

ALIGNMENT = 64
ROLES = {
    "parameters": "param",
    "master weights": "master",
    "gradients": "grad",
    "optimizer states": "state",
    "buffers": "buffer",
    "metrics": "metric",
    "constants": "constant",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor inside a run, or a piece of one. `offset` in bytes from the start of the run; `value` gives dtype, shape and strides, flat for
    a piece, whose first element is the tensor's number `begin` in the order of memory. part: which elements of a larger tensor this one is."""

    role: str
    target: str
    offset: int
    value: Value
    begin: int = 0
    part: Part | None = None

    @property
    def stated_padding(self) -> int:
        """Elements here that are in no tensor of the model."""
        if self.part is None:
            return 0
        return self.value.num_elements - self.part.before(self.begin + self.value.num_elements) + self.part.before(self.begin)


@dataclass(frozen=True)
class Run:
    """One piece of flat storage. kind: "parameters", "master weights", "gradients", "optimizer states", "buffers", "metrics",
    "constants".

    num_ranks, rank: it is cut into so many shards, and this rank's is the `rank`-th. whole: the run that this one is a shard of, if it is one.
    on_host: it lies in the host's memory, and takes none of the device's.
    """

    name: str
    kind: str
    dtype: str
    num_bytes: int
    slots: tuple[Slot, ...]
    num_ranks: int = 1
    rank: int = 0
    whole: "Run | None" = None
    on_host: bool = False

    @property
    def padding_bytes(self) -> int:
        return self.num_bytes - sum(slot.value.extent_bytes for slot in self.slots)

    @property
    def stated_padding_bytes(self) -> int:
        """Of tensors, where a vocabulary was made longer so that it can be cut."""
        return sum(slot.stated_padding for slot in self.slots) * ITEMSIZE[self.dtype]

    @property
    def is_split(self) -> bool:
        """It holds parts of tensors that are cut over tensor parallel ranks."""
        return any(slot.part is not None for slot in self.layout.slots)

    @property
    def is_numbers(self) -> bool:
        """It holds one number for each parameter, such as step counts, and no tensors of the parameters' shapes."""
        return self.kind == "optimizer states" and [slot.target for slot in self.layout.slots] == [self.name]

    @property
    def role(self) -> str:
        """Of every slot in it."""
        return ROLES[self.kind]

    @property
    def layout(self) -> "Run":
        """The whole run: where every tensor lies, on whichever rank."""
        return self.whole or self

    @property
    def shard_bytes(self) -> int:
        return self.layout.num_bytes // self.num_ranks

    @property
    def own_offset(self) -> int:
        """Bytes from the start of what this rank holds to its shard."""
        return 0 if self.whole else self.rank * self.shard_bytes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Target -> byte offset in the whole run."""
        return {slot.target: slot.offset for slot in self.layout.slots}


@dataclass(frozen=True)
class Persistent:
    """All runs, and where each persistent tensor of the graphs lies: (role, target) -> (run name, byte offset).

    lent: runs of gradients, in this order at the bottom of the arena's memory. Before a step has made a gradient its bytes are lent to the arena.
    """

    runs: tuple[Run, ...]
    lent: tuple[str, ...] = ()

    @cached_property
    def lent_offsets(self) -> dict[str, int]:
        """Lent run -> its first byte in the arena's memory."""
        offsets, end = {}, 0
        for name in self.lent:
            offsets[name] = end
            end = align_up(end + self.by_name[name].num_bytes, ALIGNMENT)
        return offsets

    @property
    def floor(self) -> int:
        """Bytes of the arena's memory that are the lent runs'."""
        return sum(align_up(self.by_name[name].num_bytes, ALIGNMENT) for name in self.lent)

    def places(self) -> dict[tuple[str, str], tuple[str, int, tuple[int, ...]]]:
        """(role, target) -> (run name, byte offset, strides in elements). All that is held of a run has the target "run <name>", this rank's shard
        "shard <name>", and what lies before and after it "before <name>", "after <name>"."""
        table = {(slot.role, slot.target): (run.name, slot.offset, slot.value.strides) for run in self.runs for slot in run.slots}
        for run in self.runs:
            table.setdefault((run.role, f"run {run.name}"), (run.name, 0, (1,)))
            if run.num_ranks > 1:
                table[run.role, f"shard {run.name}"] = (run.name, run.own_offset, (1,))
                table[run.role, f"before {run.name}"] = (run.name, 0, (1,))
                table[run.role, f"after {run.name}"] = (run.name, run.own_offset + run.shard_bytes, (1,))
        return table

    @cached_property
    def by_name(self) -> dict[str, Run]:
        """Run name -> run."""
        return {run.name: run for run in self.runs}

    @property
    def num_bytes(self) -> int:
        """Of the device."""
        return sum(run.num_bytes for run in self.runs if not run.on_host)

    @property
    def host_bytes(self) -> int:
        """Of the host."""
        return sum(run.num_bytes for run in self.runs if run.on_host)

    def bytes_by_kind(self) -> dict[str, int]:
        """Kind -> bytes on the device without padding, then "padding", and "stated padding" where there is any: that of tensors, of every kind."""
        table: dict[str, int] = {}
        here = [run for run in self.runs if not run.on_host]
        for run in here:
            table[run.kind] = table.get(run.kind, 0) + run.num_bytes - run.padding_bytes - run.stated_padding_bytes
        table["padding"] = sum(run.padding_bytes for run in here)
        stated = sum(run.stated_padding_bytes for run in here)
        return table | ({"stated padding": stated} if stated else {})


def misfit(graph: Graph, persistent: Persistent) -> str:
    """The first input or output of the graph whose dtype or size is not that of the place where it persists, in words; "" if all fit."""
    homes = {(slot.role, slot.target): slot.value for run in persistent.runs for slot in run.slots}
    ends = [(i.role, i.target, i.value) for i in graph.inputs] + [
        (o.role, o.target, graph.values[o.name]) for o in graph.outputs if o.role != "random"
    ]
    for role, target, value in ends:
        home = homes.get((role, target))
        if home is not None and (home.dtype, home.num_elements) != (value.dtype, value.num_elements):
            return f"the {target} is {value.dtype}{list(value.shape)}, planned as {home.dtype}{list(home.shape)}"
    return ""


def holds_models_own(run: Run) -> bool:
    """The run holds the model's own parameters: its dtype is the one in its label. Copies in fewer bits, or master weights in more, are not."""
    return run.kind in ("parameters", "master weights") and run.name.split(".")[1] == run.dtype


def make_run(
    name: str, kind: str, role: str, tensors: list[tuple[str, Value]], align: int | None = None, parts: Mapping[str, Part] | None = None
) -> Run:
    """A run that holds the named tensors (all of one dtype) in order, each at a multiple of `align` elements: without it, of 64 bytes. parts: of
    those that are cut."""
    dtype = tensors[0][1].dtype
    assert all(value.dtype == dtype for _, value in tensors), name
    step = ALIGNMENT if align is None else align * ITEMSIZE[dtype]
    slots, end = [], 0
    for target, value in tensors:
        slots.append(Slot(role, target, end, value, part=(parts or {}).get(target)))
        end = align_up(end + value.extent_bytes, step)
    return Run(name, kind, dtype, end, tuple(slots))


def like(run: Run, name: str, kind: str, role: str, dtype: str | None = None) -> Run:
    """A run with the slots of `run` under another role and in another dtype: the gradients of its parameters, or one of their optimizer states.

    Every tensor stands at the element offset that it has in `run`.
    """
    dtype = dtype or run.dtype
    slots = [
        Slot(
            role,
            f"{name}/{s.target}" if role == "state" else s.target,
            s.offset // ITEMSIZE[run.dtype] * ITEMSIZE[dtype],
            replace(s.value, dtype=dtype),
            s.begin,
            s.part,
        )
        for s in run.slots
    ]
    whole = like(run.whole, name, kind, role, dtype) if run.whole else None
    return Run(name, kind, dtype, run.num_bytes // ITEMSIZE[run.dtype] * ITEMSIZE[dtype], tuple(slots), run.num_ranks, run.rank, whole)


def divided(run: Run, num_ranks: int, rank: int, align: int) -> Run:
    """The run, padded so that it can be cut into equal shards of a multiple of `align` elements each."""
    return replace(run, num_bytes=align_up(run.num_bytes, num_ranks * align * ITEMSIZE[run.dtype]), num_ranks=num_ranks, rank=rank)


def shard_of(run: Run) -> Run:
    """What a rank holds that holds only its shard of the run."""
    size, itemsize = run.shard_bytes, ITEMSIZE[run.dtype]
    first = run.rank * size
    slots = []
    for s in run.slots:
        start, end = max(s.offset, first), min(s.offset + s.value.extent_bytes, first + size)
        if start < end:
            piece = Value(s.value.name, s.value.dtype, ((end - start) // itemsize,), (1,))
            slots.append(Slot(s.role, s.target, start - first, piece, (start - s.offset) // itemsize, s.part))
    return replace(run, num_bytes=size, slots=tuple(slots), whole=run)


def seen_by(persistent: Persistent, rank: int) -> Persistent:
    """What another rank of the same axis holds: its own shards of the same runs."""
    runs = []
    for run in persistent.runs:
        if run.num_ranks > 1:
            run = replace(run, rank=rank) if run.whole is None else shard_of(replace(run.whole, rank=rank))
        runs.append(run)
    return replace(persistent, runs=tuple(runs))
