import math

import pytest

from packhorse.train.config import ScheduleConfig
from packhorse.train.schedule import learning_rate

pytestmark = pytest.mark.pure


def rates(steps, **schedule):
    return [learning_rate(s, steps=steps, peak_lr=1.0, schedule=ScheduleConfig(**({"min_lr": 0.0} | schedule))) for s in range(steps)]


def test_warm_up_is_linear_and_starts_above_zero():
    assert rates(100, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_in_closed_form():
    # Steps 2..6 are the five points p = 0, 1/4, 1/2, 3/4, 1.
    expected = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]
    assert rates(7, warmup_steps=2)[2:] == pytest.approx(expected, abs=1e-15)
    assert rates(7, warmup_steps=2, min_lr=0.2)[2:] == pytest.approx([0.2 + 0.8 * x for x in expected])


def test_without_a_lowest_rate_it_is_a_tenth():
    assert rates(7, warmup_steps=2, min_lr=None)[2:] == rates(7, warmup_steps=2, min_lr=0.1)[2:]


def test_constant_and_edges():
    assert rates(5, kind="constant", warmup_steps=1) == [1.0] * 5
    assert rates(1, warmup_steps=0) == [1.0]
    assert rates(3, warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6])
    assert learning_rate(50, steps=10, peak_lr=1.0, schedule=ScheduleConfig(min_lr=0.25)) == 1.0  # still warming up
    assert learning_rate(60, steps=10, peak_lr=1.0, schedule=ScheduleConfig(min_lr=0.25, warmup_steps=2)) == 0.25
