"""Squeaky wheel: place everything, move the buffers that ended too high to the front of the order, place again.

A buffer that stands above the goal was placed too late to find its room. Brought forward, it is placed sooner the next time, and a few
such rounds close the small gaps that a fixed order leaves on graphs of thousands of buffers. Source of the idea: Joslin & Clements 1999,
"Squeaky Wheel" Optimization.
"""

import time
from collections.abc import Sequence

from packhorse.memory.buffers import Buffer
from packhorse.memory.greedy import METHODS
from packhorse.units import align_up

STARTS = ("skyline/lifespan", "skyline/size", "skyline/area", "first_fit/lifespan")
ROUNDS = 30


def squeaky_wheel(buffers: Sequence[Buffer], alignment: int, goal: int, deadline: float) -> list[int]:
    """The lowest offsets (n,) found: from each start at most ROUNDS rounds, until one is no higher than `goal` or time.monotonic() passes `deadline`.

    Deterministic apart from the deadline; the first round of the first start is always made.
    """
    sizes = [align_up(b.size, alignment) for b in buffers]
    best, best_height = None, 0
    for name in STARTS:
        place, order_of = METHODS[name]
        order = list(order_of(buffers))
        for _ in range(ROUNDS):
            if best is not None and time.monotonic() > deadline:
                return best
            offsets = place(buffers, order, alignment)
            ends = [offset + size for offset, size in zip(offsets, sizes)]
            height = max(ends, default=0)
            if best is None or height < best_height:
                best, best_height = offsets, height
            if height <= goal:
                return best
            order = [i for i in order if ends[i] > goal] + [i for i in order if ends[i] <= goal]
    assert best is not None
    return best
