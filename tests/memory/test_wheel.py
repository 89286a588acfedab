"""Squeaky wheel: a case that a fixed order gets wrong and one promotion puts right, and what it keeps for any input."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.memory.bounds import lower_bound
from packhorse.memory.buffers import Buffer, Layout
from packhorse.memory.check import check_layout
from packhorse.memory.wheel import squeaky_wheel

pytestmark = pytest.mark.pure


def layout_of(buffers, offsets, alignment):
    sizes = [-(-b.size // alignment) * alignment for b in buffers]
    height = max((o + s for o, s in zip(offsets, sizes)), default=0)
    return Layout({b.name: o for b, o in zip(buffers, offsets)}, height, lower_bound(buffers, alignment), alignment, "wheel")


def test_a_stack_of_nested_lifespans_needs_no_gap():
    """Values made in turn and freed in the opposite one, as forward and backward do: the optimum is the sum of all."""
    buffers = [Buffer(str(k), k, 40 - k, 64 * (1 + k % 3)) for k in range(20)]
    offsets = squeaky_wheel(buffers, 64, lower_bound(buffers, 64), time.monotonic() + 10)
    assert layout_of(buffers, offsets, 64).height == sum(b.size for b in buffers)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 40)), max_size=14), st.sampled_from([1, 8]))
def test_every_result_is_a_layout(rows, alignment):
    buffers = [Buffer(str(k), lower, lower + length, size) for k, (lower, length, size) in enumerate(rows)]
    offsets = squeaky_wheel(buffers, alignment, lower_bound(buffers, alignment), time.monotonic() + 10)
    check_layout(buffers, layout_of(buffers, offsets, alignment))


def test_no_time_left_still_gives_one_round():
    buffers = [Buffer("a", 0, 2, 5), Buffer("b", 1, 3, 5)]
    check_layout(buffers, layout_of(buffers, squeaky_wheel(buffers, 1, 0, 0.0), 1))
