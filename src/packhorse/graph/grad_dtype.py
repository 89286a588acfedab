"""Gradients kept in another dtype than they are computed in: each is converted as soon as it exists, before it is added to earlier ones."""

from dataclasses import replace

from packhorse.graph.ir import Const, Graph, Node, Output, Ref, Value, contiguous_strides


def gradients_in(graph: Graph, dtype: str, constant: Const) -> Graph:
    """The graph with every gradient that it gives in `dtype`; `constant` is that dtype as torch calls it."""
    nodes, outputs = list(graph.nodes), []
    for out in graph.outputs:
        value = graph.values[out.name]
        if out.role == "grad" and value.dtype != dtype:
            # an input of the graph (a parameter that is added to the loss: its gradient is the seed) is made before all nodes
            made = next((i for i, node in enumerate(nodes) if any(v is not None and v.name == out.name for v in node.outputs)), -1)
            module, source = (nodes[made].module, nodes[made].source) if made >= 0 else ("", "")
            strides = value.strides if value.is_dense else contiguous_strides(value.shape)
            kept = Value(f".kept.{out.target}", dtype, value.shape, strides)
            converted = Node("aten._to_copy.default", (Ref(out.name),), (("dtype", constant),), (kept,), "backward", module, source)
            nodes.insert(made + 1, converted)
            out = Output(kept.name, out.role, out.target)
        outputs.append(out)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs))
