"""While a model is traced, some operators would be rewritten in Python into others that round differently from the kernel that eager runs.

torch registers such rewrites ("decompositions") for resampling and some losses, for the benefit of its compiler. A capture that promises
eager's bits has to see the
operator itself, so they are set aside for the time of the trace.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


_LOSSES = ("multi_margin_loss", "multilabel_margin_loss_forward")


def _rewritten() -> list[torch._ops.OpOverload]:
    names = [name for name in dir(torch.ops.aten) if name.lstrip("_").startswith("upsample_") or name in _LOSSES]
    packets = [getattr(torch.ops.aten, name) for name in names]
    return [getattr(packet, kind) for packet in packets for kind in packet.overloads()]


@contextmanager
def native_operators() -> Iterator[None]:
    """Inside it, resampling and margin losses are traced as themselves, and nn.LSTM not as oneDNN's fused layer, whose fake kernel gives its
    workspace a wrong shape and dtype, but as the operators that it is made of."""
    set_aside = []
    for op in _rewritten():
        for key in _KEYS:
            if key in op.py_kernels:
                set_aside.append((op, key, op.py_kernels.pop(key)))
        op._dispatch_cache.clear()
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
        for op, key, kernel in set_aside:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
