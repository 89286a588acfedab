"""Gradient accumulation as a pass: the graph of the first micro-batch, and of each next one that adds to what is there.

With k micro-batches the step's loss is the mean of theirs: each loss is divided by k (the backward pass starts from the constant
"seed" = 1/k, which is what autograd computes for `(loss / k).backward()`), and each gradient is added to its accumulated one as soon
as it exists, as autograd's AccumulateGrad does, so that it never lives longer than one node.
"""

from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value


def first_micro_batch(graph: Graph, num_micro_batches: int) -> Graph:
    """The captured graph with its loss divided by the number of micro-batches; the graph itself for one."""
    if num_micro_batches == 1:
        return Graph("first", graph.inputs, graph.nodes, graph.outputs)
    nodes, outputs = list(graph.nodes), []
    for out in graph.outputs:
        if (out.role, out.target) == ("metric", "loss"):
            out = Output(_divide(nodes, graph.values[out.name], num_micro_batches), out.role, out.target)
        outputs.append(out)
    return Graph("first", graph.inputs, tuple(nodes), tuple(outputs))


def next_micro_batch(graph: Graph, num_micro_batches: int, grad_strides: dict[str, tuple[int, ...]] | None) -> Graph:
    """The captured graph with loss and gradients added to what the micro-batches before it left.

    grad_strides: parameter name -> strides in elements of its accumulated gradient; None: gradients stay as they are, to be added elsewhere.
    """
    inputs, outputs = list(graph.inputs), []
    made = {v.name: node for node in graph.nodes for v in node.outputs if v is not None}
    adds: dict[str, list[Node]] = {}  # gradient -> what adds it to those before, just after it exists
    ends: list[Node] = []
    for out in graph.outputs:
        value = graph.values[out.name]
        if (out.role, out.target) == ("metric", "loss"):
            share = _divide(ends, value, num_micro_batches)
            before = Value(".loss_before", value.dtype, (), ())
            total = Value(".loss_total", value.dtype, (), ())
            inputs.append(Input(before, "metric", "loss"))
            ends.append(Node("aten.add.Tensor", (Ref(before.name), Ref(share)), (), (total,), "forward"))
            out = Output(total.name, out.role, out.target)
        elif out.role == "grad" and grad_strides is not None:
            strides = grad_strides[out.target]
            before = Value(f".grad_before.{out.target}", value.dtype, value.shape, strides)
            total = Value(f".grad_total.{out.target}", value.dtype, value.shape, strides)
            inputs.append(Input(before, "grad", out.target))
            source = made[out.name]
            add = Node("aten.add.Tensor", (Ref(before.name), Ref(out.name)), (), (total,), "backward", source.module, source.source)
            adds.setdefault(out.name, []).append(add)
            out = Output(total.name, out.role, out.target)
        outputs.append(out)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(node)
        for result in node.outputs:
            # the gradient of two parameters may be one value: the later one's sum comes first
            nodes += reversed(adds.get(result.name, ())) if result is not None else ()
    return Graph("next", tuple(inputs), (*nodes, *ends), tuple(outputs))


def _divide(nodes: list[Node], loss: Value, num_micro_batches: int) -> str:
    share = Value(".loss_share", loss.dtype, (), ())
    nodes.append(Node("aten.div.Scalar", (Ref(loss.name), num_micro_batches), (), (share,), "forward"))
    return share.name
