"""Strategies that a search takes to fit: what it says of them, what counts as kept, and one of them for real on four ranks."""

from dataclasses import replace

import pytest

from packhorse.bench import strategies
from packhorse.bench.strategies import Kept, render
from packhorse.bench.strategies_job import Ran
from packhorse.device.device import format_device, load_device
from packhorse.search.search import Priced
from packhorse.search.strategy import Needs, Strategy

pytestmark = pytest.mark.cpu
SHARDED = Strategy(2, 2, 2, 2, "blocks", "shard")
GOOD = Kept(1000, 990, True, Ran(SHARDED, 980, 980, True))


def test_what_counts_as_kept():
    assert GOOD.holds
    for change in ({"exact": False}, {"measured_bytes": 1001}, {"peak_bytes": 1001}, {"failure": "the budget is too small"}):
        assert not replace(GOOD, ran=replace(GOOD.ran, **change)).holds, change


def test_the_table():
    text = render([GOOD, replace(GOOD, is_best=False, ran=Ran(SHARDED, failure="the budget is too small"))])
    assert "1 of 2 strategies ran within their memory" in text and "as planned in 1 of 1" in text and "1.010 to 1.010" in text
    assert f"| 1,000 | 2 | 1 | 980 | {SHARDED} | 980 |" in text and f"- 1,000: {SHARDED}: the budget is too small" in text


def test_one_for_real(tmp_path, monkeypatch):
    """On one rank, within its memory."""
    monkeypatch.setattr(strategies, "RANKS", 1)
    device = tmp_path / "device.toml"
    device.write_text(format_device(load_device("v100-dgx2")))
    alone = Strategy(1, 1, 0, 1, "none", "keep")
    asked = [Priced(alone, Needs(*[0.0] * 8))]
    ran = strategies.run_all(asked, 9_000_000, device)[alone]
    assert not ran.failure and ran.exact and 0 < ran.measured_bytes == ran.peak_bytes <= 9_000_000
