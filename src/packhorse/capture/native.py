"""While a model is traced, some operators would be rewritten in Python into others that round differently from the kernel that eager runs.

torch registers such rewrites ("decompositions") for resampling and some losses, for the benefit of its compiler. A capture that promises
eager's bits has to see the
operator itself, so they are set aside for the time of the trace.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._meta_registrations
from torch._C import DispatchKey
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


_LOSSES = ("multi_margin_loss", "multilabel_margin_loss_forward")
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _rewritten() -> list[torch._ops.OpOverload]:
    names = [name for name in dir(torch.ops.aten) if name.lstrip("_").startswith("upsample_") or name in _LOSSES]
    packets = [getattr(torch.ops.aten, name) for name in names]
    return [getattr(packet, kind) for packet in packets for kind in packet.overloads()]


def _grouped_mm_shape(mat_a: torch.Tensor, mat_b: torch.Tensor, *_, offs: torch.Tensor | None = None, out_dtype=None, **__) -> torch.Tensor:
    """The result of a grouped matrix product by its shapes alone: offs (G,) divides the rows, the columns or the inner dim into G groups."""
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    if mat_a.dim() == mat_b.dim():
        groups = [mat_a.shape[0] if mat_a.dim() == 3 else offs.shape[0]]  # type: ignore[union-attr]
    else:
        groups = []
    return mat_a.new_empty([*groups, rows, columns], dtype=out_dtype or mat_a.dtype)


@contextmanager
def native_operators() -> Iterator[None]:
    """Inside it, resampling and margin losses are traced as themselves, and nn.LSTM not as oneDNN's fused layer, whose fake kernel gives its
    workspace a wrong shape and dtype, but as the operators that it is made of. Grouped matrix products, whose fake kernel knows bfloat16 on a GPU
    alone, are taken in every dtype that their kernels take. Views are those of the meta device: the fake ones give dims of one element other strides
    than eager's, by which matrix products choose how they add up."""
    set_aside = []
    for op, keys in [*((op, _KEYS) for op in _rewritten()), *((op, (DispatchKey.Meta,)) for op in _VIEWS)]:
        for key in keys:
            if key in op.py_kernels:
                set_aside.append((op, key, op.py_kernels.pop(key)))
        op._dispatch_cache.clear()
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    registrations: Any = torch._meta_registrations
    grouped_mm = registrations._meta_grouped_mm_common
    registrations._meta_grouped_mm_common = _grouped_mm_shape
    views = {op: op_implementations_dict.pop(op) for op in _VIEWS if op in op_implementations_dict}
    FakeTensorMode.cache_clear()
    try:
        yield
    finally:
        op_implementations_dict.update(views)
        FakeTensorMode.cache_clear()
        registrations._meta_grouped_mm_common = grouped_mm
        torch._C._set_mkldnn_enabled(enabled)
        for op, key, kernel in set_aside:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
