import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.layout_problems import buffer_lists, most_alive
from packhorse.memory.buffers import Buffer, Layout
from packhorse.memory.check import check_layout
from packhorse.memory.greedy import METHODS, best_fit, by_contention, by_lifespan, by_size, by_start, first_fit, skyline

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("name", METHODS)
@given(buffers=buffer_lists(), alignment=st.sampled_from([1, 4, 64]))
def test_every_method_gives_a_valid_layout(name, buffers, alignment):
    place, order = METHODS[name]
    offsets = place(buffers, order(buffers), alignment)
    height = max((offset + -(-b.size // alignment) * alignment for b, offset in zip(buffers, offsets, strict=True)), default=0)
    bound = most_alive(buffers, alignment)
    assert height >= bound
    check_layout(buffers, Layout({b.name: o for b, o in zip(buffers, offsets, strict=True)}, height, bound, alignment, name))
    assert place(buffers, order(buffers), alignment) == offsets


# Three walls at time 0 leave gaps of 3 bytes at 2 and of 2 bytes at 7 when the two spacers are gone at time 1:
#   9..10 c | 7..9 spacer of 2 | 5..7 b | 2..5 spacer of 3 | 0..2 a
WALLS = [Buffer("a", 0, 2, 2), Buffer("wide", 0, 1, 3), Buffer("b", 0, 2, 2), Buffer("narrow", 0, 1, 2), Buffer("c", 0, 2, 1)]


def test_first_fit_takes_the_lowest_gap():
    assert first_fit([*WALLS, Buffer("x", 1, 2, 2)], range(6)) == [0, 2, 5, 7, 9, 2]


def test_best_fit_takes_the_smallest_gap_that_holds_it():
    assert best_fit([*WALLS, Buffer("x", 1, 2, 2)], range(6)) == [0, 2, 5, 7, 9, 7]
    assert best_fit([*WALLS, Buffer("x", 1, 2, 3)], range(6)) == [0, 2, 5, 7, 9, 2]
    assert best_fit([*WALLS, Buffer("x", 1, 2, 4)], range(6)) == [0, 2, 5, 7, 9, 10]


def test_skyline_places_what_lies_lowest_next():
    # All floors are 0, so a is first by order; it raises b to 4. Now c is lowest, at 0; it ends at 1, below b. Then b at 4.
    buffers = [Buffer("a", 0, 2, 4), Buffer("b", 1, 4, 2), Buffer("c", 3, 5, 1)]
    assert skyline(buffers, [0, 1, 2]) == [0, 4, 0]
    # With b first by order, a and c are both raised to 2.
    assert skyline(buffers, [1, 0, 2]) == [2, 0, 2]


def test_offsets_are_multiples_of_the_alignment():
    buffers = [Buffer("a", 0, 1, 1), Buffer("b", 0, 1, 65), Buffer("c", 0, 1, 1)]
    for place in (first_fit, best_fit, skyline):
        assert place(buffers, [0, 1, 2], 64) == [0, 64, 192]


def test_orders():
    buffers = [Buffer("short", 5, 6, 9), Buffer("long", 0, 4, 1), Buffer("late", 6, 8, 4)]
    buffers += [Buffer("crowd", 6, 7, 5), Buffer("twin", 6, 7, 2)]
    assert by_lifespan(buffers) == [1, 2, 0, 3, 4]
    assert by_size(buffers) == [0, 3, 2, 4, 1]
    assert by_start(buffers) == [1, 0, 2, 3, 4]
    # Alive in all: 1 in [0, 4), 9 in [5, 6), 4 + 5 + 2 = 11 in [6, 7), 4 in [7, 8).
    assert by_contention(buffers) == [3, 2, 4, 0, 1]


@pytest.mark.parametrize("name", METHODS)
def test_empty_buffers_lie_at_zero_and_take_no_room(name):
    place, order = METHODS[name]
    buffers = [Buffer("a", 0, 2, 8), Buffer("nothing", 0, 2, 0), Buffer("b", 1, 2, 8)]
    offsets = place(buffers, order(buffers), 8)
    assert sorted([offsets[0], offsets[2]]) == [0, 8]
    assert place([], order([]), 8) == []
