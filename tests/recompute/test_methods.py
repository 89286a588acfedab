"""The methods against closed forms and, on random graphs, against the exact plan."""

from math import ceil, log2, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chain_graphs import PLACES, facts, uniform_chain
from packhorse.bench.random_graphs import random_graph
from packhorse.device.links import Link
from packhorse.errors import UserError
from packhorse.recompute.bound import Elsewhere, least_extra_seconds
from packhorse.recompute.chen import split
from packhorse.recompute.cuts import crossings
from packhorse.recompute.facts import facts_of
from packhorse.recompute.milp import milp
from packhorse.recompute.optimal import optimal
from packhorse.recompute.recursive import recursive_counts
from packhorse.recompute.rules import sqrt_n
from packhorse.recompute.simulate import bytes_of, seconds_of
from packhorse.recompute.table import METHODS

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("n, budget", [(12, 0), (12, 64), (12, 128), (30, 200), (7, 10**9)])
def test_algorithm_3_on_a_uniform_chain(n, budget):
    """A stage closes at the first place after it holds more than the budget: with 64 bytes a value, after q = budget // 64 + 1 of them."""
    known = facts(uniform_chain(n))
    at = crossings(known)
    x, y, cuts = split(known, at, list(range(n)), budget)
    q = budget // 64 + 1
    stages = ceil((n - 1) / q) if n > q else 1  # the loss has a place of its own and takes no bytes
    assert len(cuts) in (stages, stages + 1)
    assert x == 64 * (len(cuts) - 1)
    assert y == 64 * min(q, n - 1)


@pytest.mark.parametrize("n", [16, 64, 256, 1024])
def test_sqrt_keeps_about_two_sqrt_n_values(n):
    """k = sqrt(n) kept and one segment of n / k: 2 sqrt(n) values of 64 bytes, and the gradients at hand."""
    known = facts(uniform_chain(n))
    order = sqrt_n(known)[0]
    assert bytes_of(known, order).peak <= 64 * (2 * sqrt(n) + 5)
    assert seconds_of(known, order) <= 3 * n  # one more forward pass at most


def test_recursion_keeps_log_n_values():
    """k = 1: one value a level, log2(n) levels (Chen et al. 2016, section 4.4)."""
    for n in (16, 64, 256, 1024):
        known = facts(uniform_chain(n))
        at = crossings(known)
        order = tuple(METHODS["recursive"](known, None)[0]) if n == 16 else None
        from packhorse.recompute.mirror import order_of

        order = order_of(known, recursive_counts(known, at, list(range(n)), 1))
        assert bytes_of(known, order).peak <= 64 * (log2(n) + 4)
        assert seconds_of(known, order) <= 2 * n + n * log2(n)


def test_no_method_is_leaner_or_faster_than_optimal():
    known = facts(uniform_chain(40))
    points = [(bytes_of(known, o).peak, seconds_of(known, o)) for o in optimal(known)]
    for name, method in METHODS.items():
        if name == "milp":
            continue
        for order in method(known, None):
            peak, seconds = bytes_of(known, order).peak, seconds_of(known, order)
            assert any(p <= peak and s <= seconds for p, s in points), name


def exact(nodes: int, seed: int):
    graph, seconds = random_graph(nodes, seed)
    known = facts_of(graph, PLACES, seconds)
    points = [(bytes_of(known, o).peak, seconds_of(known, o)) for o in optimal(known)]
    full, least = bytes_of(known, known.plain_order()).peak, min(p for p, _ in points)
    return known, points, full, least


def test_within_three_percent_of_the_exact_plan_on_thirty_random_graphs():
    ratios = []
    for seed in range(30):
        known, points, full, least = exact(8 + seed % 13, seed)
        limit = int(least + (full - least) * (0.75, 0.5, 0.25, 0.0)[seed % 4])
        found = milp(known, limit)
        assert found, "optimal has found a plan, so there is one"
        assert bytes_of(known, found[0]).peak <= limit
        ours = min(s for p, s in points if p <= limit)
        best = seconds_of(known, found[0])
        assert best <= ours * (1 + 1e-6)
        extra = best - seconds_of(known, known.plain_order())
        assert least_extra_seconds(known, limit) <= extra + 1e-9
        ratios.append(ours / best)
    assert np.mean(ratios) <= 1.03


def test_the_exact_plan_is_that_of_a_search_through_all_mirror_counts():
    """On a chain of six values: no counts up to 3 give a faster plan within the limit."""
    from itertools import product

    from packhorse.recompute.mirror import order_of

    known = facts(uniform_chain(6))
    orders = [order_of(known, dict(enumerate(counts))) for counts in product(range(4), repeat=5)]
    points = [(bytes_of(known, o).peak, seconds_of(known, o)) for o in orders]
    for limit in sorted({p for p, _ in points}):
        assert seconds_of(known, milp(known, limit)[0]) == min(s for p, s in points if p <= limit)
    assert bytes_of(known, milp(known, None)[0]).peak == min(p for p, _ in points)
    assert milp(known, min(p for p, _ in points) - 1) == []


def test_milp_refuses_a_large_graph():
    with pytest.raises(UserError, match="78 nodes, expected 60"):
        milp(facts(uniform_chain(39)), None)


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 16), st.integers(0, 10**6), st.floats(0, 1))
def test_the_lower_bound_is_below_every_plan(nodes, seed, share):
    known, points, full, least = exact(nodes, seed)
    limit = int(least + (full - least) * share)
    base = seconds_of(known, known.plain_order())
    assert least_extra_seconds(known, limit) <= min(s for p, s in points if p <= limit) - base + 1e-9


def test_the_lower_bound_where_values_may_wait_elsewhere():
    """A chain of values of 64 bytes, a second each: what is over the limit and not on the host is computed again, a second for 64 bytes."""
    known = facts(uniform_chain(20))
    limit = 10 * 64
    alone = least_extra_seconds(known, limit)
    assert alone == least_extra_seconds(known, limit - 64) - 1 > 4
    assert least_extra_seconds(known, limit, Elsewhere(2 * 64 + 32)) == alone - 2.5
    assert least_extra_seconds(known, limit, Elsewhere(10**6)) == 0
    # a link of 64 bytes in ten seconds, in a step of 20 seconds and x more: 64 (2 + x / 10) bytes leave, and x = alone - 2 - x / 10
    slow = Link(0.0, 6.4)
    assert least_extra_seconds(known, limit, Elsewhere(10**6, slow, seconds=20.0)) == pytest.approx((alone - 2) / 1.1, abs=1 / 64)
    assert least_extra_seconds(known, limit, Elsewhere(64, slow, seconds=20.0)) == pytest.approx(alone - 1)
    assert least_extra_seconds(known, limit, Elsewhere(tp=2)) == alone, "nothing here is the same on all ranks"
