"""The graph: one straight-line functional program, as data. No torch.

    Graph  ::= Input* Node* Output*
    Input  ::= Value, role ("param", "buffer", "batch", ...), target (its name outside the graph)
    Node   ::= Value, ... = operator(Arg, ...)        reads values defined above it, defines new ones, changes nothing
    Output ::= the name of a Value, role, target: after the graph has run, `target` takes that value
    Arg    ::= Ref(name) | Const(name) | int | float | bool | str | None | tuple of Arg

A Value with `base` set is a view: it has no bytes of its own but shares those of `base` (always a root, never another view).
Random state is a value: a random node consumes one (`rng_in`) and defines the next (`rng_out`), so draws are chained in forward order. There is one
chain for each generator: it begins with the Input of role "random" whose target is the generator's name ("default" is torch's own), and a node that
draws from another than that has the kwarg ("generator", Const("generator", name)). The Output of role "random" is the last state of a chain.
Data types first, then the checker (verify.py), the text form (text.py), the oracle (runtime/reference.py): in that order they can be read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Union

from packhorse.graph.dtypes import ITEMSIZE


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the graph, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """An argument that is a constant of torch by its name ("float32", "strided", "contiguous_format", "cpu" ...), with its kind; or a generator."""

    kind: str  # "dtype", "layout", "memory_format", "device", "generator"
    name: str


Arg = Union[Ref, Const, int, float, bool, str, None, tuple["Arg", ...]]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor (or a random state, dtype "rng") as the graph sees it.

    shape and strides are in elements; `offset` is the distance in bytes from the start of the storage that it lies in.
    base None: the value owns that storage; otherwise it is a view of the root value named `base`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    base: str | None = None
    offset: int = 0

    @property
    def root(self) -> str:
        return self.base or self.name

    @property
    def num_elements(self) -> int:
        n = 1
        for dim in self.shape:
            n *= dim
        return n

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first element to the end of the last one; 0 for an empty tensor."""
        if self.num_elements == 0:
            return 0
        return (1 + sum((dim - 1) * stride for dim, stride in zip(self.shape, self.strides))) * ITEMSIZE[self.dtype]

    @property
    def is_dense(self) -> bool:
        """Every byte of its extent belongs to exactly one element: the dims, by stride, are a permutation of row-major ones."""
        step = 1
        for stride, dim in sorted((s, d) for s, d in zip(self.strides, self.shape) if d > 1):
            if stride != step:
                return False
            step *= dim
        return True


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an operator. `outputs` has one entry per result; None where the operator returns None there."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[Value | None, ...]
    phase: str = "forward"  # "forward", "recompute" (a mirror of a forward node), "backward" or "update"
    module: str = ""  # path of the module whose forward called it, "" for the outermost
    source: str = ""  # file:line of the user's code
    rng_in: str | None = None
    rng_out: str | None = None
    mark: str = ""  # one of MARKS: what the user asks of its results, by hand
    mark_name: str = ""  # the user's name for what is kept
    replicated: bool = False  # its results have the same bits on all tensor parallel ranks, each of which has all of them

    @property
    def is_view(self) -> bool:
        """Defines views only: nothing is computed when it runs."""
        values = [v for v in self.outputs if v is not None]
        return bool(values) and all(v.base is not None for v in values)

    @property
    def generator(self) -> str:
        """Name of the generator that it draws from, if it draws: the chain of its random states."""
        return next((arg.name for key, arg in self.kwargs if key == "generator" and isinstance(arg, Const)), "default")

    def arg_names(self) -> Iterator[str]:
        """Names of the values that it reads, with repeats, in argument order."""
        found: list[str] = []
        for arg in self.args:
            _collect_refs(arg, found)
        for _, arg in self.kwargs:
            _collect_refs(arg, found)
        return iter(found)


@dataclass(frozen=True, slots=True)
class Input:
    value: Value
    role: str  # one of ROLES_IN
    target: str  # name of the parameter, buffer, batch leaf, ... that it stands for


@dataclass(frozen=True, slots=True)
class Output:
    name: str
    role: str  # one of ROLES_OUT
    target: str


MARKS = ("", "keep", "drop")
ROLES_IN = ("param", "master", "buffer", "batch", "constant", "grad", "state", "metric", "random")
ROLES_OUT = ("param", "master", "buffer", "grad", "state", "metric", "random")


@dataclass(frozen=True)
class Graph:
    """A checked straight-line program (see the module docstring); `verify` says whether it is one."""

    name: str
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    @cached_property
    def values(self) -> dict[str, Value]:
        """name -> value, of all inputs, results and random states."""
        table = {i.value.name: i.value for i in self.inputs}
        for node in self.nodes:
            table.update((v.name, v) for v in node.outputs if v is not None)
            if node.rng_out is not None:
                table[node.rng_out] = Value(node.rng_out, "rng", (), ())
        return table

    def with_nodes(self, nodes: list[Node] | tuple[Node, ...], name: str | None = None) -> "Graph":
        return replace(self, nodes=tuple(nodes), name=name or self.name)

    def users(self) -> dict[str, list[int]]:
        """value name -> indices of the nodes that read it, in order, once each."""
        table: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.arg_names()):
                table.setdefault(name, []).append(index)
        return table


def refs_in(arg: Arg) -> Iterator[str]:
    """Names of the values inside one argument."""
    found: list[str] = []
    _collect_refs(arg, found)
    return iter(found)


def _collect_refs(arg: Arg, found: list[str]) -> None:
    """Passes ask this of every node many times: a list is several times as fast as nested generators."""
    if type(arg) is Ref:
        found.append(arg.name)
    elif type(arg) is tuple:
        for item in arg:
            _collect_refs(item, found)


def map_refs(arg: Arg, change) -> Arg:
    """The argument with every Ref replaced by `change(name)`."""
    if isinstance(arg, Ref):
        return change(arg.name)
    if isinstance(arg, tuple):
        return tuple(map_refs(item, change) for item in arg)
    return arg


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))
