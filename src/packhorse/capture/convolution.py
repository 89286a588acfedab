"""Convolutions as the kernel that eager runs for them, where that kernel can write into planned memory.

`aten.convolution` chooses among kernels by shapes, device, dtype and number of threads. oneDNN's allocate their results, so those stay as they are
(adopted). The plain one (im2col and a matrix product; for a 1x1 kernel the product alone) writes where it is told.
"""

from dataclasses import replace

import torch

from packhorse.capture.dtypes import LONG
from packhorse.graph.ir import Graph, Node, Ref, Value, contiguous_strides


def plain_convolutions(graph: Graph, device: torch.device) -> Graph:
    """The graph with `convolution` and its backward replaced by `_slow_conv2d_*` where eager runs those, at the present number of threads."""
    if device.type != "cpu" or not any(node.op.startswith("aten.convolution") for node in graph.nodes):
        return graph
    return graph.with_nodes([_rewritten(node, graph.values) for node in graph.nodes])


def _rewritten(node: Node, values: dict[str, Value]) -> Node:
    if node.op == "aten.convolution.default":
        x, weight, bias, *settings = node.args
        if _is_plain(values, [x, weight], node, bias, settings):
            return replace(node, op="aten._slow_conv2d_forward.default", args=(x, weight, _kernel(values, weight), bias, settings[0], settings[1]))
    if node.op == "aten.convolution_backward.default":
        grad, x, weight, _, *settings, mask = node.args
        if _is_plain(values, [x, weight, grad], node, None, settings):
            args = (grad, x, weight, _kernel(values, weight), settings[0], settings[1], mask)
            return replace(node, op="aten._slow_conv2d_backward.output_mask", args=args)
    return node


def _kernel(values: dict[str, Value], weight) -> tuple[int, ...]:
    return values[weight.name].shape[2:]


def _is_plain(values: dict[str, Value], refs: list, node: Node, bias, settings: list) -> bool:
    stride, padding, dilation, transposed, output_padding, groups = settings
    lie = [values[ref.name] for ref in refs]
    lie += [value for value in node.outputs if value is not None]
    if groups != 1 or transposed or len(lie[1].shape) != 4 or any(value.strides != contiguous_strides(value.shape) for value in lie):
        return False
    # memory that is never touched: only shapes, dtype and device decide
    x, weight = (torch.empty(value.shape, dtype=LONG[value.dtype]) for value in lie[:2])
    given = torch.empty(values[bias.name].shape, dtype=weight.dtype) if isinstance(bias, Ref) else None
    backend = torch._C._select_conv_backend(x, weight, given, stride, padding, dilation, False, output_padding, 1, [weight.shape[0]])
    return backend == torch._C._ConvBackend.Slow2d  # type: ignore[attr-defined]
