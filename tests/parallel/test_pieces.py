"""Arithmetic of shards against brute force: every element belongs to one rank, and buckets do not grow with the model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.parallel.partition import Partition
from packhorse.parallel.pieces import BUCKET_BYTES, bucket_bytes, chunk_elements, own_pieces
from packhorse.parallel.zero import Gathering, Zero, _starts
from packhorse.planning.persistent import Persistent

pytestmark = pytest.mark.pure


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=8), st.integers(1, 5), st.randoms())
def test_every_element_has_one_owner(parts, num_ranks, random):
    offsets, sizes, end = [], [], 0
    for gap, size in parts:
        offsets.append(end + gap)
        sizes.append(size)
        end += gap + size
    order = list(range(len(parts)))
    random.shuffle(order)
    offsets, sizes = [offsets[i] for i in order], [sizes[i] for i in order]
    shard = -(-max(end, 1) // num_ranks)
    seen = []
    for rank in range(num_ranks):
        pieces = own_pieces(offsets, sizes, shard, rank)
        places = [offsets[i] + first + k for i, first, count in pieces for k in range(count)]
        assert places == sorted(places) and all(place // shard == rank for place in places)
        seen += [(i, first + k) for i, first, count in pieces for k in range(count)]
    assert sorted(seen) == sorted((i, k) for i, size in enumerate(sizes) for k in range(size))


@pytest.mark.parametrize("num_ranks", [2, 3, 64, 1024])
def test_buckets_are_bounded(num_ranks):
    for elements in (10, 10**6, 10**9):
        shard = -(-elements // num_ranks)
        assert bucket_bytes([0], [elements], shard, num_ranks, 4) <= BUCKET_BYTES
        assert chunk_elements([0], [elements], shard, num_ranks, 4) >= 1


def whole_at(uses, found):
    """Units that are whole at each place, by brute force: from a start to the last use before the next start, or the end."""
    alive = [set() for _ in uses]
    for number, (start, unit) in enumerate(found):
        later = [s for s, u in found[number + 1 :] if u == unit]
        end = min(later, default=len(uses))
        used = [place for place in range(start, len(uses)) if unit in uses[place] and (place < end or not later)]
        for place in range(start, max(used, default=start) + 1):
            alive[place].add(unit)
    return alive


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(2, 5), st.booleans())
def test_so_many_units_are_whole_at_a_time_and_every_use_finds_its_own(sequence, most, ahead):
    uses = [{f"u{k}"} if k else set() for k in sequence]
    found = _starts(uses, Gathering(most, ahead))
    assert [start for start, _ in found] == sorted(start for start, _ in found)
    alive = whole_at(uses, found)
    for place, units in enumerate(uses):
        assert units <= alive[place]
        assert len(alive[place]) <= most


@pytest.mark.parametrize("units", [2, 3, 5, 8])
def test_what_is_whole_at_the_turn_is_gathered_once(units):
    """Eight units forward and back: 2 x 8 gathers but for those that are still whole."""
    uses = [{f"u{k}"} for k in [*range(8), *reversed(range(8))]]
    for ahead in (False, True):
        assert len(_starts(uses, Gathering(units, ahead))) == 2 * 8 - units


@pytest.mark.parametrize("units, ways", [(2, []), (3, [3]), (12, [12, 6, 3]), (13, [13, 7, 4])])
def test_ways_to_gather(units, ways):
    """All units, half of them, and so on; two ahead, two without."""
    zero = Zero(Partition(3, 2, 0, {f"w{k}": f"u{k}" for k in range(units)}), Persistent(()), Persistent(()))
    assert zero.gatherings == (*(Gathering(n, True) for n in ways), Gathering(2, True), Gathering(2, False))
