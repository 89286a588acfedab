import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.layout_problems import buffer_lists, lowest_height, tiling
from packhorse.memory.beam import beam_search
from packhorse.memory.buffers import Buffer, Layout
from packhorse.memory.check import check_layout
from packhorse.memory.pieces import Boxes

pytestmark = pytest.mark.pure

some_buffers = buffer_lists(max_buffers=6).filter(lambda buffers: buffers and all(b.size for b in buffers))


def search(buffers, capacity, width=100_000, branching=100, seed=0, stop=lambda: False):
    lower, upper, size = (np.array([getattr(b, field) for b in buffers], np.int64) for field in ("lower", "upper", "size"))
    return beam_search(Boxes(lower, upper, size), capacity, width=width, branching=branching, seed=seed, stop=stop)


@given(some_buffers, st.integers(0, 2))
def test_wide_enough_to_hold_everything_it_finds_the_best_height_and_no_lower(buffers, seed):
    best = lowest_height(buffers)
    offsets = search(buffers, best, seed=seed)
    assert offsets is not None
    height = max(int(o) + b.size for b, o in zip(buffers, offsets, strict=True))
    bound = max(sum(b.size for b in buffers if b.lower <= t < b.upper) for t in range(10))
    check_layout(buffers, Layout({b.name: int(o) for b, o in zip(buffers, offsets, strict=True)}, height, bound, 1, "beam"))
    assert height == best
    assert search(buffers, best - 1, seed=seed) is None


@given(buffer_lists(max_buffers=12).filter(lambda buffers: buffers and all(b.size for b in buffers)), st.integers(1, 3), st.integers(0, 30))
def test_a_narrow_beam_never_exceeds_the_capacity(buffers, width, room):
    capacity = max(sum(b.size for b in buffers if b.lower <= t < b.upper) for t in range(10)) + room
    offsets = search(buffers, capacity, width=width, branching=2)
    if offsets is not None:
        for i, a in enumerate(buffers):
            assert 0 <= offsets[i] <= capacity - a.size
            for j in range(i):
                b = buffers[j]
                apart = offsets[i] + a.size <= offsets[j] or offsets[j] + b.size <= offsets[i]
                assert apart or a.upper <= b.lower or b.upper <= a.lower


@pytest.mark.parametrize("seed", range(20))
def test_wide_enough_it_finds_a_layout_without_room_to_spare(seed):
    buffers, _ = tiling(seed, num_tiles=9, height=8, length=8)
    offsets = search(buffers, 8, width=2000)
    assert offsets is not None
    assert max(int(o) + b.size for b, o in zip(buffers, offsets, strict=True)) == 8


def test_it_stops_when_told():
    assert search([Buffer("a", 0, 1, 1)], 1, stop=lambda: True) is None
    assert search([Buffer("a", 0, 1, 1)], 1) is not None
