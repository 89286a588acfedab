"""The dynamic program over a chain: against the binomial closed form, and against a search through all plans of short chains."""

from functools import cache
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.recompute.chain import KEEP, Chain, Link, Way

pytestmark = pytest.mark.pure


def uniform(n: int, slots: int) -> Chain:
    """Unit steps; a cut takes one slot; what is inside a step can only be kept for the step that runs backward next."""
    weights = np.triu(np.ones((n + 1, n + 1), dtype=np.int64), 1)
    return Chain([Link(0, 1.0, 0, (Way(slots + 1, 0, 0, 0.0),))] * n, weights, [0] * (n + 1), slots)


def binomial(n: int, slots: int) -> int:
    """Fewest steps that are run forward besides the last run of each: r n - C(slots + r, r - 1), where C(slots + r - 1, slots) < n <=
    C(slots + r, slots).

    Griewank and Walther 2000, ACM TOMS 26(1), proposition 1. slots: stored states, the initial one among them.
    """
    r = 1
    while comb(slots + r, slots) < n:
        r += 1
    return r * n - comb(slots + r, r - 1)


def test_the_closed_form_is_that_of_the_recursion():
    @cache
    def least(n: int, slots: int) -> int:
        if n == 1:
            return 0
        if slots == 1:
            return n * (n - 1) // 2
        return min(k + least(k, slots) + least(n - k, slots - 1) for k in range(1, n))

    assert all(binomial(n, s) == least(n, s) for n in range(1, 25) for s in range(1, 12))


def test_uniform_chains_up_to_64_steps_and_slots_are_binomial():
    chain = uniform(64, 64)
    for n in range(1, 65):
        row = chain.table[chain.row[0, n]]
        for slots in range(1, 65):  # the paper does not count the state that is worked on, the chain does not count the initial one
            assert row[slots] - n == binomial(n, slots), (n, slots)


@pytest.mark.parametrize("n, slots", [(10, 2), (30, 3), (64, 5)])
def test_the_steps_of_a_plan_take_the_seconds_that_the_table_says(n, slots):
    chain = uniform(n, slots)
    runs = [0] * n
    for step in chain.steps(slots):
        for block in range(step.first, step.first + 1 if step.what == KEEP else step.choice):
            runs[block] += 1
    assert sum(runs) == chain.best()[slots]
    assert all(runs)


ways = st.builds(Way, st.integers(0, 4), st.integers(0, 4), st.integers(0, 5), st.integers(0, 5).map(float))


@st.composite
def chains(draw) -> Chain:
    n = draw(st.integers(1, 5))
    links = [
        Link(
            draw(st.integers(0, 1)) * 100 + k,
            float(draw(st.integers(1, 5))),
            draw(st.integers(0, 3)),
            tuple(draw(st.lists(ways, min_size=1, max_size=3))),
        )
        for k in range(n)
    ]
    cut = [0] + [draw(st.integers(0, 3)) for _ in range(n)]
    weights = np.zeros((n + 1, n + 1), dtype=np.int64)
    for i in range(n):
        for k in range(i + 1, n + 1):
            weights[i, k] = cut[k]
    return Chain(links, weights, [draw(st.integers(0, 2)) for _ in range(n)] + [0], draw(st.integers(0, 14)))


def by_hand(chain: Chain, i: int, j: int, m: int) -> float:
    """The recursion of the module's docstring, word by word."""
    link, best = chain.links[i], float("inf")
    for way in link.ways:
        if m < max(way.backward, way.forward + chain.gradients[j]):
            continue
        if j == i + 1:
            best = min(best, link.forward_s + way.extra_s)
        elif (left := m - way.kept - chain.weights[i, i + 1]) >= 0:
            best = min(best, link.forward_s + way.extra_s + by_hand(chain, i + 1, j, left))
    for k in range(i + 1, j):
        passing = max(chain.links[l].passing + chain.weights[i, l] for l in range(i, k))
        if m >= passing + chain.gradients[j] and m >= chain.weights[i, k]:
            run = sum(chain.links[l].forward_s for l in range(i, k))
            best = min(best, run + by_hand(chain, k, j, m - chain.weights[i, k]) + by_hand(chain, i, k, m))
    return best


@settings(max_examples=60, deadline=None)
@given(chains())
def test_any_chain_as_the_recursion_says(chain):
    for m in range(chain.slots + 1):
        assert chain.best()[m] == min(by_hand(chain, 0, len(chain.links), fewer) for fewer in range(m + 1))


@settings(max_examples=60, deadline=None)
@given(chains())
def test_decisions_take_the_seconds_that_the_table_says(chain):
    for m in np.flatnonzero(np.isfinite(chain.best())):
        total = 0.0
        for step in chain.steps(int(m)):
            if step.what == KEEP:
                total += chain.links[step.first].forward_s + chain.links[step.first].ways[step.choice].extra_s
            else:
                total += sum(link.forward_s for link in chain.links[step.first : step.choice])
        assert total == pytest.approx(chain.best()[m])


def test_fewer_places_to_split_at():
    """Splitting before every second block only: as the recursion with those k; every block may still keep."""
    weights = np.triu(np.ones((8, 8), dtype=np.int64), 1)
    links = [Link(0, 1.0, 0, (Way(9, 0, 0, 0.0), Way(1, 0, 0, 0.5)))] * 7
    free, bound = (Chain(links, weights, [0] * 8, 12, every) for every in (1, 2))
    assert all(bound.best() >= free.best())
    assert {step.choice % 2 for m in range(6, 13) for step in bound.steps(m) if step.what != KEEP} <= {0}
