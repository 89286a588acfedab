import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from memory.layout_problems import buffer_lists, lowest_height
from packhorse.memory.buffers import Buffer
from packhorse.memory.cpsat import Search, fit
from packhorse.memory.pieces import Boxes

pytestmark = pytest.mark.pure

some_buffers = buffer_lists(max_buffers=5).filter(lambda buffers: buffers and all(b.size for b in buffers))


def boxes_of(buffers):
    lower, upper, size = (np.array([getattr(b, field) for b in buffers], np.int64) for field in ("lower", "upper", "size"))
    return Boxes(lower, upper, size)


def ask(buffers, capacity, search, seed=0):
    return fit(boxes_of(buffers), capacity, search, seed=seed, max_conflicts=10_000, time_limit_s=60, solver=cp_model.CpSolver())


@settings(max_examples=25, deadline=None)
@given(some_buffers, st.sampled_from(Search), st.integers(0, 2))
def test_it_fits_at_the_best_height_and_proves_that_none_is_lower(buffers, search, seed):
    best = lowest_height(buffers)
    answer = ask(buffers, best, search, seed)
    assert answer.offsets is not None and not answer.impossible
    for i, a in enumerate(buffers):
        assert 0 <= answer.offsets[i] <= best - a.size
        for j in range(i):
            b = buffers[j]
            apart = answer.offsets[i] + a.size <= answer.offsets[j] or answer.offsets[j] + b.size <= answer.offsets[i]
            assert apart or a.upper <= b.lower or b.upper <= a.lower
    below = ask(buffers, best - 1, search, seed)
    assert below.offsets is None and below.impossible


def test_the_same_seed_gives_the_same_layout():
    buffers = [Buffer(str(i), i % 7, i % 7 + 1 + i % 3, 1 + i % 5) for i in range(30)]
    # At 40 bytes of room this is easy for every search.
    for search in Search:
        first, second = ask(buffers, 40, search, seed=3), ask(buffers, 40, search, seed=3)
        assert first.offsets is not None and second.offsets is not None
        assert first.offsets.tolist() == second.offsets.tolist()
