"""The program: straight-line instructions with absolute byte offsets. Nothing is decided after this. No torch.

    Program     ::= Instruction*
    Instruction ::= Call | Copy
    Call        ::= results = operator(args), results written to their operands (or adopted), then the slots in `frees` are let go
    Copy        ::= target <- source
    Operand     ::= a tensor at a byte offset of the arena, of the pool on the host, of a run of persistent storage, of an external slot,
                    or of a batch leaf

Views are operands, not instructions: they cost nothing when the program runs.
"""

from dataclasses import dataclass
from typing import Union

from packhorse.graph.ir import Const


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in memory. `offset` in bytes from the start of the space ("arena", "host"), the run ("persistent"), the slot's tensor ("external") or
    the leaf ("batch"); shape and strides in elements. `value` is its name in the graph, `root` the storage that it shows. Space "hollow": only the
    shape is read; it points at bytes that are reserved and never touched."""

    space: str
    key: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    value: str
    root: str
    extent_bytes: int


Argument = Union[Operand, Const, int, float, bool, str, None, tuple["Argument", ...]]


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel. `adopts`: it allocates its results, which fill the slots that the operands in `outputs` name."""

    op: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[Operand | None, ...]
    scratch: Operand | None
    adopts: bool
    frees: tuple[str, ...]
    time: int
    phase: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Copy:
    """target <- source, element by element."""

    source: Operand
    target: Operand
    frees: tuple[str, ...]
    time: int


Instruction = Union[Call, Copy]


@dataclass(frozen=True)
class Program:
    """A planned graph as instructions over an arena of `arena_bytes`. `external_bytes`: bound on adopted bytes alive at one instant.

    floor: so many bytes below the arena belong to gradients, and to the arena until they are made; offsets count from their beginning.
    host_bytes: of the pool of what waits on the host."""

    name: str
    instructions: tuple[Instruction, ...]
    arena_bytes: int
    external_bytes: int
    outputs: tuple[tuple[str, str, Operand], ...]  # role, target, where it is after the program
    hollow_bytes: int = 0  # the largest hollow operand
    floor: int = 0
    host_bytes: int = 0

    @property
    def end(self) -> int:
        """One past the last byte of the arena."""
        return self.floor + self.arena_bytes


def operands_of(instruction: Instruction) -> tuple[list[Operand], list[Operand]]:
    """(read, written) operands of one instruction; hollow ones are neither."""
    if isinstance(instruction, Copy):
        return [instruction.source], [instruction.target]
    read: list[Operand] = []

    def collect(arg: Argument) -> None:
        if isinstance(arg, Operand):
            if arg.space != "hollow":
                read.append(arg)
        elif isinstance(arg, tuple):
            for item in arg:
                collect(item)

    for arg in (*instruction.args, *(value for _, value in instruction.kwargs)):
        collect(arg)
    return read, [out for out in instruction.outputs if out is not None]
