"""Floating-point operations of matrix products, convolutions and attention, from shapes alone (2 per multiply-add). Everything else counts 0."""

from math import prod

from packhorse.graph.ir import Graph, Node, Ref, Value


def node_flops(node: Node, values: dict[str, Value]) -> int:
    """Flops of one node.

    mm (M, K) @ (K, N): 2MNK. Attention (B, H, T, D) over S keys: 4BHTSD forward (scores, then their product with v), 10BHTSD backward (the
    scores again, and four products). Convolution: 2 * outputs * weights per output channel, the same for each gradient asked for.
    """

    def shape(position: int) -> tuple[int, ...]:
        arg = node.args[position]
        return values[arg.name].shape if isinstance(arg, Ref) else ()

    name = node.op.split(".")[1]
    if name in ("mm", "bmm"):
        return 2 * prod(shape(0)) * shape(1)[-1]
    if name in ("addmm", "baddbmm"):
        return 2 * prod(shape(1)) * shape(2)[-1]
    if name == "convolution":
        out = node.outputs[0]
        assert out is not None
        weight, transposed = shape(1), node.args[6]
        return 2 * prod(shape(0) if transposed else out.shape) * prod(weight[1:])
    if name == "convolution_backward":
        weight, transposed, mask = shape(2), node.args[7], node.args[10]
        once = 2 * prod(shape(1) if transposed else shape(0)) * prod(weight[1:])
        return once * [bool(wanted) for wanted in mask[:2]].count(True)  # type: ignore[index, union-attr]
    if name == "_slow_conv2d_forward":
        out = node.outputs[0]
        assert out is not None
        return 2 * prod(out.shape) * prod(shape(1)[1:])
    if name == "_slow_conv2d_backward":
        return 2 * prod(shape(0)) * prod(shape(2)[1:]) * [bool(wanted) for wanted in node.args[6][:2]].count(True)  # type: ignore[index, union-attr]
    if name.startswith("_scaled_dot_product") and not name.startswith("_scaled_dot_product_fused"):
        backward = name.endswith("backward")
        query, key = (shape(1), shape(2)) if backward else (shape(0), shape(1))
        return (10 if backward else 4) * prod(query) * key[-2]
    return 0


def graph_flops(graph: Graph) -> int:
    """Sum over the nodes."""
    return sum(node_flops(node, graph.values) for node in graph.nodes)
