from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.layout_problems import buffer_lists
from packhorse.memory import greedy
from packhorse.memory.buffers import Buffer
from packhorse.memory.occupied import Occupied

pytestmark = pytest.mark.pure


def bytes_in(intervals):
    pairs = list(zip(intervals[::2], intervals[1::2], strict=True))
    assert all(a < b for a, b in pairs) and all(end < begin for (_, end), (begin, _) in pairwise(pairs)), intervals
    return {byte for a, b in pairs for byte in range(a, b)}


@given(buffers=buffer_lists(), data=st.data())
def test_beside_is_the_union_of_all_that_lie_there_meanwhile(buffers, data):
    occupied, placed = Occupied(buffers), []
    for buffer in buffers:
        met = {byte for other, at in placed if other.overlaps(buffer) for byte in range(at, at + other.size)}
        assert bytes_in(occupied.beside(buffer)) == met
        if buffer.size:
            at = data.draw(st.integers(0, 40))
            occupied.add(buffer, at, at + buffer.size)
            placed.append((buffer, at))


def test_a_lifespan_between_two_begins_meets_what_lasts_over_it():
    long, late, short = Buffer("long", 0, 9, 4), Buffer("late", 5, 9, 4), Buffer("short", 4, 6, 4)
    occupied = Occupied([long, late, short])
    assert occupied.beside(short) == []
    occupied.add(long, 0, 4)
    occupied.add(late, 8, 12)
    assert occupied.beside(short) == [0, 4, 8, 12]
    occupied.add(short, 4, 8)
    assert occupied.beside(long) == [0, 12]


@pytest.mark.parametrize("name", [name for name in greedy.METHODS if "fit" in name])
@given(buffers=buffer_lists(), alignment=st.sampled_from([1, 64]))
def test_the_tree_and_the_pass_over_all_find_the_same_offsets(name, buffers, alignment):
    place, order = greedy.METHODS[name]
    by_pass = place(buffers, order(buffers), alignment)
    many, greedy.MANY = greedy.MANY, -1
    try:
        by_tree = place(buffers, order(buffers), alignment)
    finally:
        greedy.MANY = many
    assert by_tree == by_pass
