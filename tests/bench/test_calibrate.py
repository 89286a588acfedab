import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from packhorse.bench import calibrate as module
from packhorse.bench.calibrate import COPIES, Timed, calibrate, host_link, level, level_of, prepared, run, table
from packhorse.bench.calibration import CHECKS, NETS, AdamW, Net
from packhorse.device.device import load_device
from packhorse.errors import UserError

pytestmark = pytest.mark.cpu


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return F.dropout(self.b(F.relu(self.a(x))), 0.5).square().mean()


def tiny(rows):
    return Net(f"two layers, {rows} rows", Two, lambda: {"x": torch.randn(rows, 5)}, AdamW)


def test_each_instruction_is_timed_by_itself():
    """A clock that goes on by a microsecond each time it is read: every instruction takes exactly one. Two runs give each two times."""
    step, batch = prepared(tiny(4))
    ticks = itertools.count(step=1000)
    timed = Timed(step, lambda: next(ticks))
    step(batch), step(batch)
    seen = list(timed.samples(clock_s=2.5e-7))
    assert [sample.seconds for _, _, sample in seen] == pytest.approx([7.5e-7] * len(seen))
    assert all(len(taken) == 2 for program in timed.times for taken in program)
    ops = [op for op, _, _ in seen]
    assert ops.count("aten.addmm.default") == 2 and ops.count("packhorse.optimize.3") == 1 and "aten.t.default" not in ops
    first = next(sample for op, _, sample in seen if op == "aten.addmm.default")
    assert (first.num_bytes, first.flops) == (4 * (7 + 4 * 5 + 5 * 7 + 4 * 7), 2 * 4 * 5 * 7)


def test_timing_changes_no_result():
    (plain, batch), (watched, _) = prepared(tiny(4)), prepared(tiny(4))
    Timed(watched, itertools.count().__next__)
    states = torch.get_rng_state()
    losses = [plain(batch) for _ in range(3)]
    torch.set_rng_state(states)
    assert [watched(batch) for _ in range(3)] == losses


def test_a_device_is_fitted_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "NETS", [tiny(4), tiny(64)])
    monkeypatch.setattr(module, "CHECKS", [tiny(16)])
    path = tmp_path / "mine.toml"
    assert run(path, 1, as_json=True) == 0
    told, device = json.loads(capsys.readouterr().out), load_device(path)
    assert device.name == told["name"] == "mine" and "1 thread, torch 2" in device.description
    assert {op: vars(cost) for op, cost in device.rows.items()} == told["rows"]
    assert vars(device.host_link) == told["host_link"] and 1e8 < device.host_link.bytes_per_s < 1e12
    (check,) = told["checks"]
    assert check["net"] == "two layers, 16 rows" and 0 < check["predicted_s"] < 0.1 and 0 < check["measured_s"] < 0.1


def test_the_link_to_the_host_is_fitted_to_copies():
    """A clock by which a copy takes 10 microseconds and a byte 0.1 nanoseconds; the first copy of a size, which takes longer, does not count."""
    taken = [1_000_000_000 if first else 10_000 + size // 10 for size in COPIES for first in (True, False, False)]
    ticks = iter([tick for seconds in taken for tick in (0, seconds)])
    link = host_link(lambda: next(ticks), rounds=2)
    assert link.fixed_s == pytest.approx(1e-5, rel=1e-3) and link.bytes_per_s == pytest.approx(1e10, rel=1e-3)


def test_the_link_between_ranks_is_fitted_to_collectives():
    """A message takes 100 microseconds and a byte 2 nanoseconds: gathers of three messages, sums of six."""
    found = [(messages, size, messages * 1e-4 + size * 2e-9) for messages in (3, 6) for size in (12, 6_000, 600_000)]
    made = level_of(found, 4)
    assert made.ranks == 4 and made.link.fixed_s == pytest.approx(1e-4, rel=1e-3) and made.link.bytes_per_s == pytest.approx(5e8, rel=1e-3)
    device = replace(load_device(), levels=(made,))
    for messages, size, seconds in found:
        assert device.collective_seconds(size, 4, 4, rounds=messages // 3) == pytest.approx(seconds, rel=1e-3)


def test_two_processes_of_this_machine():
    made = level(2)
    assert made.ranks == 2 and 0 <= made.link.fixed_s < 0.1 and 1e7 < made.link.bytes_per_s < 1e12


def test_the_table_has_a_line_an_operator():
    made = calibrate([tiny(4), tiny(64)], [tiny(16)], rounds=1)
    made = replace(made, device=replace(made.device, levels=(level_of([(1, 8, 1e-4), (1, 8 << 20, 1e-2)], 2),)))
    lines = table(made).splitlines()
    assert any(line.startswith("a message between 2 processes") for line in lines)
    assert any(line.startswith("copy to or from the host") for line in lines)
    assert [line[:62].strip() for line in lines[1 : 1 + len(made.device.rows)]] == sorted(made.device.rows)
    assert "two layers, 16 rows" in lines[-1]


def test_bad_words_are_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "calibrate", None)
    with pytest.raises(UserError, match="--threads is 0"):
        run(None, 0, as_json=False)
    with pytest.raises(UserError, match="cannot write the device file"):
        run(tmp_path / "nowhere" / "cpu.toml", None, as_json=False)


def test_what_is_checked_took_no_part_in_the_fit():
    assert len({net.name for net in (*NETS, *CHECKS)}) == len(NETS) + len(CHECKS)
