import itertools
import math

import pytest

from packhorse.train.plot import plot_losses

pytestmark = pytest.mark.pure


def records(num_steps=300):
    steps = [{"kind": "step", "step": n, "loss": 1.5 + 4 * math.exp(-n / 40)} for n in range(1, num_steps + 1)]
    return steps + [{"kind": "eval", "step": n, "loss": 1.6} for n in range(100, num_steps + 1, 100)] + [{"kind": "end", "step": 300}]


@pytest.mark.parametrize("width", [40, 80, 300])
def test_the_plot_fits_and_shows_both_curves(width):
    plot = plot_losses(records(), width)
    lines = plot.splitlines()
    assert max(map(len, lines)) <= min(width, 100) and len(lines) > 10
    assert plot.count("●") == 1 + 3 and "\x1b" not in plot  # the title names the mark
    assert lines[-1].split() == ["1", "75", "150", "225", "300"]


def test_the_curve_falls():
    marked = [(row, line) for row, line in enumerate(plot_losses(records(), 80).splitlines()[2:-2])]
    rows = {}
    for row, line in marked:
        for column, mark in enumerate(line):
            if "\u2801" <= mark <= "\u28ff":
                rows.setdefault(column, row)
    columns = sorted(rows)
    assert rows[columns[0]] <= 1 and rows[columns[-1]] >= 10
    assert all(rows[a] <= rows[b] + 1 for a, b in itertools.pairwise(columns))


@pytest.mark.parametrize(("given", "width"), [(records(), 39), (records()[:1], 80)])
def test_narrow_terminals_and_single_points_get_words(given, width):
    assert plot_losses(given, width).startswith("training loss: 5.401 at step 1, ")  # 1.5 + 4 exp(-1/40)


def test_nothing_to_plot():
    assert plot_losses([], 80) == ""


def test_a_constant_loss():
    assert plot_losses([{"kind": "step", "step": n, "loss": 2.0} for n in (1, 2)], 80)
