import pytest

from packhorse.train.meter import Meter, Rate

pytestmark = pytest.mark.pure


def test_the_first_steps_do_not_count():
    meter = Meter(step_tokens=1000, step_flops=6000, peak_flops=10_000.0)
    meter.add_step(100.0)
    meter.add_step(50.0)
    assert meter.read() == Rate(None, None, None) and meter.eta_s(5) is None
    meter.add_step(2.0)
    assert meter.read() == Rate(step_s=2.0, tokens_per_s=500.0, mfu=0.3)


def test_a_reading_covers_the_steps_since_the_last_and_no_evaluation():
    meter = Meter(step_tokens=1000, step_flops=1, peak_flops=None)
    for seconds in (9.0, 9.0, 1.0, 1.0):
        meter.add_step(seconds)
    meter.read()
    meter.add_step(4.0)
    meter.add_other(60.0)
    rate = meter.read()
    assert rate.tokens_per_s == 250.0 and rate.mfu is None
    assert meter.read().tokens_per_s is None


def test_the_time_left_counts_evaluations_at_their_share():
    meter = Meter(step_tokens=1, step_flops=1, peak_flops=None)
    for _ in range(6):
        meter.add_step(2.0)
    meter.add_other(12.0)  # 2 s a step over six steps
    assert meter.eta_s(10) == 10 * (2.0 + 2.0)
