"""How a step computes in 16 bits: parameters as 16-bit copies, autocast where dtypes meet, and islands that stay in fp32.

The recipe in plain PyTorch, for a model whose parameters were cast to `dtype` while the originals are the master weights:

    with torch.autocast(device.type, dtype, cache_enabled=False), Islands(device.type):
        loss = model(batch).float()

Autocast feeds matrix products, convolutions and attention in 16 bits. Norms, softmax and losses are islands: their 16-bit arguments are widened,
the function runs in fp32 without autocast, and its result is narrowed again to the dtype of its first argument; losses stay in fp32. (Autocast
alone treats norms and softmax differently on a CPU and on a GPU.) A softmax that is asked for a dtype gives that dtype.
Source: Micikevicius et al. 2018, arXiv:1710.03740, sections 3.1 to 3.3.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_RUNNING = (F.batch_norm, F.instance_norm)
_NORMS = (
    *_RUNNING, F.layer_norm, F.rms_norm, F.group_norm, F.local_response_norm, F.normalize, torch.layer_norm, torch.group_norm, torch.rms_norm,
)  # fmt: skip
_SOFTMAX = (
    F.softmax, F.log_softmax, F.softmin, F.gumbel_softmax, torch.softmax, torch.log_softmax, torch.logsumexp, torch.special.softmax,
    torch.special.log_softmax, torch.special.logsumexp, Tensor.softmax, Tensor.log_softmax, Tensor.logsumexp,
)  # fmt: skip
LOSSES = frozenset(
    {
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.kl_div,
        F.ctc_loss,
        F.binary_cross_entropy_with_logits,
        F.poisson_nll_loss,
        F.gaussian_nll_loss,
        F.cosine_embedding_loss,
        F.hinge_embedding_loss,
        F.margin_ranking_loss,
        F.multi_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.soft_margin_loss,
        F.triplet_margin_loss,
        F.triplet_margin_with_distance_loss,
    }
)
ISLANDS = frozenset((*_NORMS, *_SOFTMAX)) | LOSSES


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether it is a floating-point dtype of 16 bits."""
    return dtype in (torch.float16, torch.bfloat16)


class Islands(TorchFunctionMode):
    """While active, the functions in ISLANDS compute in fp32 (see above)."""

    def __init__(self, device_type: str):
        super().__init__()
        self.device_type = device_type

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with _softmax_of_functional(lambda *a, **k: self.__torch_function__(_SOFTMAX[0], (), a, k)):
                return func(*args, **kwargs)
        if not _is_island(func, args, kwargs):
            return func(*args, **kwargs)
        given = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        statistics = _statistics(args, kwargs) if func in _RUNNING else None
        wide = torch.float32 if statistics is None else statistics.dtype
        args, kwargs = pytree.tree_map(lambda leaf: leaf.to(wide) if _is_narrower(leaf, wide) else leaf, (args, kwargs))
        with torch.autocast(self.device_type, enabled=False):
            result = func(*args, **kwargs)
        if func in LOSSES or given is None or not is_narrow(given.dtype) or _asks_for_dtype(args, kwargs):
            return result
        return pytree.tree_map(lambda leaf: leaf.to(given.dtype) if isinstance(leaf, Tensor) else leaf, result)


@contextmanager
def _softmax_of_functional(island: Any) -> Iterator[None]:
    """A function written in Python calls others unseen: multi-head attention its softmax, by its name in the module."""
    functional: Any = F
    kept, functional.softmax = functional.softmax, island
    try:
        yield
    finally:
        functional.softmax = kept


@contextmanager
def computing_in(dtype: torch.dtype | None, device_type: str) -> Iterator[None]:
    """The recipe's contexts; none for None, the model's own dtype."""
    if dtype is None:
        yield
        return
    with torch.autocast(device_type, dtype, cache_enabled=False), Islands(device_type):
        yield


def computed_dtype(parameter: Tensor, compute: torch.dtype | None) -> torch.dtype:
    """The dtype in which a step computes with a parameter: `compute` for a wider floating-point one, else its own."""
    wider = parameter.is_floating_point() and compute is not None and parameter.element_size() > compute.itemsize
    return compute if wider and compute is not None else parameter.dtype


def _is_island(func: Any, args: Any, kwargs: Any) -> bool:
    """Statistics kept in 16 bits are changed in place, which a widened copy of them would not be: such a norm stays as it is."""
    statistics = _statistics(args, kwargs) if func in _RUNNING else None
    return func in ISLANDS and (statistics is None or not is_narrow(statistics.dtype))


def _statistics(args: Any, kwargs: Any) -> Tensor | None:
    """The running mean of a batch norm."""
    return args[1] if len(args) > 1 else kwargs.get("running_mean")


def _is_narrower(leaf: Any, wide: torch.dtype) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.element_size() < wide.itemsize


def _asks_for_dtype(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, torch.dtype) for leaf in pytree.tree_leaves((args, kwargs)))
