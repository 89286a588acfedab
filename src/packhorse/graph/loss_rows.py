"""A pass: the gradient of log-softmax + negative log-likelihood, worked through in chunks of rows.

Autograd writes the gradient of the nll loss as a full (rows, classes) tensor of zeros with one entry a row, and feeds it to the
gradient of log-softmax: two tensors of the size of the logits beside the saved one. Row by row both are independent, so one
chunk of constant size (C_B of ZeRO-R) serves all rows, and the result takes the place of the log-probabilities. The same kernels see
the same rows: identical bits.
"""

from dataclasses import replace

from packhorse.graph.ir import Graph, Node, Ref

FUSED = "packhorse.nll_log_softmax_backward.default"


def loss_in_rows(graph: Graph) -> Graph:
    """The graph with every pair nll_loss_backward -> _log_softmax_backward_data over the last of two dims as one node."""
    users: dict[str, list[int]] = {
        node.outputs[0].name: [] for node in graph.nodes if node.op == "aten.nll_loss_backward.default" and node.outputs[0] is not None
    }
    if not users:
        return graph
    for index, node in enumerate(graph.nodes):
        if not users.keys().isdisjoint(node.arg_names()):
            for name in users.keys() & set(node.arg_names()):
                users[name].append(index)
    outputs = {out.name for out in graph.outputs}
    fused: dict[int, Node] = {}
    dropped = set()
    for index, node in enumerate(graph.nodes):
        if node.op != "aten.nll_loss_backward.default":
            continue
        grad = node.outputs[0]
        assert grad is not None
        readers = users[grad.name]
        if len(readers) != 1 or grad.name in outputs or len(grad.shape) != 2:
            continue
        follow = graph.nodes[readers[0]]
        grad_output, _, target, weight, reduction, ignore_index, total_weight = node.args
        if (
            follow.op != "aten._log_softmax_backward_data.default"
            or follow.args[0] != Ref(grad.name)
            or follow.args[2] not in (1, -1)
            or reduction == 0
        ):
            continue
        result = follow.outputs[0]
        log_probs = graph.values[follow.args[1].name]  # type: ignore[union-attr]
        if result is None or (log_probs.shape, log_probs.strides, log_probs.dtype) != (result.shape, result.strides, result.dtype):
            continue
        args = (grad_output, follow.args[1], target, weight, reduction, ignore_index, total_weight)
        fused[readers[0]] = replace(follow, op=FUSED, args=args, kwargs=())
        dropped.add(index)
    return graph.with_nodes([fused.get(i, node) for i, node in enumerate(graph.nodes) if i not in dropped])
