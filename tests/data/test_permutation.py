from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packhorse.data.permutation as permutation
from packhorse.data.permutation import permuted, round_keys

pytestmark = pytest.mark.pure


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**9))
def test_every_number_is_hit_once(size, seed, epoch):
    found = permuted(np.arange(size), size, round_keys(seed, epoch))
    assert sorted(found) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(0, 2**63 - 1), st.data())
def test_a_part_is_the_part_of_the_whole(size, seed, data):
    keys = round_keys(seed, 0)
    first = data.draw(st.integers(0, size - 1))
    indices = np.arange(first, min(first + 50, size))
    together = permuted(indices, size, keys)
    assert len(set(together)) == len(indices) and together.min() >= 0 and together.max() < size
    assert [int(permuted(np.array([i]), size, keys)[0]) for i in indices] == list(together)


def test_seed_and_epoch_make_the_order():
    orders = {tuple(permuted(np.arange(100), 100, round_keys(seed, epoch))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(permuted(np.arange(100), 100, round_keys(3, 4))) in orders


def test_all_orders_of_four_are_about_equally_frequent():
    draws = 4800
    seen = Counter(tuple(permuted(np.arange(4), 4, round_keys(1, epoch)).tolist()) for epoch in range(draws))
    assert set(seen) == set(permutations(range(4)))
    expected = draws / 24
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 60  # chi-square of 23 degrees; above 60 once in 30,000


def test_places_and_neighbours_are_uncorrelated():
    size, epochs = 1000, 200
    orders = np.stack([permuted(np.arange(size), size, round_keys(1, epoch)) for epoch in range(epochs)])
    bound = 6 / np.sqrt(orders.size)
    places = np.broadcast_to(np.arange(size), orders.shape)
    for one, other in ((places, orders), (orders[:, :-1], orders[:, 1:]), (orders[:-1], orders[1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < bound
    # each window is about as often in the first tenth as chance has it: 20 of 200 epochs, deviation sqrt(200 * 0.1 * 0.9) = 4.2
    early = np.bincount(orders[:, :100].ravel(), minlength=size)
    assert abs(early.mean() - 20) < 1e-9 and 3.5 < early.std() < 5


def test_work_does_not_grow_with_the_size(monkeypatch):
    hashed = []
    original = permutation._hash
    monkeypatch.setattr(permutation, "_hash", lambda words: hashed.append(len(words)) or original(words))
    work = {}
    for size in (10**4, 10**12):
        hashed.clear()
        permuted(np.arange(64), size, round_keys(1, 0))
        work[size] = sum(hashed)
    # once through for each of 64 numbers; at 10^4 = 100 x 100 none can fall outside, at 10^12 neither
    assert work == {10**4: 64 * permutation.ROUNDS, 10**12: 64 * permutation.ROUNDS}
    hashed.clear()
    permuted(np.arange(64), 10**12 + 1, round_keys(1, 0))
    assert sum(hashed) <= 66 * permutation.ROUNDS
