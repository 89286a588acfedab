"""The reproduction of Chen et al. 2016 at small sizes: exact fits, curves in the paper's order, and every plan run for real."""

from math import log2

import pytest

from packhorse.device.device import load_device
from packhorse.reproduce.curves import CURVES, at, captured, points
from packhorse.reproduce.fit import fit
from packhorse.reproduce.smaller import run_all
from packhorse.reproduce.workloads import small_lstm, small_resnet

pytestmark = pytest.mark.cpu


def test_a_fit_gives_back_the_line_that_the_points_lie_on():
    found = fit([(n, 7 + 3 * log2(n)) for n in (4, 8, 32, 256)], log2)
    assert (found.a, found.b, found.r2) == pytest.approx((7, 3, 1))
    assert fit([(1, 0.0), (2, 1.0), (3, 0.0)], float).r2 == pytest.approx(0)


def test_each_idea_of_the_paper_saves_on_top_of_the_one_before():
    graph, persistent = captured(small_resnet(16), 16)
    found = list(points(graph, persistent, load_device(None), 16, CURVES))
    none, in_place, sharing, cheap, sublinear = (at(found, name, 16).feature_bytes for name in list(CURVES)[:5])
    assert none > in_place > sharing > cheap > sublinear
    assert at(found, "optimal", 16).feature_bytes <= sublinear
    assert at(found, "optimal", 16).extra <= at(found, "sublinear", 16).extra
    assert at(found, "optimal, least", 16).feature_bytes == min(point.feature_bytes for point in found)


def test_plans_run_as_predicted_and_compute_the_same():
    names = ("sharing", "in-place", "drop cheap", "sublinear", "recursive")
    runs = run_all(small_lstm(4), 4, 1, names)
    assert [run.curve for run in runs] == list(names)
    assert all(run.measured_bytes == run.predicted_bytes for run in runs)
    assert len({run.losses for run in runs}) == 1
