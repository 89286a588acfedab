"""Elements of a tensor in one order, read from where they are stored in another: whole tensors from parts, and parts from whole tensors.

Both are matrices with as many rows (parallel/part.py); only their columns are dealt out differently. A few megabytes are read at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.parallel.part import Part, blocks

Read = Callable[[int, int], Tensor]  # read(first, end): those elements, flat
_CHUNK_ELEMENTS = 2**20


@dataclass(frozen=True)
class Source:
    """A matrix with rows of `row` elements. spans: (start, end, at): elements [start, end) of a row that is wanted are at, at + 1, ... of its row."""

    read: Read
    row: int
    spans: list[tuple[int, int, int]]


def from_part(part: Part, read: Read) -> Source:
    """Of rows of the whole tensor, what is in a part. read: of the part, without padding."""
    return Source(read, part.lines * part.inner, part.spans)


def for_part(part: Part, read: Read) -> Source:
    """All of the rows of a part, without padding. read: of the whole tensor."""
    return Source(read, part.row, [(at, at + end - start, start) for start, end, at in part.spans])


def collected(first: int, end: int, row: int, sources: list[Source], dtype: torch.dtype) -> Tensor:
    """Elements [first, end) of a matrix with rows of `row` elements, each of them in one of the sources: (end - first,)."""
    found, at = torch.empty(end - first, dtype=dtype), 0
    for top, bottom, low, high in blocks(first, end, row):
        into = found[at : at + (bottom - top) * (high - low)].view(bottom - top, high - low)
        at += into.numel()
        for source in sources:
            step = max(1, _CHUNK_ELEMENTS // source.row) if source.row else 1
            for start, stop, place in source.spans:
                left, right = max(start, low), min(stop, high)
                for above in range(top, bottom, step) if left < right else ():
                    below = min(above + step, bottom)
                    begin = place + left - start
                    flat = source.read(above * source.row + begin, (below - 1) * source.row + begin + right - left)
                    into[above - top : below - top, left - low : right - low] = flat.as_strided((below - above, right - left), (source.row, 1))
    return found
