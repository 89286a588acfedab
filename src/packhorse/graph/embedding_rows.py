"""A pass: the gradient of an embedding whose weight has another use, added row by row to the gradient of that use.

Autograd makes the embedding's gradient as a full (tokens, width) tensor that is zero but for the rows of the batch, and adds it to the other one,
of a
tied output layer: two tensors of the size of the weight and three passes over it. The rows are summed by themselves, in the order of the batch, and
then added once each: the same sums in the same order, and a row that is not in the batch keeps its bits (but for -0 + 0).
"""

from dataclasses import replace

from packhorse.graph.ir import Graph, Ref

ADD_ROWS = "packhorse.add_embedding_backward.default"
_EMBEDDING, _ADD = "aten.embedding_dense_backward.default", "aten.add.Tensor"


def embedding_in_rows(graph: Graph) -> Graph:
    """The graph with every sum of an embedding's gradient, read by nobody else, and a tensor like it as one node."""
    made = {node.outputs[0].name: node for node in graph.nodes if node.op == _EMBEDDING and node.outputs[0] is not None and not node.args[4]}
    readers: dict[str, int] = {}
    for node in graph.nodes if made else ():
        for name in made.keys() & set(node.arg_names()):
            readers[name] = readers.get(name, 0) + 1
    kept = {out.name for out in graph.outputs}
    once = {name for name, count in readers.items() if count == 1 and name not in kept}
    nodes, gone = [], set()
    for node in graph.nodes:
        found = next((arg.name for arg in node.args[:2] if isinstance(arg, Ref) and arg.name in once), None) if node.op == _ADD else None
        if found is not None and not node.kwargs and len(node.args) == 2:
            other = node.args[1] if node.args[0] == Ref(found) else node.args[0]
            value, result = made[found].outputs[0], node.outputs[0]
            like = graph.values[other.name] if isinstance(other, Ref) else None
            assert value is not None and result is not None
            same = like is not None and (like.dtype, like.shape) == (value.dtype, value.shape) == (result.dtype, result.shape)
            if same and value.dtype in ("f32", "f64"):
                grad, indices, num_weights, padding_idx, _ = made[found].args
                node = replace(node, op=ADD_ROWS, args=(other, grad, indices, num_weights, padding_idx))
                gone.add(found)
        nodes.append(node)
    return (
        graph.with_nodes([n for n in nodes if not (n.op == _EMBEDDING and n.outputs[0] is not None and n.outputs[0].name in gone)]) if gone else graph
    )
