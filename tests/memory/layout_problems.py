"""Small layout problems shared by the tests of this folder, and the slow ways to know the right answer."""

import random
from collections.abc import Sequence
from itertools import permutations

from hypothesis import strategies as st

from packhorse.memory.buffers import Buffer


@st.composite
def buffer_lists(draw: st.DrawFn, max_buffers: int = 12, max_time: int = 10, max_size: int = 20) -> list[Buffer]:
    """Up to `max_buffers` buffers, zero sizes included."""
    num_buffers = draw(st.integers(0, max_buffers))
    buffers = []
    for i in range(num_buffers):
        lower = draw(st.integers(0, max_time - 1))
        upper = draw(st.integers(lower + 1, max_time))
        buffers.append(Buffer(f"b{i}", lower, upper, draw(st.integers(0, max_size))))
    return buffers


def lowest_height(buffers: Sequence[Buffer]) -> int:
    """The height of a best layout at alignment 1, by trying every order.

    A best layout can be pushed down until every buffer lies on the bottom or on another one alive at the same time. Taking its
    buffers from the bottom up and putting each on the highest one below it gives that layout again, so some order is the best.
    """
    best = None
    for order in permutations(buffers):
        ends: list[tuple[Buffer, int]] = []
        for b in order:
            floor = max((end for a, end in ends if a.lower < b.upper and b.lower < a.upper), default=0)
            ends.append((b, floor + b.size))
        height = max((end for _, end in ends), default=0)
        best = height if best is None else min(best, height)
    return best or 0


def most_alive(buffers: Sequence[Buffer], alignment: int) -> int:
    """The largest sum of rounded sizes alive at one instant, instant by instant."""
    instants = range(min((b.lower for b in buffers), default=0), max((b.upper for b in buffers), default=0))
    return max((sum(-(-b.size // alignment) * alignment for b in buffers if b.lower <= t < b.upper) for t in instants), default=0)


def tiling(seed: int, num_tiles: int, height: int = 32, length: int = 32) -> tuple[list[Buffer], list[int]]:
    """A rectangle of `height` bytes and `length` times cut at random into tiles: (buffers, offsets), shuffled.

    Exactly `height` bytes are alive at every time, and the tiles' own places are a layout of that height, so it is the best.
    Few other layouts are: there is no room to spare at any time.
    """
    generator = random.Random(seed)
    tiles = [(0, length, 0, height)]  # lower, upper, offset, end
    while len(tiles) < num_tiles:
        tile = lower, upper, offset, end = generator.choice(tiles)
        if upper - lower > 1 and generator.random() < 0.5:
            cut = generator.randrange(lower + 1, upper)
            parts = [(lower, cut, offset, end), (cut, upper, offset, end)]
        elif end - offset > 1:
            cut = generator.randrange(offset + 1, end)
            parts = [(lower, upper, offset, cut), (lower, upper, cut, end)]
        else:
            continue
        tiles.remove(tile)
        tiles += parts
    generator.shuffle(tiles)
    buffers = [Buffer(f"tile{i}", lower, upper, end - offset) for i, (lower, upper, offset, end) in enumerate(tiles)]
    return buffers, [offset for _, _, offset, _ in tiles]
