"""Whole tensors <-> the parts of them that tensor parallel ranks hold (parallel/part.py), in real memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from packhorse.parallel.part import Part
from packhorse.runtime.transport import memory_order


def cut_out(whole: Tensor, part: Part) -> Tensor:
    """The part of a tensor of any strides: flat, in its order of memory, with zeros as padding."""
    rows = whole.permute(part.order)
    mine = torch.zeros([part.local_shape[dim] for dim in part.order], dtype=whole.dtype, device=whole.device)
    _fill(mine, rows, part, part.rank, out_of=True)
    return mine.view(-1)


def in_memory_order(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The elements of a tensor of any strides as if it had these, dense ones: flat, in their order of memory."""
    return memory_order(torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor))


def put_together(parts: Sequence[Tensor], part: Part) -> Tensor:
    """The whole tensor, with the strides that it has in the model, from what each rank has of it, flat, padding included. part: of any rank."""
    whole = torch.empty_strided(part.shape, part.strides, dtype=parts[0].dtype, device=parts[0].device)
    for rank, flat in enumerate(parts):
        _fill(flat.view([part.local_shape[dim] for dim in part.order]), whole.permute(part.order), part, rank, out_of=False)
    return whole


def _fill(mine: Tensor, whole: Tensor, part: Part, rank: int, out_of: bool) -> None:
    """Copies between a rank's part and the whole tensor, both with their dims in the order of memory."""
    at = 0
    for start, end in part.ranges[rank]:
        pair = mine.narrow(part.place, at, end - start), whole.narrow(part.place, start, end - start)
        here, there = pair if out_of else pair[::-1]
        here.copy_(there)
        at += end - start


def without_padding(held: Tensor, begin: int, part: Part | None) -> Tensor | None:
    """held (n,): elements of the part's memory from `begin` on -> those that are not padding, as a view; None if they do not lie in one piece."""
    if part is None:
        return held
    count = part.before(begin + held.numel()) - part.before(begin)
    return held[:count] if count in (0, held.numel()) or part.outer == 1 else None


def is_kept(begin: int, end: int, part: Part, device: torch.device) -> Tensor:
    """Which elements [begin, end) of the part's memory are not padding: (end - begin,) of bool."""
    return torch.arange(begin, end, device=device) % (part.width * part.inner) < part.lines * part.inner
