"""When each storage is alive under a schedule. The schedule is the order of the nodes; time t is the index of a node.

A root and all views of it share one storage. Its lifespan is half-open, [lower, upper): lower is the time of the node that defines it,
upper one past the last node that reads it or any of its views (one past the end of the graph if it, or a view of it, is an output).
Arguments of which the kernel reads only the shape keep nothing alive (operators.py, `unread`).
"""

from dataclasses import dataclass

from packhorse.errors import CheckError
from packhorse.graph.ir import Graph, Node, Ref, refs_in
from packhorse.graph.operators import operator


@dataclass(frozen=True, slots=True)
class Lifespan:
    lower: int
    upper: int


def reads(node: Node) -> list[str]:
    """Names of the values whose contents the node's kernel reads."""
    row = operator(node.op)
    names: list[str] = []
    for position, arg in enumerate(node.args):
        if position not in row.unread:
            names += refs_in(arg)
    for _, arg in node.kwargs:
        names += refs_in(arg)
    return names


def unread(node: Node) -> list[str]:
    """Names of the values of which the node's kernel reads the shape only."""
    return [arg.name for position in operator(node.op).unread if isinstance(arg := node.args[position], Ref)]


def lifespans(graph: Graph) -> dict[str, Lifespan]:
    """Root name -> lifespan of its storage, for every root defined by a node (inputs live outside the graph's own memory)."""
    lower: dict[str, int] = {}
    upper: dict[str, int] = {}
    for time, node in enumerate(graph.nodes):
        if not node.is_view:
            for name in reads(node):
                upper[graph.values[name].root] = time + 1
        for value in node.outputs:
            if value is not None and value.base is None:
                lower[value.name] = time
                upper.setdefault(value.name, time + 1)
    for out in graph.outputs:
        upper[graph.values[out.name].root] = len(graph.nodes) + 1
    return {name: Lifespan(start, max(upper[name], start + 1)) for name, start in lower.items()}


def live_bytes(graph: Graph) -> list[int]:
    """Bytes of storages alive at each time, unaligned: the plain liveness of the graph before any layout."""
    change = [0] * (len(graph.nodes) + 2)
    for name, span in lifespans(graph).items():
        size = graph.values[name].extent_bytes
        change[span.lower] += size
        change[span.upper] -= size
    total, result = 0, []
    for step in change[: len(graph.nodes)]:
        total += step
        result.append(total)
    return result


def check_schedule(graph: Graph, spans: dict[str, Lifespan]) -> None:
    """Checker: every read of a storage, through any view, falls inside its lifespan, and nothing lives longer than it must.

    Raises CheckError naming the node and the storage.
    """
    touched: dict[str, list[int]] = {name: [] for name in spans}  # times at which a node makes a storage or reads it
    for time, node in enumerate(graph.nodes):
        makes = {value.name for value in node.outputs if value is not None}
        looks = set() if node.is_view else {graph.values[name].root for name in reads(node)}
        for name in makes | looks:
            if name in touched:
                touched[name].append(time)
    for output in graph.outputs:
        if (root := graph.values[output.name].root) in touched:
            touched[root].append(len(graph.nodes))
    for name, span in spans.items():
        first, last = touched[name][0], touched[name][-1]
        if (span.lower, span.upper) != (first, last + 1):
            raise CheckError(f"graph {graph.name}: %{name} is used over [{first}, {last + 1}) but its lifespan is [{span.lower}, {span.upper})")
