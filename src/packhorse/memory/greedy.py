"""Fast placements: one buffer after another, never moved again.

Two rules say where the next buffer goes, several orders say which one is next:

    offset
      ^   |  b  |          first_fit   the lowest gap between placed buffers alive at the same time that is large enough
      |   +-----+          best_fit    the smallest such gap
      |   | gap |
      |   +-----+          skyline     the other way round: of all unplaced buffers the one that could lie lowest is next, at
      |   |  a  |                      the top of what lies under it; the order only breaks ties. It never fills a gap.
      +-----------> time

Every method is deterministic (ties go by position in the list). A placement of n buffers takes n passes of numpy over at most n
numbers; n = 5,000 takes some tenths of a second. With more than MANY the gaps come from a tree (occupied.py), which takes about n log n: 100,000
buffers are placed in some ten seconds, at the same offsets.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from packhorse.memory.bounds import live_bytes
from packhorse.memory.buffers import Buffer
from packhorse.memory.occupied import Occupied
from packhorse.units import align_up

Order = Callable[[Sequence[Buffer]], list[int]]
Rule = Callable[..., list[int]]  # (buffers, order, alignment) -> offsets; those that fill gaps take `fixed` too
Fixed = Sequence[tuple[Buffer, int]]  # buffers that lie at given offsets already
MANY = 8_000  # buffers, from which on a tree finds gaps faster than a pass over all
OPEN_END = int(np.iinfo(np.int64).max // 2)


def by_lifespan(buffers: Sequence[Buffer]) -> list[int]:
    """Longest lifespan first. Lays nested lifespans, such as the saved values of a training step, in a gapless stack."""
    return sorted(range(len(buffers)), key=lambda i: (buffers[i].lower - buffers[i].upper, -buffers[i].size))


def by_size(buffers: Sequence[Buffer]) -> list[int]:
    """Largest first."""
    return sorted(range(len(buffers)), key=lambda i: (-buffers[i].size, buffers[i].lower - buffers[i].upper))


def by_area(buffers: Sequence[Buffer]) -> list[int]:
    """Largest size * lifespan first."""
    return sorted(range(len(buffers)), key=lambda i: -buffers[i].size * (buffers[i].upper - buffers[i].lower))


def by_size_and_lifespan(buffers: Sequence[Buffer]) -> list[int]:
    """Largest size**2 * lifespan first: between by_size and by_area."""
    return sorted(range(len(buffers)), key=lambda i: -(buffers[i].size ** 2) * (buffers[i].upper - buffers[i].lower))


def by_start(buffers: Sequence[Buffer]) -> list[int]:
    """In the order of the schedule, as an allocator would meet them; of two that begin together the one that ends last."""
    return sorted(range(len(buffers)), key=lambda i: (buffers[i].lower, -buffers[i].upper, -buffers[i].size))


def by_contention(buffers: Sequence[Buffer]) -> list[int]:
    """First those alive when the most bytes are alive; among equals the largest first."""
    times, alive = live_bytes(buffers)
    most = [
        int(alive[first:last].max())
        for first, last in zip(np.searchsorted(times, [b.lower for b in buffers]), np.searchsorted(times, [b.upper for b in buffers]), strict=True)
    ]
    return sorted(range(len(buffers)), key=lambda i: (-most[i], -buffers[i].size))


def first_fit(buffers: Sequence[Buffer], order: Sequence[int], alignment: int = 1, fixed: Fixed = ()) -> list[int]:
    """Offsets (n,), multiples of `alignment`: each buffer, in `order`, at the lowest gap that holds it."""
    return _fill_gaps(buffers, order, alignment, lambda gaps, fits: int(np.argmax(fits)), fixed)


def best_fit(buffers: Sequence[Buffer], order: Sequence[int], alignment: int = 1, fixed: Fixed = ()) -> list[int]:
    """Offsets (n,), multiples of `alignment`: each buffer, in `order`, at the smallest gap that holds it (the lowest of equals)."""
    largest = np.iinfo(np.int64).max
    return _fill_gaps(buffers, order, alignment, lambda gaps, fits: int(np.argmin(np.where(fits, gaps, largest))), fixed)


def skyline(buffers: Sequence[Buffer], order: Sequence[int], alignment: int = 1) -> list[int]:
    """Offsets (n,), multiples of `alignment`: next is always the buffer that can lie lowest, the first in `order` of equals."""
    lower = np.array([buffers[i].lower for i in order], np.int64)
    upper = np.array([buffers[i].upper for i in order], np.int64)
    sizes = [align_up(buffers[i].size, alignment) for i in order]
    floor = np.zeros(len(buffers), np.int64)  # the top of all placed buffers that each overlaps in time
    placed = np.iinfo(np.int64).max  # out of reach of argmin
    offsets = [0] * len(buffers)
    for _ in buffers:
        k = int(np.argmin(floor))
        offset = int(floor[k])
        offsets[order[k]] = offset
        floor[k] = placed
        if sizes[k]:
            raised = (lower < upper[k]) & (upper > lower[k])
            np.maximum(floor, offset + sizes[k], out=floor, where=raised)
    return offsets


# In the order in which lay_out tries them: first what lays out most training steps without a gap.
METHODS: dict[str, tuple[Rule, Order]] = {
    "first_fit/lifespan": (first_fit, by_lifespan),
    "first_fit/size": (first_fit, by_size),
    "first_fit/size_and_lifespan": (first_fit, by_size_and_lifespan),
    "first_fit/area": (first_fit, by_area),
    "first_fit/contention": (first_fit, by_contention),
    "first_fit/start": (first_fit, by_start),
    "best_fit/lifespan": (best_fit, by_lifespan),
    "best_fit/size": (best_fit, by_size),
    "skyline/lifespan": (skyline, by_lifespan),
    "skyline/size": (skyline, by_size),
    "skyline/area": (skyline, by_area),
}


def _fill_gaps(
    buffers: Sequence[Buffer],
    order: Sequence[int],
    alignment: int,
    choose: Callable[[NDArray[np.int64], NDArray[np.bool_]], int],
    fixed: Fixed = (),
) -> list[int]:
    """Offsets (n,). `choose(gaps, fits)` -> index of a gap; the last gap is the open one above everything and always fits."""
    if len(buffers) > MANY:
        return _fill_gaps_of_many(buffers, order, alignment, choose, fixed)
    # Rows: lower, upper, offset, end of the placed buffers, sorted by offset, so that one pass finds all gaps of a lifespan.
    placed = np.empty((4, len(buffers) + len(fixed)), np.int64)
    count = len(fixed)
    for at, (buffer, offset) in enumerate(sorted(fixed, key=lambda item: item[1])):
        placed[:, at] = buffer.lower, buffer.upper, offset, offset + align_up(buffer.size, alignment)
    offsets = [0] * len(buffers)
    for i in order:
        size = align_up(buffers[i].size, alignment)
        if size == 0:
            continue
        beside = placed[:, :count]
        beside = beside[2:, (beside[0] < buffers[i].upper) & (beside[1] > buffers[i].lower)]
        bottoms = np.append(0, np.maximum.accumulate(beside[1]))
        gaps = np.append(beside[0], OPEN_END) - bottoms
        offset = int(bottoms[choose(gaps, gaps >= size)])
        offsets[i] = offset
        at = int(np.searchsorted(placed[2, :count], offset))
        placed[:, at + 1 : count + 1] = placed[:, at:count]
        placed[:, at] = buffers[i].lower, buffers[i].upper, offset, offset + size
        count += 1
    return offsets


def _fill_gaps_of_many(
    buffers: Sequence[Buffer],
    order: Sequence[int],
    alignment: int,
    choose: Callable[[NDArray[np.int64], NDArray[np.bool_]], int],
    fixed: Fixed,
) -> list[int]:
    """As _fill_gaps."""
    occupied = Occupied([*buffers, *(buffer for buffer, _ in fixed)])
    for buffer, offset in fixed:
        if buffer.size:
            occupied.add(buffer, offset, offset + align_up(buffer.size, alignment))
    offsets = [0] * len(buffers)
    for i in order:
        size = align_up(buffers[i].size, alignment)
        if size == 0:
            continue
        taken = occupied.beside(buffers[i])
        bottoms = np.array([0, *taken[1::2]], np.int64)
        gaps = np.array([*taken[::2], OPEN_END], np.int64) - bottoms
        offsets[i] = offset = int(bottoms[choose(gaps, gaps >= size)])
        occupied.add(buffers[i], offset, offset + size)
    return offsets
