from itertools import combinations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.device.device import Cost
from packhorse.device.fit import Sample, fit, spread

pytestmark = pytest.mark.pure

SIZES = [(100, 0), (5_000, 70_000), (80_000, 900_000), (2_000_000, 10_000_000), (4_000_000, 900_000_000), (300, 5_000)]


@pytest.mark.parametrize("true", [Cost(5e-6, 2e-10, 1e-11), Cost(0.0, 3e-10, 0.0), Cost(7e-6, 0.0, 2e-11), Cost(4e-6)])
def test_exact_times_give_the_cost_they_were_made_from(true):
    found = fit([Sample(b, f, true.fixed_s + true.s_per_byte * b + true.s_per_flop * f) for b, f in SIZES if true.fixed_s or b])
    assert (found.fixed_s, found.s_per_byte, found.s_per_flop) == pytest.approx((true.fixed_s, true.s_per_byte, true.s_per_flop), rel=1e-3, abs=1e-15)


def test_one_odd_shape_does_not_decide():
    true = Cost(5e-6, 2e-10)
    samples = [Sample(b, 0, true.of(b, 0)) for b in (10, 1_000, 30_000, 200_000, 1_000_000, 9_000_000)]
    found = fit([*samples, Sample(500_000, 0, 8 * true.of(500_000, 0))])
    assert found.s_per_byte == pytest.approx(2e-10, rel=0.05) and spread(samples, found) < 0.05


def test_one_size_is_a_fixed_cost():
    assert fit([Sample(5056, 0, 3e-5)] * 3) == Cost(3e-5)


def objective(samples, cost):
    return sum(sqrt(s.seconds) * abs((cost[0] + cost[1] * s.num_bytes + cost[2] * s.flops) / s.seconds - 1) for s in samples)


def best_by_hand(samples):
    """The least objective. A sum of absolute values of linear functions is least at a corner: k parts that are not 0 meet k samples exactly."""
    rows = np.array([[1.0, s.num_bytes, s.flops] for s in samples])
    seconds = np.array([s.seconds for s in samples])
    least = objective(samples, (0, 0, 0))
    for k in (1, 2, 3):
        for columns in combinations(range(3), k):
            for met in combinations(range(len(samples)), k):
                square = rows[np.ix_(met, columns)]
                if np.linalg.matrix_rank(square) == k:
                    cost = np.zeros(3)
                    cost[list(columns)] = np.linalg.solve(square, seconds[list(met)])
                    if (cost >= 0).all():
                        least = min(least, objective(samples, cost))
    return least


@settings(max_examples=40)
@given(st.lists(st.builds(Sample, st.integers(1, 10_000), st.integers(0, 10_000), st.floats(1e-5, 1e-1)), min_size=1, max_size=6))
def test_no_cost_is_much_better(samples):
    found = fit(samples)
    assert min(found.fixed_s, found.s_per_byte, found.s_per_flop) >= 0
    assert objective(samples, (found.fixed_s, found.s_per_byte, found.s_per_flop)) <= 1.1 * best_by_hand(samples) + 1e-3


def test_spread_is_the_median_distance_from_one():
    """Predicted 2 s for each: 2, 1, 0.5 and 1 times what was measured -> distances 1, 0, 0.5, 0, of which the median is 0.25."""
    assert spread([Sample(0, 0, s) for s in (1.0, 2.0, 4.0, 2.0)], Cost(2.0)) == 0.25
