"""Sample arguments for every operator of kind "out", by name: what tests run recipes on."""

import torch
from torch import Tensor


def g(*shape: int) -> Tensor:
    return torch.randn(*shape)


def p(*shape: int) -> Tensor:
    return torch.rand(*shape) + 0.5


UNARY_POSITIVE = {"log", "log10", "log1p", "log2", "sqrt", "rsqrt", "acosh", "reciprocal"}
UNARY_UNIT = {"acos", "asin", "atanh"}
UNARY_ARGS = {
    "clamp": (-0.5, 0.5),
    "clamp_min": (0.1,),
    "clamp_max": (0.1,),
    "softplus": (),
    "elu": (),
    "leaky_relu": (0.1,),
    "hardtanh": (),
}
ROWS, CLASSES = 37, 1000


def _log_probs() -> Tensor:
    return torch.log_softmax(g(ROWS, CLASSES), 1)


def _targets() -> Tensor:
    target = torch.randint(0, CLASSES, (ROWS,))
    target[3] = -100
    return target


def _weight_total() -> Tensor:
    return torch.tensor(float(ROWS - 1))


def sample(op: str) -> tuple[tuple, dict]:
    """(args, kwargs) for one call of the operator; every tensor is fresh."""
    name = op.split(".")[1]
    if op in SPECIAL:
        args = SPECIAL[op]()
        return (args[0], args[1]) if len(args) == 2 and isinstance(args[1], dict) else (args, {})
    if op.endswith("_backward.default"):
        return BACKWARD.get(name, lambda: (g(33, 65), g(33, 65)))(), {}
    if op.endswith((".Tensor", ".Scalar")) or name in ("maximum", "minimum", "atan2", "logical_and", "logical_or", "logical_xor"):
        whole = name.startswith("bitwise")
        make = (lambda: torch.randint(0, 9, (33, 65))) if whole else (lambda: p(33, 65))
        other = (3 if whole else 0.7) if op.endswith(".Scalar") else make()
        return (make(), other), {}
    if name == "bitwise_not":
        return (torch.randint(0, 9, (33, 65)),), {}
    x = p(33, 65) if name in UNARY_POSITIVE else (torch.rand(33, 65) * 1.8 - 0.9 if name in UNARY_UNIT else g(33, 65))
    return (x + 1 if name == "acosh" else x, *UNARY_ARGS.get(name, ())), {}


BACKWARD = {
    "threshold_backward": lambda: (g(33, 65), g(33, 65), 0),
    "leaky_relu_backward": lambda: (g(33, 65), g(33, 65), 0.1, False),
    "elu_backward": lambda: (g(33, 65), 1.0, 1.0, 1.0, False, g(33, 65)),
    "hardtanh_backward": lambda: (g(33, 65), g(33, 65), -1.0, 1.0),
    "softplus_backward": lambda: (g(33, 65), g(33, 65), 1.0, 20.0),
    "mse_loss_backward": lambda: (torch.tensor(0.3), g(33, 65), g(33, 65), 1),
    "nll_loss_backward": lambda: (torch.tensor(0.3), _log_probs(), _targets(), None, 1, -100, _weight_total()),
    "nll_loss2d_backward": lambda: (
        torch.tensor(0.3), torch.log_softmax(g(2, 5, 6, 7), 1), torch.randint(0, 5, (2, 6, 7)), None, 1, -100, torch.tensor(84.0)
    ),
    "embedding_dense_backward": lambda: (g(4, 9, 16), torch.randint(0, 30, (4, 9)), 30, 7, False),
    "native_dropout_backward": lambda: (g(33, 65), torch.rand(33, 65) > 0.3, 1 / 0.7),
    "max_pool2d_with_indices_backward": lambda: _pooled(),
    "avg_pool2d_backward": lambda: (g(2, 3, 4, 4), g(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], False, True, None),
    "slice_backward": lambda: (g(4, 5), [4, 9], 1, 2, 7, 1),
    "select_backward": lambda: (g(4, 9), [4, 3, 9], 1, 2),
}  # fmt: skip


def _pooled() -> tuple:
    x = g(2, 3, 8, 8)
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    return g(2, 3, 4, 4), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


