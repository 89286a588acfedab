"""A pass: an output that is (a view of) an input becomes a copy of it, made by a node.

So every output that changes anything is made by a node of the graph, and its place in the schedule says when it may overwrite what it replaces: two
buffers that exchange their contents, or a buffer that takes its own transpose, need no case of their own.
"""

from packhorse.graph.ir import Graph, Node, Output, Ref, Value, contiguous_strides


def own_outputs(graph: Graph) -> Graph:
    """The graph with a clone for each output whose storage is an input's; an input handed back as it is under its own name stays."""
    given = {i.value.name: i for i in graph.inputs}
    values = {i.value.name: i.value for i in graph.inputs}
    last = {out.name for out in graph.outputs if out.role != "random"}
    values.update((v.name, v) for node in graph.nodes for v in node.outputs if v is not None and v.name in last)
    nodes, outputs = list(graph.nodes), []
    for out in graph.outputs:
        if out.role == "random":
            outputs.append(out)
            continue
        value = values[out.name]
        source = given.get(value.root)
        same = source is not None and (source.role, source.target, source.value.name) == (out.role, out.target, out.name)
        if source is not None and not same:
            copy = Value(f".own.{out.role}.{out.target}", value.dtype, value.shape, contiguous_strides(value.shape))
            nodes.append(Node("aten.clone.default", (Ref(out.name),), (), (copy,), "backward" if out.role == "grad" else "forward"))
            out = Output(copy.name, out.role, out.target)
        outputs.append(out)
    return Graph(graph.name, graph.inputs, tuple(nodes), tuple(outputs))
