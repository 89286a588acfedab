"""Tensors -> a safetensors file, one tensor in host memory at a time, or one part of a tensor.

The library's own writer first gathers the bytes of all tensors, which doubles a training state. The format is simple enough to
stream: 8 bytes of header length, a JSON header (name -> dtype, shape, offsets), then the tensors back to back without holes.
Source: https://github.com/huggingface/safetensors, "Format". Read back by the library itself.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from packhorse.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Streamed:
    """A tensor that is read while it is written. read(first, end) gives those of its elements, flat, in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]


def dtype_name(name: str, tensor: Tensor) -> str:
    """The safetensors word for the dtype of a tensor. Raises CheckpointError naming the tensor if there is none."""
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
        raise CheckpointError(
            f"cannot save {name!r}: dtype {tensor.dtype}, layout {tensor.layout}; expected a dense tensor of one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPE_NAMES)}. Convert it before saving"
        )
    return DTYPE_NAMES[tensor.dtype]


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Streamed]) -> tuple[int, str]:
    """Writes `tensors` to the new file `path` and waits until they are on disk. Returns the file's (size_bytes, SHA-256 in hex).

    Any strides will do; a tensor that is not contiguous, or not on the CPU, is copied while it is written, and only then.
    Raises OSError as the file system does.
    """
    # Larger elements first, so that each tensor starts at a multiple of its element size and readers can map the file.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, offset = {}, 0
    for name in order:
        tensor = tensors[name]
        end = offset + prod(tensor.shape) * tensor.dtype.itemsize
        word = DTYPE_NAMES[tensor.dtype] if isinstance(tensor, Streamed) else dtype_name(name, tensor)
        header[name] = {"dtype": word, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for part in (len(encoded).to_bytes(8, "little"), encoded):
            _write_all(file.fileno(), memoryview(part))
            digest.update(part)
        for name in order:
            for content in _contents(tensors[name]):
                _write_all(file.fileno(), content)
                digest.update(content)
                del content  # or the copy of this tensor would live on beside the next one
        os.fsync(file.fileno())
    return 8 + len(encoded) + offset, digest.hexdigest()


def _contents(tensor: Tensor | Streamed) -> Iterator[memoryview]:
    if isinstance(tensor, Streamed):
        step = _CHUNK_BYTES // tensor.dtype.itemsize
        for first in range(0, prod(tensor.shape), step):
            yield _bytes(tensor.read(first, min(first + step, prod(tensor.shape))))
    else:
        yield _bytes(tensor)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_all(descriptor: int, content: memoryview) -> None:
    while len(content):
        content = content[os.write(descriptor, content) :]
