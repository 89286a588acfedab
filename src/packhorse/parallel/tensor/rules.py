"""Operator -> how it is spread over the tp ranks. No torch. An operator without a row is done on whole values, on every rank alike."""

from collections.abc import Callable

from packhorse.parallel.tensor import along_dims, attention, elementwise, products, reshaping, vocabulary
from packhorse.parallel.tensor.spread import Spread

Rule = Callable[[Spread], None]

RULES: dict[str, Rule] = {
    **{op: elementwise.elementwise for op in elementwise.ELEMENTWISE},
    **{op: products.product for op in products.PRODUCTS},
    **{op: along_dims.reduction for op in along_dims.REDUCTIONS},
    **{op: along_dims.along_one for op in along_dims.ALONG_ONE},
    "aten.sum.default": along_dims.sum_of_all,
    "aten.native_layer_norm.default": along_dims.layer_norm,
    "aten._fused_rms_norm.default": along_dims.layer_norm,
    "aten.native_layer_norm_backward.default": along_dims.layer_norm_backward,
    "aten._fused_rms_norm_backward.default": along_dims.layer_norm_backward,
    **{op: attention.attention for op in attention.FORWARD},
    **{op: attention.attention_backward for op in attention.BACKWARD},
    "aten.slice_backward.default": reshaping.cut_backward,
    "aten.select_backward.default": reshaping.cut_backward,
    "aten.cat.default": reshaping.concatenate,
    "aten.constant_pad_nd.default": reshaping.pad,
    "aten.embedding.default": vocabulary.embedding,
    "aten.embedding_dense_backward.default": vocabulary.embedding_backward,
    "packhorse.add_embedding_backward.default": vocabulary.add_embedding_backward,
    "aten._log_softmax.default": vocabulary.log_softmax,
    vocabulary.NLL: vocabulary.nll,
    "packhorse.nll_log_softmax_backward.default": vocabulary.nll_log_softmax_backward,
}
