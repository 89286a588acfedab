"""torch's constants and their names in the graph."""

from typing import Any

import torch

from packhorse.graph.ir import Const

SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2", torch.complex64: "c64", torch.complex128: "c128", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64", torch.bool: "bool",
}  # fmt: skip
LONG = {short: dtype for dtype, short in SHORT.items()}

_KINDS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format", torch.device: "device"}


def to_const(value: Any) -> Const | None:
    """A dtype, layout, memory format or device as a Const; None for anything else."""
    kind = _KINDS.get(type(value))
    return None if kind is None else Const(kind, str(value).removeprefix("torch."))


def from_const(const: Const) -> Any:
    """The torch object that a Const names."""
    return torch.device(const.name) if const.kind == "device" else getattr(torch, const.name)
