import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.layout_problems import buffer_lists, lowest_height
from packhorse.memory.buffers import Buffer
from packhorse.memory.pieces import Boxes, live_sets, split

pytestmark = pytest.mark.pure


def boxes_of(buffers):
    lower, upper, size = (np.array([getattr(b, field) for b in buffers], np.int64) for field in ("lower", "upper", "size"))
    return Boxes(lower, upper, size)


def test_split_by_hand():
    # time      0 1 2 3 4
    # e, 3      . . e e .    c and d never meet, e meets d: with a and b settled c is alone, and d and e are alive with each other
    # c, d      c . d d .
    # b, 20     b b b b .    alive with a, c, d, e: under them
    # a, 10     a a a a f    f begins when all others end
    left = [Buffer("a", 0, 4, 10), Buffer("b", 0, 4, 20), Buffer("c", 0, 1, 1), Buffer("d", 2, 4, 2), Buffer("e", 2, 4, 3)]
    boxes = boxes_of([*left, Buffer("f", 4, 6, 7)])
    settled, pieces = split(boxes)
    assert settled == {0: 0, 1: 10, 2: 30, 3: 30, 4: 32, 5: 0}
    assert pieces == []


def test_a_chain_stays_in_one_piece():
    # Each overlaps the next only; the middle one meets both neighbours but not the fourth.
    boxes = boxes_of([Buffer("a", 0, 2, 1), Buffer("b", 1, 4, 1), Buffer("c", 3, 6, 1), Buffer("d", 5, 7, 1)])
    settled, pieces = split(boxes)
    assert settled == {}
    assert [(piece.members.tolist(), piece.base) for piece in pieces] == [([0, 1, 2, 3], 0)]


@given(buffer_lists())
def test_live_sets_are_the_maximal_ones(buffers):
    alive = [frozenset(i for i, b in enumerate(buffers) if b.lower <= t < b.upper) for t in range(10)]
    maximal = {a for a in alive if a and not any(a < other for other in alive)}
    found = [members.tolist() for members in live_sets(boxes_of(buffers))]
    assert {frozenset(members) for members in found} == maximal
    assert len(found) == len(maximal)


@given(buffer_lists(max_buffers=6).filter(lambda buffers: all(b.size for b in buffers)))
def test_the_best_pieces_make_a_best_layout(buffers):
    boxes = boxes_of(buffers)
    settled, pieces = split(boxes)
    assert sorted([*settled, *(int(i) for piece in pieces for i in piece.members)]) == list(range(len(buffers)))
    tops = [offset + buffers[i].size for i, offset in settled.items()]
    tops += [piece.base + lowest_height([buffers[i] for i in piece.members]) for piece in pieces]
    assert max(tops, default=0) == lowest_height(buffers)


@given(st.integers(1, 5))
def test_buffers_alive_throughout_are_stacked(num_buffers):
    settled, pieces = split(boxes_of([Buffer(str(i), 0, 3, 2) for i in range(num_buffers)]))
    assert settled == {i: 2 * i for i in range(num_buffers)}
    assert pieces == []