SPECIAL = {
    "aten.pow.Tensor_Scalar": lambda: (p(33, 65), 3),
    "aten.pow.Tensor_Tensor": lambda: (p(33, 65), g(33, 65)),
    "aten.where.self": lambda: (g(33, 65) > 0, g(33, 65), g(33, 65)),
    "aten.addcmul.default": lambda: ((g(33, 65), g(33, 65), g(33, 65)), {"value": 0.5}),
    "aten.addcdiv.default": lambda: ((g(33, 65), g(33, 65), p(33, 65)), {"value": 0.5}),
    "aten.mm.default": lambda: (g(33, 17), g(65, 17).t()),
    "aten.bmm.default": lambda: (g(3, 33, 17), g(3, 17, 65)),
    "aten.addmm.default": lambda: (g(65), g(33, 17), g(65, 17).t()),
    "aten.baddbmm.default": lambda: (g(3, 33, 65), g(3, 33, 17), g(3, 17, 65)),
    "aten._softmax.default": lambda: (g(33, 65), -1, False),
    "aten._log_softmax.default": lambda: (g(33, 65), -1, False),
    "aten._softmax_backward_data.default": lambda: (g(33, 65), torch.softmax(g(33, 65), -1), -1, torch.float32),
    "aten._log_softmax_backward_data.default": lambda: (g(33, 65), torch.log_softmax(g(33, 65), -1), -1, torch.float32),
    "aten.nll_loss_forward.default": lambda: (_log_probs(), _targets(), None, 1, -100),
    "aten.nll_loss2d_forward.default": lambda: (torch.log_softmax(g(2, 5, 6, 7), 1), torch.randint(0, 5, (2, 6, 7)), None, 1, -100),
    "aten.sum.dim_IntList": lambda: (g(33, 65), [0], True),
    "aten.mean.dim": lambda: (g(4, 5, 6, 7), [2, 3]),
    "aten._safe_softmax.default": lambda: (g(3, 33, 65).masked_fill(torch.arange(33)[:, None] == 4, -torch.inf), -1),
    "aten.sum.default": lambda: (g(33, 65),),
    "aten.mean.default": lambda: (g(33, 65),),
    "aten.cumsum.default": lambda: (g(33, 65), 1),
    "aten.max.dim": lambda: (g(33, 65), 1),
    "aten.min.dim": lambda: (g(33, 65), 0, True),
    "aten.scatter.src": lambda: (g(33, 65), 1, torch.randint(0, 65, (33, 1)), g(33, 1)),
    "aten.scatter.value": lambda: (g(33, 65), 1, torch.randint(0, 65, (33, 4)), 2.5),
    "aten.scatter_add.default": lambda: (g(33, 65), 1, torch.randint(0, 65, (33, 4)), g(33, 4)),
    "aten.index.Tensor": lambda: (g(33, 65), [None, torch.randint(0, 65, (4, 5))]),
    "aten.index_put.default": lambda: (g(33, 65), [torch.randint(0, 33, (9,))], g(9, 65), True),
    "aten.constant_pad_nd.default": lambda: (g(5, 6, 7), [1, -2, -1, 3], 2.5),
    "aten.rsub.Scalar": lambda: (g(33, 65), 2.5),
    "aten.amax.default": lambda: (g(33, 65), [1]),
    "aten.amin.default": lambda: (g(33, 65), [1]),
    "aten.clone.default": lambda: ((g(33, 65).t(),), {"memory_format": torch.contiguous_format}),
    "aten._to_copy.default": lambda: ((g(33, 65),), {"dtype": torch.float64}),
    "aten.lift_fresh_copy.default": lambda: (g(33, 65),),
    "aten.copy.default": lambda: (g(33, 65), torch.randint(0, 9, (65,))),
    "aten.fill.Scalar": lambda: (g(33, 65), 2.5),
    "aten.masked_fill.Scalar": lambda: (g(33, 65), g(33, 65) > 0, 2.5),
    "aten.slice_scatter.default": lambda: (g(33, 65), g(33, 20), 1, 5, 65, 3),
    "aten.select_scatter.default": lambda: (g(33, 65), g(33), 1, 5),
    "aten.as_strided_scatter.default": lambda: (g(33, 65), g(4, 5), [4, 5], [130, 3], 7),
    "aten.cat.default": lambda: ([g(33, 5), g(33, 7)], 1),
    "aten.stack.default": lambda: ([g(33, 5), g(33, 5)], 1),
    "aten.gather.default": lambda: (g(33, 65), 1, torch.randint(0, 65, (33, 4))),
    "aten.index_select.default": lambda: (g(33, 65), 0, torch.randint(0, 33, (11,))),
    "aten.embedding.default": lambda: (g(30, 16), torch.randint(0, 30, (4, 9))),
    "aten.tril.default": lambda: (g(33, 33),),
    "aten.triu.default": lambda: (g(33, 33),),
    "aten.zeros.default": lambda: ([3, 4],),
    "aten.ones.default": lambda: ([3, 4],),
    "aten.full.default": lambda: ([3, 4], 2.5),
    "aten.zeros_like.default": lambda: (g(3, 4),),
    "aten.ones_like.default": lambda: (g(3, 4),),
    "aten.full_like.default": lambda: (g(3, 4), 2.5),
    "aten.new_zeros.default": lambda: (g(2), [3, 4]),
    "aten.new_ones.default": lambda: (g(2), [3, 4]),
    "aten.new_full.default": lambda: (g(2), [3, 4], 2.5),
    "aten.scalar_tensor.default": lambda: (2.5,),
    "aten.arange.default": lambda: (7,),
    "aten.arange.start": lambda: (2, 9),
    "aten.arange.start_step": lambda: (2, 9, 3),
    "aten.native_dropout.default": lambda: (g(33, 65), 0.3, True),
    "aten.max_pool2d_with_indices.default": lambda: (g(2, 3, 8, 8), [2, 2], [2, 2]),
    "aten._slow_conv2d_forward.default": lambda: (g(2, 3, 8, 8), g(5, 3, 3, 3), [3, 3], g(5), [2, 2], [1, 1]),
    "aten._slow_conv2d_backward.output_mask": lambda: (g(2, 5, 8, 8), g(2, 3, 8, 8), g(5, 3, 3, 3), [3, 3], [1, 1], [1, 1], [True, True, True]),
    "aten.avg_pool2d.default": lambda: (g(2, 3, 8, 8), [2, 2], [2, 2]),
    "aten._native_batch_norm_legit_functional.default": lambda: (g(4, 3, 8, 8), p(3), g(3), g(3), p(3), True, 0.1, 1e-5),
    "aten._native_batch_norm_legit.no_stats": lambda: (g(4, 3, 8, 8), p(3), g(3), True, 0.1, 1e-5),
}
