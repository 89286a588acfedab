"""A pass: copies that nothing can tell from their source vanish.

In a graph that changes nothing in place, a clone with the layout of its source is its source. Captures are full of them: a dropout of probability 0,
a `contiguous()` of what is contiguous, the copy that autograd takes before an in-place operator.
"""

from dataclasses import replace

from packhorse.graph.ir import Graph, Node, Output, Ref, map_refs


def drop_clones(graph: Graph) -> Graph:
    """The graph without clones that have dtype, shape and strides of what they copy, when that is a whole storage made by a node.

    The mark of a clone goes to the node that made what it copies; one that is marked otherwise than that node stays.
    """
    inputs = {i.value.name for i in graph.inputs}
    instead: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        node = _renamed(node, instead)
        source, result = node.args[0] if node.args else None, node.outputs[0] if node.outputs else None
        if node.op == "aten.clone.default" and isinstance(source, Ref) and result is not None:
            value = graph.values[source.name]
            same = (value.dtype, value.shape, value.strides) == (result.dtype, result.shape, result.strides)
            if same and value.base is None and value.name not in inputs and _take_mark(nodes, value.name, node):
                instead[result.name] = value.name
                continue
        nodes.append(node)
    outputs = tuple(Output(instead.get(out.name, out.name), out.role, out.target) for out in graph.outputs)
    return Graph(graph.name, graph.inputs, tuple(nodes), outputs)


def _take_mark(nodes: list[Node], name: str, clone: Node) -> bool:
    """Puts the clone's mark on the node that made `name`. False if that has another one."""
    if clone.mark:
        made = next(i for i, node in enumerate(nodes) if any(v is not None and v.name == name for v in node.outputs))
        if nodes[made].mark not in ("", clone.mark):
            return False
        nodes[made] = replace(nodes[made], mark=clone.mark, mark_name=clone.mark_name)
    return True


def _renamed(node: Node, instead: dict[str, str]) -> Node:
    """The node reading, and viewing, what stands in the place of dropped clones."""
    if not instead or (instead.keys().isdisjoint(node.arg_names()) and not any([v is not None and v.base in instead for v in node.outputs])):
        return node

    def change(name: str) -> Ref:
        return Ref(instead.get(name, name))

    outputs = tuple(
        v if v is None or v.base not in instead else type(v)(v.name, v.dtype, v.shape, v.strides, instead[v.base], v.offset) for v in node.outputs
    )
    args = tuple(map_refs(arg, change) for arg in node.args)
    kwargs = tuple((key, map_refs(arg, change)) for key, arg in node.kwargs)
    return replace(node, args=args, kwargs=kwargs, outputs=outputs)
