"""Against a small stand-in for the package wandb: it keeps the rule that matters, steps in rising order, and what a server would hold."""

import textwrap

import pytest

from packhorse.train.sinks import Sinks
from packhorse.train.to_wandb import WeightsAndBiases

pytestmark = pytest.mark.pure

WANDB = textwrap.dedent("""
    server, calls = {}, []

    class Run:
        def __init__(self, rows):
            self.rows, self.starting_step = rows, max(rows, default=-1) + 1
            self.step = self.starting_step

        def log(self, data, step):
            assert step >= self.step, f"step {step} after {self.step}: wandb would drop it"
            self.step = step
            self.rows.setdefault(step, {}).update(data)

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    def init(*, id, resume, name, dir, config, allow_val_change):
        assert resume == "allow" and allow_val_change
        calls.append(("init", id, name, config))
        return Run(server.setdefault(id, {}))
""")


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    import sys

    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb
    del sys.modules["wandb"]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def step(number, loss):
    return {"kind": "step", "step": number, "loss": loss, "mfu": None}


def test_a_resumed_run_is_the_same_run_and_has_each_step_once(wandb, root):
    assert WeightsAndBiases.is_installed()
    first = WeightsAndBiases(root, {"optimizer": {"lr": 1e-3}})
    for number in (1, 2, 3):
        first.write(step(number, number / 10))
    first.write({"kind": "eval", "step": 3, "loss": 2.0})  # killed after this; resumed at 2
    second = WeightsAndBiases(root, {"optimizer": {"lr": 1e-3}})
    for number in (3, 4):
        second.write(step(number, number / 10))
    second.close(failed=False)
    ((number, rows),) = wandb.server.items()
    assert rows == {
        1: {"train/loss": 0.1},
        2: {"train/loss": 0.2},
        3: {"train/loss": 0.3, "validation/loss": 2.0},
        4: {"train/loss": 0.4},
    }
    assert [call[:3] for call in wandb.calls if call[0] == "init"] == [("init", number, "run")] * 2
    assert wandb.calls[-1] == ("finish", 0)


def test_offline_it_is_said_and_a_later_run_gets_everything(wandb, root, monkeypatch):
    said, real = [], wandb.init

    def offline(**options):
        raise ConnectionError("network is unreachable")

    monkeypatch.setattr(wandb, "init", offline)
    with Sinks({"Weights & Biases": lambda: WeightsAndBiases(root, {})}, [], said.append) as sinks:
        sinks(step(1, 0.1))
    assert "Weights & Biases failed" in said[0] and "network is unreachable" in said[0]
    monkeypatch.setattr(wandb, "init", real)
    with Sinks({"Weights & Biases": lambda: WeightsAndBiases(root, {})}, [step(1, 0.1)], said.append) as sinks:
        sinks(step(2, 0.2))
    ((_, rows),) = wandb.server.items()
    assert sorted(rows) == [1, 2] and len(said) == 1
