import pytest

from packhorse.planning.step_seconds import step_seconds
from packhorse.report.beside import measured_section, pool_section, streams_section
from packhorse.report.measured import Measured

pytestmark = pytest.mark.pure


def test_seconds_of_each_stream_what_is_waited_for_and_what_is_hidden(parked, reader):
    plan = parked()
    rows = reader(streams_section(plan, step_seconds(plan))).rows
    # ten calls of a second; the copy to the host runs beside one of them, nothing else is hidden
    assert rows[1:] == [
        ["computation", "10000.000", "", ""],
        ["to host", "2000.000", "1000.000", "1000.000"],
        ["from host", "2000.000", "2000.000", "0.000"],
        ["tp", "1000.000", "1000.000", "0.000"],
        ["waits", "4000.000", "", ""],
    ]
    assert plan.seconds == 14


def test_links_that_a_device_does_not_describe_are_named(parked, by_hand):
    plan = parked(device=by_hand().device)
    shown = streams_section(plan, step_seconds(plan))
    assert "<p>The device file bench has no host_link, so copies to and from the host take no time here" in shown
    assert "<p>The device file bench has no levels, so collectives beside the computation (tp) take no time here" in shown


def test_a_plan_that_sends_and_copies_nothing_has_no_such_sections(by_hand):
    plan = by_hand()
    assert streams_section(plan, step_seconds(plan)) == pool_section(plan) == measured_section(plan, None) == ""


def test_predicted_beside_measured(parked, reader):
    plan = parked()
    rows = reader(measured_section(plan, Measured(7, plan.peak_bytes, 21.0))).rows
    peak = f"{plan.peak_bytes / 1024:.3f} KiB"
    assert rows[1:] == [
        ["peak", peak, peak],
        ["on the host", "32.000 KiB", "predicted only"],
        ["a step, predicted for bench", "14 s", "21 s, 1.50 times the predicted"],
    ]
    assert reader(measured_section(plan, Measured(1, None, None))).rows[1] == ["peak", peak, "predicted only"]
