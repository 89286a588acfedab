"""Parts of tensors, against the plain way: numbering every element of the whole tensor and looking where each of them is."""

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.parallel.part import blocks, gaps, part_of
from packhorse.parallel.split import Split

pytestmark = pytest.mark.pure


@st.composite
def cuts(draw):
    """(shape, strides, split, degree) of a dense tensor with its dims in any order of memory."""
    degree = draw(st.sampled_from([1, 2, 3, 4]))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = tuple(degree * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    padding = draw(st.integers(0, min(sizes[-1], sum(sizes) - 1)))
    shape[dim] = sum(sizes) - padding
    strides, step = [0] * len(shape), 1
    for place in draw(st.permutations(range(len(shape)))):
        strides[place] = step
        step *= shape[place]
    return tuple(shape), tuple(strides), Split(dim, sizes, padding), degree


def indices(shape):
    return list(product(*(range(size) for size in shape)))


def number(index, strides):
    return sum(i * step for i, step in zip(index, strides))


def lines_of(split, degree, rank):
    """The lines of the dim that a rank has, from the definition: the rank-th of equal parts of each block."""
    found, at = [], 0
    for block in split.blocks:
        share = block // degree
        found += range(at + rank * share, at + (rank + 1) * share)
        at += block
    return [line if line < split.size - split.padding else None for line in found]


def content(shape, strides, split, degree, rank):
    """Number in the memory of a rank's part -> number in the whole tensor's memory, None for padding."""
    part = part_of(shape, strides, split, degree, rank)
    lines, found = lines_of(split, degree, rank), {}
    for index in indices(part.local_shape):
        line = lines[index[split.dim]]
        whole = None if line is None else (*index[: split.dim], line, *index[split.dim + 1 :])
        found[number(index, part.local_strides)] = None if whole is None else number(whole, strides)
    return part, [found[place] for place in range(prod(part.local_shape))]


@given(cuts())
def test_every_element_is_in_one_part_and_each_part_is_dense(cut):
    shape, _, split, degree = cut
    seen = []
    for rank in range(degree):
        part, held = content(*cut, rank)
        assert part.local_shape == split.local(shape, degree)
        assert part.first == len(seen)
        kept = [place for place in held if place is not None]
        assert (part.count, part.padding) == (len(kept), len(held) - len(kept))
        seen += kept
    assert sorted(seen) == list(range(prod(shape)))


@given(cuts())
def test_a_parts_dims_lie_in_memory_as_the_whole_tensors_do(cut):
    shape, strides, split, degree = cut
    part = part_of(shape, strides, split, degree, 0)
    long = [dim for dim in range(len(shape)) if shape[dim] > 1 and part.local_shape[dim] > 1]
    assert sorted(long, key=lambda dim: part.local_strides[dim]) == sorted(long, key=lambda dim: strides[dim])


@given(cuts())
def test_counting_without_padding(cut):
    for rank in range(cut[3]):
        part, held = content(*cut, rank)
        assert [part.before(index) for index in range(len(held) + 1)] == [sum(p is not None for p in held[:index]) for index in range(len(held) + 1)]


@given(cuts())
def test_spans_say_where_the_elements_of_a_row_are(cut):
    for rank in range(cut[3]):
        part, held = content(*cut, rank)
        kept = [place for place in held if place is not None]
        mine = part.lines * part.inner
        found = {}
        for row in range(part.outer):
            for start, end, at in part.spans:
                found |= {row * mine + at + step: row * part.row + start + step for step in range(end - start)}
        assert [found[place] for place in range(len(kept))] == kept


@given(st.integers(1, 7), st.integers(0, 40), st.integers(0, 40))
def test_blocks_are_the_elements_in_their_order(row, first, length):
    found = list(blocks(first, first + length, row))
    assert [line * row + at for top, bottom, low, high in found for line in range(top, bottom) for at in range(low, high)] == list(
        range(first, first + length)
    )
    assert len(found) <= 3


@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), max_size=4), st.integers(0, 6))
def test_ranges_are_refused_unless_each_line_is_there_once(ranges, size):
    counts = [sum(start <= line < end for start, end in ranges) for line in range(-1, 7)]
    fits = counts == [int(0 <= line < size) for line in range(-1, 7)] and all(start < end for start, end in ranges)
    assert (gaps((tuple(ranges),), size) == "") == fits
    assert (gaps(tuple((pair,) for pair in ranges), size) == "") == fits
