"""A flat file of token numbers, memory-mapped: opening one of any size reads 4 MiB of it at most.

Known shortcoming: between the check that a file still has its size and the reading of a batch lie some microseconds; a file that is cut
short just then ends the process with SIGBUS, as any mapped file does.
"""

import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from packhorse.errors import DataError

TokenDtype = Literal["uint16", "uint32"]
Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

SUFFIX = ".bin"
_NUM_BLOCKS = 64
_BLOCK_BYTES = 2**16
# The upper half of a 32-bit number below 2**20, more than any vocabulary of today has, is at most this.
_MOST_UPPER = 15


@dataclass(frozen=True)
class TokenFile:
    """`tokens` (N,) of the file at `path`, read only, little-endian, mapped and not in memory.

    `digest`: SHA-256 over the file's dtype and size and 64 blocks of 64 KiB spread evenly over it, the first and the last among them, so it
    costs the same for a file of any size. A file of up to 4 MiB is read whole. A change that keeps the size and lies between the blocks is
    not seen. `largest`, the largest token in those blocks, and its `largest_at`, its place.
    """

    path: Path
    tokens: Tokens
    digest: str
    largest: int
    largest_at: int
    modified_ns: int
    file: BinaryIO


def open_token_file(path: Path, dtype: TokenDtype) -> TokenFile:
    """Maps the tokens of `path`, numbers of `dtype`, little-endian, one after the other with no header.

    Raises DataError if it cannot be read, its size is no multiple of a token's, or it looks like numbers of the other dtype.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  kept open for as long as the tokens are used
        status = os.fstat(file.fileno())
        _require_whole_tokens(path, status.st_size, dtype)
        found = _sample(file, status.st_size)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}; make it readable, or correct data.corpus") from error
    if dtype == "uint16" and status.st_size % 4 == 0:
        _require_no_uint32(path, found)
    kind = np.dtype(dtype).newbyteorder("<")
    largest, place = _largest(found, kind)
    return TokenFile(path, np.frombuffer(mapped, kind), _digest(found, status.st_size, dtype), largest, place, status.st_mtime_ns, file)


def require_unchanged(opened: TokenFile) -> None:
    """Costs a system call. Raises DataError if the file has been cut, extended or overwritten in place since it was opened.

    A file put in its place by a rename does no harm: the tokens of the old one stay mapped.
    """
    status = os.fstat(opened.file.fileno())
    if status.st_mtime_ns == opened.modified_ns and status.st_size == opened.tokens.nbytes:
        return
    dtype: TokenDtype = "uint16" if opened.tokens.itemsize == 2 else "uint32"
    if status.st_size == opened.tokens.nbytes and _digest(_sample(opened.file, status.st_size), status.st_size, dtype) == opened.digest:
        return  # touched, not changed
    raise DataError(
        f"the token file {opened.path} changed while it was being read: it had {opened.tokens.nbytes:,} bytes and has {status.st_size:,}, or its "
        "tokens differ; the samples of a run would no longer be what they were. Put the file back as it was and go on with --resume auto"
    )


def _require_whole_tokens(path: Path, num_bytes: int, dtype: TokenDtype) -> None:
    itemsize = np.dtype(dtype).itemsize
    if num_bytes % itemsize:
        raise DataError(
            f"the token file {path} has {num_bytes:,} bytes, which is no multiple of {itemsize}, the size of a {dtype} token: it was cut short, or "
            "holds something else. Copy it again, or set data.token_dtype to what it was written with"
        )


def _sample(file: BinaryIO, num_bytes: int) -> list[tuple[int, bytes]]:
    """(offset, block) of the blocks that stand for the file. Read, not mapped, so that a file that shrinks meanwhile does no harm."""
    if num_bytes <= _NUM_BLOCKS * _BLOCK_BYTES:
        offsets, length = [0], num_bytes
    else:
        # multiples of 4, so that no token is cut
        offsets, length = [(num_bytes - _BLOCK_BYTES) * i // (_NUM_BLOCKS - 1) // 4 * 4 for i in range(_NUM_BLOCKS - 1)], _BLOCK_BYTES
        offsets.append(num_bytes - _BLOCK_BYTES)
    return [(offset, os.pread(file.fileno(), length, offset)) for offset in offsets]


def _digest(blocks: list[tuple[int, bytes]], num_bytes: int, dtype: TokenDtype) -> str:
    digest = hashlib.sha256(f"{dtype}:{num_bytes}:".encode())
    for _, block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _largest(blocks: list[tuple[int, bytes]], kind: np.dtype) -> tuple[int, int]:
    """The largest token of the blocks, and its place in the file; (0, 0) without any."""
    largest, place = 0, 0
    for offset, block in blocks:
        tokens = np.frombuffer(block[: len(block) // kind.itemsize * kind.itemsize], kind)
        if len(tokens) and int(tokens.max()) > largest:
            largest, place = int(tokens.max()), offset // kind.itemsize + int(tokens.argmax())
    return largest, place


def _require_no_uint32(path: Path, blocks: list[tuple[int, bytes]]) -> None:
    """The upper half of a 32-bit token is 0, or a little more in a vocabulary above 2**16; no text in 16-bit tokens is so at every second place."""
    halves = [np.frombuffer(block[: len(block) // 4 * 4], "<u2") for _, block in blocks]
    lower, upper = np.concatenate([part[::2] for part in halves]), np.concatenate([part[1::2] for part in halves])
    if len(upper) < 64:
        return
    most_upper, most_lower = int(upper.max()), int(lower.max())
    if most_upper == 0 < most_lower or (most_upper <= _MOST_UPPER and most_lower >= 2**15):
        raise DataError(
            f"the token file {path} looks like uint32 and is read as uint16: every second number is at most {most_upper}, the others go up to "
            f"{most_lower}. Set data.token_dtype = 'uint32' (if it is uint16 after all, write it as uint32)"
        )
