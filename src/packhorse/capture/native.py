"""While a model is traced, some operators would be rewritten in Python into others that round differently from the kernel that eager runs.

torch registers such rewrites ("decompositions") for resampling, for the benefit of its compiler. A capture that promises eager's bits has to see the
operator itself, so they are set aside for the time of the trace.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def _resampling() -> list[torch._ops.OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.lstrip("_").startswith("upsample_")]
    return [getattr(packet, kind) for packet in packets for kind in packet.overloads()]


@contextmanager
def native_operators() -> Iterator[None]:
    """Inside it, resampling operators are traced as themselves."""
    set_aside = []
    for op in _resampling():
        for key in _KEYS:
            if key in op.py_kernels:
                set_aside.append((op, key, op.py_kernels.pop(key)))
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in set_aside:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
