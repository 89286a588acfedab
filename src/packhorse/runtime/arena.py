"""The arena: one allocation of the plan's height, 64-byte aligned, with huge pages advised; and the canary that measures how much of it a run wrote.

Above the height lie guard bytes that no program may touch. Before a run the guard and the last bytes below the height hold a pattern; after it, the
highest changed byte is the arena's measured high-water mark. The first run of a program is watched over its whole height.
"""

import ctypes
import mmap

import torch

from packhorse.errors import CheckError
from packhorse.units import align_up

ALIGNMENT = 64
GUARD_BYTES = 4096
WINDOW_BYTES = 4096
PATTERN = 0xA5
_HUGE_PAGE = 2 << 20


class Arena:
    """`data`: (capacity + guard,) bytes on `device`. `hollow`: bytes that operands point at whose shape alone is read: on a CPU address space that is
    reserved and never touched, so that it takes no memory (elsewhere it does). pinned: host memory that another device copies from and to."""

    def __init__(self, num_bytes: int, device: torch.device, hollow_bytes: int = 0, pinned: bool = False):
        self.device = device
        self.capacity = align_up(num_bytes, ALIGNMENT)
        total = self.capacity + GUARD_BYTES
        if device.type == "cpu" and not pinned:
            self.data = _huge_paged(total)
        else:
            self.data = torch.empty(total + ALIGNMENT, dtype=torch.uint8, device=device, pin_memory=pinned)
            self.data = self.data[-self.data.data_ptr() % ALIGNMENT :][:total]

        if device.type == "cpu":
            self.hollow = torch.frombuffer(mmap.mmap(-1, max(hollow_bytes, 1)), dtype=torch.uint8)
        else:
            self.hollow = torch.empty(hollow_bytes, dtype=torch.uint8, device=device)

    def fill(self, height: int, everything: bool, floor: int = 0) -> None:
        """Write the pattern where `high_water` will look for changes: from `floor` on."""
        start = floor if everything else max(floor, height - WINDOW_BYTES)
        self.data[start : height + GUARD_BYTES].fill_(PATTERN)

    def high_water(self, height: int, everything: bool, floor: int = 0) -> int | None:
        """One past the highest byte changed since `fill`; None if none of the watched bytes changed. Raises CheckError if the guard was hit."""
        if not bool((self.data[height : height + GUARD_BYTES] == PATTERN).all()):
            raise CheckError(f"the program wrote above the arena's height of {height} bytes")
        start = floor if everything else max(floor, height - WINDOW_BYTES)
        end = height
        while end > start:  # from the top down, a page at a time: the answer is nearly always in the first
            low = max(start, end - WINDOW_BYTES)
            changed = torch.nonzero(self.data[low:end] != PATTERN)
            if len(changed):
                return low + int(changed[-1]) + 1
            end = low
        return None


def zeroed(num_bytes: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """Zeroed bytes, aligned to 64; from a huge page on a CPU. pinned: host memory that another device copies from and to."""
    if device.type == "cpu" and num_bytes >= _HUGE_PAGE and not pinned:
        return _huge_paged(num_bytes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def _huge_paged(num_bytes: int) -> torch.Tensor:
    """Anonymous memory on a 2 MiB boundary, with huge pages advised where the system knows them; untouched pages take no memory."""
    region = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    return torch.frombuffer(region, dtype=torch.uint8)[-address % _HUGE_PAGE :][:num_bytes]
