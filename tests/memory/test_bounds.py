from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.layout_problems import buffer_lists, most_alive
from packhorse.memory.bounds import live_bytes, lower_bound
from packhorse.memory.buffers import Buffer

pytestmark = pytest.mark.pure


def test_live_bytes_by_hand():
    # a a a . .     5 bytes, rounded up to 8 at alignment 4
    # . . b b .     4 bytes
    # . . . . c     1 byte, rounded up to 4
    buffers = [Buffer("a", 0, 3, 5), Buffer("b", 2, 4, 4), Buffer("c", 4, 5, 1)]
    times, alive = live_bytes(buffers, 4)
    assert times.tolist() == [0, 2, 3, 4, 5]
    assert alive.tolist() == [8, 12, 4, 4, 0]
    assert lower_bound(buffers, 4) == 12
    assert lower_bound(buffers, 1) == 9


def test_no_buffers():
    times, alive = live_bytes([], 64)
    assert len(times) == len(alive) == 0
    assert lower_bound([], 64) == 0


def test_sizes_beyond_32_bits():
    assert lower_bound([Buffer("a", 0, 2, 2**40), Buffer("b", 1, 2, 2**40)], 64) == 2**41


@given(buffer_lists(), st.sampled_from([1, 4, 64]))
def test_the_sweep_agrees_with_every_instant(buffers, alignment):
    times, alive = live_bytes(buffers, alignment)
    assert np.all(np.diff(times) > 0)
    for k, (begin, end) in enumerate(pairwise(times.tolist())):
        for t in range(begin, end):
            assert alive[k] == sum(-(-b.size // alignment) * alignment for b in buffers if b.lower <= t < b.upper)
    assert alive[-1:].tolist() in ([], [0])
    assert lower_bound(buffers, alignment) == most_alive(buffers, alignment)
