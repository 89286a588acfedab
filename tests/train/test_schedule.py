import math

import pytest

from packhorse.train.config import ScheduleConfig
from packhorse.train.schedule import learning_rate

pytestmark = pytest.mark.pure


def rates(steps, **schedule):
    return [learning_rate(s, steps=steps, peak_lr=1.0, schedule=ScheduleConfig(**schedule)) for s in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_starts_above_zero(kind):
    assert rates(100, kind=kind, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_in_closed_form():
    # Steps 2..6 are the five points p = 0, 1/4, 1/2, 3/4, 1.
    expected = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]
    assert rates(7, warmup_steps=2, min_lr=0.0)[2:] == pytest.approx(expected, abs=1e-15)
    assert rates(7, warmup_steps=2, min_lr=0.2)[2:] == pytest.approx([0.2 + 0.8 * x for x in expected])


def test_linear_in_closed_form():
    assert rates(7, kind="linear", warmup_steps=2, min_lr=0.0) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(5, kind="linear", warmup_steps=0, min_lr=0.5) == [1.0, 0.875, 0.75, 0.625, 0.5]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_lowest_rate(kind):
    """Without one it is a tenth; beyond the last step the rate stays there."""
    assert rates(7, kind=kind, warmup_steps=2) == rates(7, kind=kind, warmup_steps=2, min_lr=0.1)
    assert rates(7, kind=kind, warmup_steps=2)[-1] == 0.1
    for step in (9, 10, 60):
        assert learning_rate(step, steps=10, peak_lr=1.0, schedule=ScheduleConfig(kind=kind, min_lr=0.25, warmup_steps=2)) == 0.25


def test_constant():
    assert rates(5, kind="constant", warmup_steps=1) == [1.0] * 5
    assert learning_rate(50, steps=5, peak_lr=3.0, schedule=ScheduleConfig(kind="constant", warmup_steps=0)) == 3.0


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_edges(kind):
    assert rates(1, kind=kind, warmup_steps=0) == [1.0]
    assert rates(3, kind=kind, warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6])
    assert rates(2, kind=kind, warmup_steps=2, min_lr=0.0) == [0.5, 1.0]
    assert learning_rate(49, steps=10, peak_lr=1.0, schedule=ScheduleConfig(kind=kind)) == 1.0  # the last of 50 steps of warm-up
    assert learning_rate(50, steps=100, peak_lr=1.0, schedule=ScheduleConfig(kind=kind)) == 1.0  # the first after it
