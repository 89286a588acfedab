import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.layout_problems import buffer_lists, lowest_height, most_alive, tiling
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


def test_it_finds_the_one_height_of_a_tiling():
    buffers, _ = tiling(seed=1, num_tiles=400, height=512, length=512)
    start = first_fit(buffers, by_start(buffers))
    assert height_of(buffers, start, 1) > 512
    offsets = solve(buffers, start, alignment=1, goal=512, time_limit_s=300, num_workers=2)
    assert height_of(buffers, offsets, 1) == 512
    # In the same layout with other bytes to a unit and a gap in time, the right half starts from the bottom again.
    twice = [Buffer(b.name, b.lower, b.upper, 24 * b.size) for b in buffers]
    twice += [Buffer(b.name + "'", b.lower + 1000, b.upper + 1000, 24 * b.size) for b in buffers]
    offsets = solve(twice, stacked(twice, 8), alignment=8, goal=0, time_limit_s=300, num_workers=2)
    assert height_of(twice, offsets, 8) == 24 * 512


@pytest.mark.parametrize("seed, num_tiles", [(0, 400), (3, 400), (3, 50)])
def test_the_number_of_workers_does_not_change_the_layout(seed, num_tiles):
    buffers, _ = tiling(seed, num_tiles, height=512, length=512)
    start = first_fit(buffers, by_start(buffers))
    one, again, two = (solve(buffers, start, alignment=1, goal=512, time_limit_s=300, num_workers=n) for n in (1, 1, 2))
    assert one == again == two


def test_the_first_attempt_in_the_list_wins_whichever_ends_first():
    # 70 buffers in room to spare: every attempt fits at once, each in its own way, and the search ends with the goal.
    buffers = [Buffer(str(i), i % 23, i % 23 + 1 + i % 7, 1 + i % 19) for i in range(70)]
    start = stacked(buffers, 1)
    goal = most_alive(buffers, 1) + 1
    results = [solve(buffers, start, alignment=1, goal=goal, time_limit_s=300, num_workers=n) for n in (1, 2, 3, 4, 4, 4)]
    assert all(result == results[0] for result in results)


def test_it_ends_at_the_goal():
    buffers, _ = tiling(seed=1, num_tiles=400, height=512, length=512)
    start = first_fit(buffers, by_start(buffers))
    goal = height_of(buffers, start, 1)
    offsets = solve(buffers, start, alignment=1, goal=goal, time_limit_s=300, num_workers=1)
    assert 512 < height_of(buffers, offsets, 1) <= goal  # a search would have reached 512, as in the first test of tilings


def test_it_never_returns_worse_than_it_was_given_and_keeps_to_the_time():
    buffers, best = tiling(seed=1, num_tiles=400, height=512, length=512)
    assert solve(buffers, best, alignment=1, goal=0, time_limit_s=0, num_workers=1) == best
    start = first_fit(buffers, by_start(buffers))
    offsets = solve(buffers, start, alignment=1, goal=0, time_limit_s=0, num_workers=1)
    assert 512 <= height_of(buffers, offsets, 1) <= height_of(buffers, start, 1)


def test_buffers_without_bytes():
    assert solve([], [], alignment=8, goal=0, time_limit_s=1, num_workers=1) == []
    assert solve([Buffer("nothing", 0, 1, 0)], [0], alignment=8, goal=0, time_limit_s=1, num_workers=1) == [0]
