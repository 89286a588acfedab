import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_problems import buffer_lists, lowest_height, most_alive

from packhorse.memory.buffers import Buffer
from packhorse.memory.greedy import by_start, first_fit
from packhorse.memory.solver import solve

pytestmark = pytest.mark.pure


def height_of(buffers, offsets, alignment):
    return max((o + -(-b.size // alignment) * alignment for b, o in zip(buffers, offsets, strict=True)), default=0)


def stacked(buffers, alignment):
    """The worst start: no byte is used twice."""
    offsets = [0]
    for b in buffers[:-1]:
        offsets.append(offsets[-1] + -(-b.size // alignment) * alignment)
    return offsets[: len(buffers)]


@settings(max_examples=60, deadline=None)
@given(buffer_lists(max_buffers=5), st.sampled_from([1, 2]))
def test_it_finds_the_best_height(buffers, num_workers):
    start = stacked(buffers, 1)
    offsets = solve(buffers, start, alignment=1, goal=0, time_limit_s=60, num_workers=num_workers)
    for i, a in enumerate(buffers):
        for j in range(i):
            b = buffers[j]
            apart = offsets[i] + a.size <= offsets[j] or offsets[j] + b.size <= offsets[i]
            assert apart or not a.overlaps(b)
    assert height_of(buffers, offsets, 1) == lowest_height(buffers)


@settings(max_examples=25, deadline=None)
@given(buffer_lists(max_buffers=5, max_size=100))
def test_with_an_alignment_it_is_the_problem_of_rounded_sizes(buffers):
    rounded = [Buffer(b.name, b.lower, b.upper, -(-b.size // 16)) for b in buffers]
    offsets = solve(buffers, stacked(buffers, 16), alignment=16, goal=0, time_limit_s=60, num_workers=1)
    assert all(offset % 16 == 0 for offset in offsets)
    assert height_of(buffers, offsets, 16) == 16 * lowest_height(rounded)


def hard(seed):
    """Forty buffers without an obvious layout."""
    state, buffers = seed, []
    for i in range(40):
        state = (state * 1103515245 + 12345) % 2**31
        lower, length, size = state % 23, 1 + state // 23 % 7, 1 + state // 161 % 19
        buffers.append(Buffer(str(i), lower, lower + length, size))
    return buffers


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_number_of_workers_does_not_change_the_layout(seed):
    buffers = hard(seed)
    start = first_fit(buffers, by_start(buffers))
    goal = most_alive(buffers, 1)
    one, again, two = (solve(buffers, start, alignment=1, goal=goal, time_limit_s=120, num_workers=n) for n in (1, 1, 2))
    assert one == again == two


def test_it_never_returns_less_than_it_was_given_and_keeps_to_the_time():
    buffers = hard(4)
    start = first_fit(buffers, by_start(buffers))
    assert height_of(buffers, solve(buffers, start, alignment=1, goal=0, time_limit_s=0, num_workers=1), 1) <= height_of(buffers, start, 1)
    begin = time.monotonic()
    solve(buffers, start, alignment=1, goal=0, time_limit_s=1, num_workers=2)
    assert time.monotonic() - begin < 60  # generous: only a search that ignores its limit takes that long


def test_buffers_without_bytes():
    assert solve([], [], alignment=8, goal=0, time_limit_s=1, num_workers=1) == []
    assert solve([Buffer("nothing", 0, 1, 0)], [0], alignment=8, goal=0, time_limit_s=1, num_workers=1) == [0]
