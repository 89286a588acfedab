"""What every method asks of a graph, as integers: which storages a node makes and reads, how large they are, what its kernel costs. No torch.

Nodes are named by their index in the graph, storages by a number of their own. Views have neither: who reads a view reads its root.
"""

from dataclasses import dataclass
from functools import cached_property

from packhorse.graph.ir import Graph, Ref
from packhorse.graph.liveness import reads
from packhorse.graph.operators import operator
from packhorse.planning.placement import Places, place
from packhorse.units import align_up

ARENA, EXTERNAL = 0, 1


@dataclass(frozen=True)
class Facts:
    """Per node: real (it computes something), forward, makes and reads (numbers of storages made by nodes), takes (storages whose bytes its first
    result may take over), scratch (bytes), seconds, draws (it consumes the random state).

    Per storage: maker (node), names, sizes (bytes; 0 where it lives in persistent memory), space (ARENA or EXTERNAL), outputs (it is, or a view of
    it is, an output of the graph), held (outputs that are alive to the end: those copied to where they persist as soon as they exist are
    not). saved: nodes of the forward pass that make a storage which the backward pass reads. marks: node -> "keep" | "drop".
    """

    graph: Graph
    real: tuple[bool, ...]
    forward: tuple[bool, ...]
    makes: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    takes: tuple[tuple[int, ...], ...]
    scratch: tuple[int, ...]
    seconds: tuple[float, ...]
    draws: tuple[bool, ...]
    maker: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    space: tuple[int, ...]
    outputs: frozenset[int]
    held: frozenset[int]
    saved: frozenset[int]
    marks: dict[int, str]

    @property
    def num_nodes(self) -> int:
        return len(self.graph.nodes)

    def plain_order(self) -> tuple[int, ...]:
        """The order that recomputes nothing."""
        return tuple(index for index, real in enumerate(self.real) if real)

    @cached_property
    def readers(self) -> list[list[int]]:
        """Storage -> the nodes that read it, in order."""
        table: list[list[int]] = [[] for _ in self.names]
        for node, storages in enumerate(self.reads):
            for storage in storages:
                table[storage].append(node)
        return table


def facts_of(graph: Graph, places: Places, seconds: list[float], in_place: bool = True) -> Facts:
    """places: (role, target) -> where what persists lies, as for `place`; seconds: of each node."""
    placement = place(graph, places, in_place)
    homes, values = placement.homes, graph.values
    numbers: dict[str, int] = {}
    maker: list[int] = []
    sizes: list[int] = []
    space: list[int] = []
    makes: list[tuple[int, ...]] = []
    for index, node in enumerate(graph.nodes):
        made = []
        for value in node.outputs:
            if value is None or value.base is not None:
                continue
            numbers[value.name] = len(maker)
            made.append(len(maker))
            maker.append(index)
            adopts = operator(node.op).kind == "adopt"
            persists = homes[value.name].space == "persistent"
            space.append(EXTERNAL if adopts else ARENA)
            sizes.append(0 if persists else value.extent_bytes if adopts else align_up(value.extent_bytes, 64))
        makes.append(tuple(made))
    read = []
    takes = []
    scratch = []
    for node in graph.nodes:
        roots = [] if node.is_view else [values[name].root for name in reads(node)]
        read.append(tuple(dict.fromkeys(numbers[root] for root in roots if root in numbers)))
        takes.append(_takes(graph, node, numbers) if in_place else ())
        need = operator(node.op).scratch
        scratch.append(align_up(need(node, values), 64) if need else 0)
    real = tuple(not node.is_view for node in graph.nodes)
    forward = tuple(node.phase == "forward" for node in graph.nodes)
    saved = {maker[s] for index, storages in enumerate(read) if not forward[index] for s in storages if forward[maker[s]]}
    outputs = frozenset(numbers[root] for out in graph.outputs if (root := values[out.name].root) in numbers)
    copied = {numbers[root] for copy in placement.copies if (root := values[copy.name].root) in numbers and copy.time == maker[numbers[root]]}
    return Facts(
        graph,
        real,
        forward,
        tuple(makes),
        tuple(read),
        tuple(takes),
        tuple(scratch),
        tuple(seconds),
        tuple(node.rng_out is not None for node in graph.nodes),
        tuple(maker),
        tuple(numbers),
        tuple(sizes),
        tuple(space),
        outputs,
        outputs - copied,
        frozenset(saved),
        {index: mark for index, node in enumerate(graph.nodes) if (mark := getattr(node, "mark", ""))},
    )


def _takes(graph: Graph, node, numbers: dict[str, int]) -> tuple[int, ...]:
    """Storages that the node's first result may take over if they die here: those that it reads only through in-place arguments laid out like it."""
    row = operator(node.op)
    result = node.outputs[0] if node.outputs else None
    if node.is_view or row.kind == "adopt" or not row.in_place or result is None or result.base is not None or not result.extent_bytes:
        return ()
    fits, spoiled = [], set()
    for position, arg in enumerate(node.args):
        for item in arg if isinstance(arg, tuple) else (arg,):
            if not isinstance(item, Ref) or position in row.unread:
                continue
            value = graph.values[item.name]
            root = graph.values[value.root]
            if root.name not in numbers:
                continue
            same = (value.shape, value.strides, value.dtype) == (result.shape, result.strides, result.dtype)
            if position not in row.in_place or not same or isinstance(arg, tuple):
                spoiled.add(root.name)
            elif value.offset == 0 and value.extent_bytes == root.extent_bytes and root.is_dense and value.is_dense:
                fits.append(root.name)
    spoiled |= {graph.values[arg.name].root for _, arg in node.kwargs if isinstance(arg, Ref)}
    return tuple(numbers[name] for name in dict.fromkeys(fits) if name not in spoiled)
