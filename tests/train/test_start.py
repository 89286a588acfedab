"""The trainer on the real engine: capture, plan, program, run."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import packhorse
import packhorse.train.trainer as trainer
from packhorse.checkpoint import newest_checkpoint, read_checkpoint
from packhorse.cli.main import app
from packhorse.data import load_corpus
from packhorse.errors import UserError
from packhorse.train.build import build_model, build_optimizer, training_batch
from packhorse.train.config_file import config_from_dict, format_config
from packhorse.train.console import Console
from packhorse.train.metrics import read_metrics
from packhorse.train.schedule import learning_rate
from packhorse.train.start import train

pytestmark = pytest.mark.cpu


@pytest.fixture
def settings(texts, tmp_path):
    """settings(steps=..., ...) -> Config of a tiny GPT with dropout, two micro-batches and clipping, in tmp_path/run."""

    def make(name="run", **run):
        return config_from_dict(
            {
                "run": {"dir": str(tmp_path / name), "steps": 8, "log_every": 2, "eval_every": 3, "eval_batches": 2, "save_every": 3} | run,
                "model": {"layers": 2, "width": 16, "heads": 2, "dropout": 0.1},
                "data": {"corpus": str(texts), "seq_len": 16, "micro_batch_size": 4, "global_batch_size": 8},
                "optimizer": {"lr": 1e-2, "clip_norm": 0.5},
                "schedule": {"warmup_steps": 2},
            }
        )

    return make


def go(config):
    out = io.StringIO()
    return train(config, engine=packhorse, console=Console(out)), out.getvalue()


def losses(config, kind="step"):
    return [(record["step"], record["loss"]) for record in read_metrics(Path(config.run.dir) / "metrics.jsonl") if record["kind"] == kind]


def state(config, step):
    return read_checkpoint(checkpoint_of(config, step))[0]


def checkpoint_of(config, step):
    return Path(config.run.dir) / "checkpoints" / f"step-{step}"


def test_the_trainer_takes_the_very_steps_of_eager_pytorch(settings):
    config = settings()
    code, _ = go(config)
    assert code == 0
    corpus = load_corpus(config.data.corpus)
    model = build_model(config)
    optimizer = build_optimizer(config, model)
    expected = []
    for step in range(config.run.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=config.run.steps, peak_lr=config.optimizer.lr, schedule=config.schedule)
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in training_batch(config, corpus, step):
            loss = model(**micro) / 2
            loss.backward()
            total = loss.detach() + total
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        expected.append((step + 1, total.item()))
    assert losses(config) == expected
    saved = state(config, config.run.steps)
    for name, parameter in model.named_parameters():
        assert torch.equal(saved[f"param/{name}"], parameter), name


def test_a_resumed_run_is_bit_equal_to_an_unbroken_one(settings):
    whole = settings("whole")
    go(whole)
    for stop_at in (2, 5):
        broken = settings(f"broken-{stop_at}", steps=8)
        go_until(broken, stop_at)
        code, said = go(settings(f"broken-{stop_at}", resume="auto"))
        assert code == 0 and f"step {stop_at} of 8" in said and "not bit for bit" not in said
        assert losses(broken) == losses(whole) and losses(broken, "eval") == losses(whole, "eval")
        one, other = state(broken, 8), state(whole, 8)
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


def go_until(config, stop_at):
    """Trains with a SIGTERM during step `stop_at`."""
    taken = trainer.training_batch

    def with_signal(config, corpus, step, rank):
        if step + 1 == stop_at:
            signal.raise_signal(signal.SIGTERM)
        return taken(config, corpus, step, rank)

    trainer.training_batch = with_signal
    try:
        code, said = go(config)
    finally:
        trainer.training_batch = taken
    assert code == 128 + signal.SIGTERM and f"SIGTERM: step {stop_at} is saved" in said


def test_a_step_that_does_not_fit_is_refused_before_anything_is_written(settings, monkeypatch):
    config = settings()
    monkeypatch.setattr("packhorse.train.start.free_bytes", lambda: 1000)
    with pytest.raises(UserError, match="this machine has 1000 B free"):
        go(config)
    assert not Path(config.run.dir).exists()
    monkeypatch.undo()
    assert go(config)[0] == 0  # the folder is free


def test_a_finished_run_keeps_the_settings_it_was_trained_with(settings):
    config = settings(steps=2)
    go(config)
    before = (Path(config.run.dir) / "config.toml").read_text()
    go(replace(config, run=replace(config.run, resume="auto"), optimizer=replace(config.optimizer, lr=0.5)))
    assert (Path(config.run.dir) / "config.toml").read_text() == before


def test_predicted_is_measured(settings):
    _, said = go(settings())
    predicted, measured = re.search(r"memory: predicted (.*), measured (.*)", said).groups()
    assert predicted == measured and "they differ" not in said


def test_killed_at_any_moment_the_same_command_finishes_the_run(settings, tmp_path):
    whole = settings("whole", save_every=1, steps=20)
    go(whole)
    config = settings("run", save_every=1, steps=20, resume="auto")
    path = tmp_path / "config.toml"
    path.write_text(format_config(config))
    command = [sys.executable, "-c", "from packhorse.cli.main import main; main()", "train", str(path)]
    checkpoints = checkpoint_of(config, 0).parent
    for kills in range(2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            found = newest_checkpoint(checkpoints, lambda reason: None)
            if found and int(found.name[5:]) > 8 * kills:
                break
            time.sleep(0.003)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert newest_checkpoint(checkpoints) is not None
    assert subprocess.run(command, env=os.environ, capture_output=True).returncode == 0
    assert losses(config) == losses(whole)
    one, other = state(config, 20), state(whole, 20)
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_plan_and_explain_print_and_have_json(settings, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(format_config(settings()))
    runner = CliRunner()
    made = json.loads(runner.invoke(app, ["plan", str(path), "--json"], catch_exceptions=False).stdout)
    assert made["predicted_peak_bytes"] == sum(made["lines"].values()) > 0
    assert "peak" in runner.invoke(app, ["plan", str(path)], catch_exceptions=False).stdout
    for stage in ("graph", "plan", "program"):
        shown = runner.invoke(app, ["explain", str(tmp_path), "--stage", stage, "--json"], catch_exceptions=False).stdout
        assert json.loads(shown)["stage"] == stage and len(json.loads(shown)["text"]) > 100
