"""A pass: results that kernels allocate themselves and that wait for the backward pass move into planned memory.

A kernel's own memory and the arena have their peaks at different instants, and a step needs both. A copy costs a pass over the bytes, and
then one arena
serves all that waits: where a budget is tight, that is worth it (convolutions, whose results make up half of what a CNN keeps).
"""

from dataclasses import replace

from packhorse.graph.ir import Graph, Node, Output, Ref, map_refs
from packhorse.graph.operators import operator
from packhorse.graph.saved import saved_storages


def into_arena(graph: Graph) -> Graph:
    """The graph with a copy behind each forward node whose kernel allocates, of those results that the backward pass reads or whose bytes
    pass to such."""
    waiting = set(saved_storages(graph))
    waiting |= _taken_over(graph, waiting)
    instead: dict[str, str] = {}
    nodes: list[Node] = []

    def change(name: str) -> Ref:
        return Ref(instead.get(name, name))

    for node in graph.nodes:
        outputs = tuple(v if v is None or v.base not in instead else replace(v, base=instead[v.base]) for v in node.outputs)
        args = tuple(map_refs(arg, change) for arg in node.args)
        kwargs = tuple((key, map_refs(arg, change)) for key, arg in node.kwargs)
        node = replace(node, args=args, kwargs=kwargs, outputs=outputs)
        place, mark = len(nodes), (node.mark, node.mark_name)
        nodes.append(node)
        if node.phase != "forward" or node.is_view or operator(node.op).kind != "adopt":
            continue
        for value in node.outputs:
            if value is not None and value.base is None and value.name in waiting:
                copy = replace(value, name=f".kept.{value.name}")
                nodes.append(Node("aten.clone.default", (Ref(value.name),), (), (copy,), "forward", node.module, node.source, None, None, *mark))
                instead[value.name] = copy.name
                nodes[place] = replace(node, mark="", mark_name="")  # what is marked is what is kept
    ends = tuple(Output(instead.get(out.name, out.name), out.role, out.target) for out in graph.outputs)
    return Graph(graph.name, graph.inputs, tuple(nodes), ends)


def _taken_over(graph: Graph, waiting: set[str]) -> set[str]:
    """Roots whose storage a result that waits may take over (graph/operators.py, `in_place`)."""
    found = set()
    for node in graph.nodes:
        if node.phase == "forward" and node.outputs and node.outputs[0] is not None and node.outputs[0].name in waiting:
            for position in operator(node.op).in_place:
                arg = node.args[position] if position < len(node.args) else None
                if isinstance(arg, Ref):
                    found.add(graph.values[arg.name].root)
    return found
