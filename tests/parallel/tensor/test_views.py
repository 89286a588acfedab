"""Splits and strides behind a view, beside tensors whose elements are their own numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import joined, part
from packhorse.parallel.split import Split
from packhorse.parallel.tensor.views import split_after_view, viewed_strides

pytestmark = pytest.mark.cpu


@st.composite
def reshapes(draw):
    """(shape, another shape of the same elements)"""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))

    def grouped():
        shape, size = [], 1
        for prime in primes:
            size *= prime
            if draw(st.booleans()):
                shape.append(size)
                size = 1
        return tuple([*shape, size])

    return grouped(), grouped()


@settings(max_examples=300, deadline=None)
@given(reshapes(), st.sampled_from([2, 4]), st.data())
def test_a_split_behind_a_view_is_that_of_the_viewed_parts(shapes, degree, data):
    before, after = shapes
    dims = [dim for dim, size in enumerate(before) if size % degree == 0]
    if not dims:
        return
    dim = data.draw(st.sampled_from(dims))
    size = before[dim]
    blocks = (size // 2, size // 2) if size % (2 * degree) == 0 and data.draw(st.booleans()) else (size,)
    split = Split(dim, blocks)
    moved = split_after_view(split, before, after, degree)
    if moved is None:
        return
    whole = torch.arange(torch.Size(before).numel())
    for rank in range(degree):
        ours = part(whole.view(before), split, rank, degree).contiguous()
        wanted = part(whole.view(after), moved, rank, degree)
        assert torch.equal(ours.view(wanted.shape), wanted)
    assert torch.equal(joined([part(whole.view(after), moved, rank, degree) for rank in range(degree)], moved), whole.view(after))


@pytest.mark.parametrize(
    "split, before, after, wanted",
    [
        (Split(2, (12,)), (2, 3, 12), (6, 12), Split(1, (12,))),
        (Split(1, (12,)), (6, 12), (2, 3, 12), Split(2, (12,))),
        (Split(2, (12,)), (2, 3, 12), (2, 3, 4, 3), Split(2, (4,))),  # heads
        (Split(1, (8,)), (2, 8, 5), (16, 5), Split(0, (8, 8))),  # sequences of a flattened batch
        (Split(0, (8, 8)), (16, 5), (2, 8, 5), Split(1, (8,))),
        (Split(1, (4, 4, 4)), (5, 12), (5, 3, 4), Split(2, (4,))),  # fused query, key, value
        (Split(1, (10,), 3), (1, 7), (7,), Split(0, (10,), 3)),  # a padded vocabulary passes as it is
        (Split(0, (10,), 3), (7, 2), (14,), None),
        (Split(1, (6,)), (2, 6), (2, 3, 2), None),  # 3 heads over 2 ranks
    ],
)
def test_known_views(split, before, after, wanted):
    assert split_after_view(split, before, after, 2) == wanted


@settings(max_examples=300, deadline=None)
@given(reshapes(), st.randoms(use_true_random=False))
def test_strides_of_a_view_are_those_of_torch(shapes, draw):
    before, after = shapes
    order = list(range(len(before)))
    draw.shuffle(order)
    tensor = torch.empty([before[dim] for dim in order]).permute([order.index(dim) for dim in range(len(before))])
    try:
        wanted = tensor.view(after)
    except RuntimeError:
        assert viewed_strides(tuple(tensor.shape), tensor.stride(), after) is None
        return
    found = viewed_strides(tuple(tensor.shape), tensor.stride(), after)
    assert found is not None
    assert all(a == b for a, b, size in zip(found, wanted.stride(), after) if size > 1)
