import builtins
import sys

import pytest

from packhorse.errors import ConfigError
from packhorse.train.config import Config, RunConfig
from packhorse.train.metrics import MetricsFile, scalars
from packhorse.train.run_folder import RunFolder
from packhorse.train.sinks import Sinks, open_sinks, require_sinks

pytestmark = pytest.mark.pure


class Sink:
    def __init__(self, found_earlier=False, fail_at=None):
        self.found_earlier, self.fail_at, self.got, self.closed = found_earlier, fail_at, [], None

    def write(self, record):
        if record["step"] == self.fail_at:
            raise OSError(28, "No space\nleft on device")
        self.got.append(record["step"])

    def close(self, *, failed):
        self.closed = failed
        if self.fail_at == "close":
            raise RuntimeError("network")


def record(step, kind="step"):
    return {"kind": kind, "step": step, "loss": 1.0}


def test_one_that_fails_is_said_once_and_the_others_go_on():
    said, bad, good = [], Sink(fail_at=2), Sink()
    with Sinks({"Bad": lambda: bad, "Good": lambda: good}, [], said.append) as sinks:
        for step in (1, 2, 3, 4):
            sinks(record(step))
    assert good.got == [1, 2, 3, 4] and bad.got == [1] and good.closed is False
    (line,) = said
    assert line.startswith("Bad failed") and "No space left on device" in line and "\n" not in line and "training goes on" in line


def test_failing_to_open_and_to_close_ends_no_run():
    said = []

    def cannot():
        raise ConnectionError("offline")

    with Sinks({"A": cannot, "B": lambda: Sink(fail_at="close")}, [], said.append) as sinks:
        sinks(record(1))
    assert [line.split()[0] for line in said] == ["A", "B"]


def test_one_turned_on_later_first_gets_what_was_before():
    new, old = Sink(), Sink(found_earlier=True)
    with Sinks({"new": lambda: new, "old": lambda: old}, [record(1), record(2)], print) as sinks:
        sinks(record(3))
    assert new.got == [1, 2, 3] and old.got == [3]


def test_a_run_that_ends_in_an_error_is_marked_as_failed():
    sink = Sink()
    with pytest.raises(KeyError), Sinks({"x": lambda: sink}, [], print):
        raise KeyError
    assert sink.closed is True


def test_the_numbers_of_a_record():
    step = {"kind": "step", "step": 3, "loss": 0.5, "grad_norm": 1, "mfu": None}
    assert scalars(step) == {"train/loss": 0.5, "train/grad_norm": 1}
    assert scalars({"kind": "eval", "step": 3, "loss": 0.5, "unit": "byte"}) == {"validation/loss": 0.5}


def test_the_end_of_a_run_is_no_point_of_a_plot():
    sink = Sink()
    Sinks({"x": lambda: sink}, [], print)(record(9, "end"))
    assert sink.got == []


@pytest.mark.parametrize("key", ["tensorboard", "wandb"])
def test_one_that_is_not_installed_is_named_with_its_extra(monkeypatch, key):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == key:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    require_sinks(Config())
    with pytest.raises(ConfigError, match=rf"packhorse\[{key}\]"):
        require_sinks(Config(run=RunConfig(**{key: True})))


def test_a_folder_of_that_name_is_no_installation(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="not installed"):
        require_sinks(Config(run=RunConfig(wandb=True)))
    sys.modules.pop("wandb", None)


def test_nothing_is_opened_that_was_not_asked_for(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl", 0, [open_sinks(Config(), RunFolder(tmp_path), 0, print)]) as metrics:
        metrics.append(record(1))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
