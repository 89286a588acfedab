import json
import signal

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine, FakeLast, terminate_at

import packhorse.train.trainer as trainer
import packhorse.train.trial as trial
from packhorse.checkpoint import newest_checkpoint, read_checkpoint
from packhorse.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from packhorse.train.config_file import config_from_dict, load_config
from packhorse.train.console import Console
from packhorse.train.metrics import read_metrics
from packhorse.train.start import train
from tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.cpu


@pytest.fixture
def run(texts, tmp_path, out):
    """run(engine, "section.key"=value, ...) trains a tiny model in tmp_path/run and returns the exit code."""

    def go(engine=None, *, as_json=False, dry_run=False, trace_nan=False, **changes):
        given = {
            "run": {"dir": str(tmp_path / "run"), "steps": 6, "log_every": 1, "eval_every": 2, "eval_batches": 2, "save_every": 2},
            "model": {"layers": 2, "width": 16, "heads": 2, "dropout": 0.1},
            "data": {"corpus": str(texts), "seq_len": 16, "micro_batch_size": 4, "global_batch_size": 8},
            "schedule": {"warmup_steps": 2},
        }
        for name, value in changes.items():
            section, _, key = name.partition("__")
            given.setdefault(section, {})[key] = value
        config = config_from_dict(given)
        return train(config, engine=engine or FakeEngine(), console=Console(out, as_json=as_json), dry_run=dry_run, trace_nan=trace_nan)

    return go


def of_kind(path, kind):
    return [record for record in read_metrics(path) if record["kind"] == kind]


def state(folder):
    return read_checkpoint(folder)[0]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_from_start_to_end(run, tmp_path, out):
    engine = FakeEngine()
    assert run(engine) == 0
    folder, said = tmp_path / "run", out.getvalue()
    assert load_config(folder / "config.toml").run.steps == 6
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-4", "step-6"]  # keep_last = 2
    assert [record["step"] for record in of_kind(folder / "metrics.jsonl", "step")] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in of_kind(folder / "metrics.jsonl", "eval")] == [2, 4, 6]
    assert engine.options["num_micro_batches"] == 2 and len(engine.options["batch"]) == 2 and engine.options["clip_norm"] == 1.0
    assert engine.options["recompute"] == "auto" and engine.options["budget"] is None
    # Warm-up over two steps to 1e-3, then half a cosine over four steps to 1e-4.
    assert engine.lrs[:3] == [0.0005, 0.001, 0.001] and engine.lrs[-1] == pytest.approx(1e-4)
    assert said.index("[optimizer]") < said.index("the plan's ledger") < said.index("step 1/6") < said.index("memory: predicted")
    assert said.count("memory: predicted 1000 B, measured 1000 B") == 1
    assert said.index("step 2/6") < said.index("memory: predicted") < said.index("step 3/6")
    assert said.index("● validation") < said.index("the measured ledger") < said.index("counting models on the same bytes: order 1:")


def test_a_log_line_has_every_field(run, out):
    run(run__peak_flops=1e9)
    line = next(line for line in out.getvalue().splitlines() if line.startswith("step 5/6"))
    for name in ("loss ", "grad ", "lr ", "tok/s ", "MFU ", "memory 0.000 GiB", "ETA  0:0"):
        assert name in line
    assert "tok/s     -" in next(line for line in out.getvalue().splitlines() if line.startswith("step 1/6"))


def test_mfu_is_not_guessed(run, out):
    run()
    assert "MFU" not in out.getvalue()


def test_a_difference_between_predicted_and_measured_is_said(run, out):
    run(FakeEngine(measured=1064))
    assert "memory: predicted 1000 B, measured 1.039 KiB\nthey differ by +64 bytes:\nthe measured ledger" in out.getvalue()


def test_stopping_anywhere_and_resuming_is_the_same_run(run, tmp_path, out):
    run(run__dir=str(tmp_path / "whole"))
    for stop_at in (1, 3, 6):
        folder = tmp_path / f"stopped-{stop_at}"
        assert run(FakeEngine(on_step=terminate_at(stop_at)), run__dir=str(folder)) == 128 + signal.SIGTERM
        assert (folder / "checkpoints" / f"step-{stop_at}").is_dir()
        assert run(run__dir=str(folder), run__resume="auto") == 0
        assert "not bit for bit" not in out.getvalue()
        assert equal(state(folder / "checkpoints" / "step-6"), state(tmp_path / "whole" / "checkpoints" / "step-6"))
        for kind in ("step", "eval", "end"):
            one, other = (of_kind(tmp_path / name / "metrics.jsonl", kind) for name in ("whole", folder.name))
            assert [(r["step"], r["loss"]) for r in one] == [(r["step"], r["loss"]) for r in other], kind


def test_steps_beyond_the_checkpoint_are_done_again_once(run, tmp_path):
    def crash(number):
        if number == 4:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        run(FakeEngine(on_step=crash))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "ste')  # cut short
    assert [r["step"] for r in of_kind(tmp_path / "run" / "metrics.jsonl", "step")] == [1, 2, 3]
    run(run__resume="auto")
    assert [r["step"] for r in of_kind(tmp_path / "run" / "metrics.jsonl", "step")] == [1, 2, 3, 4, 5, 6]
    run(run__dir=str(tmp_path / "whole"))
    assert equal(*(state(tmp_path / name / "checkpoints" / "step-6") for name in ("run", "whole")))


def test_resuming_skips_a_damaged_checkpoint_and_refuses_to_start_afresh_over_damage_alone(run, tmp_path, out):
    run()
    whole = state(tmp_path / "run" / "checkpoints" / "step-6")
    (tmp_path / "run" / "checkpoints" / "step-6" / "manifest.json").write_text("{}")
    run(run__resume="auto")
    assert "skipped step-6" in out.getvalue() and "step 4 of 6" in out.getvalue()
    assert equal(state(tmp_path / "run" / "checkpoints" / "step-6"), whole)
    for step in (4, 6):
        (tmp_path / "run" / "checkpoints" / f"step-{step}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        run(run__resume="auto")


def test_a_finished_run_reports_again_and_changes_nothing(run, tmp_path, out):
    run()
    before = (tmp_path / "run" / "checkpoints" / "step-6").stat().st_ino, of_kind(tmp_path / "run" / "metrics.jsonl", "end")
    assert run(run__resume="auto") == 0
    assert "all steps are done already" in out.getvalue()
    assert ((tmp_path / "run" / "checkpoints" / "step-6").stat().st_ino, of_kind(tmp_path / "run" / "metrics.jsonl", "end")) == before


def test_going_back_to_an_earlier_checkpoint_keeps_the_later_one_aside(run, tmp_path):
    run()
    checkpoints = tmp_path / "run" / "checkpoints"
    run(run__resume=str(checkpoints / "step-4"), run__steps=5)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["aside-0-step-6", "step-4", "step-5"]
    assert [r["step"] for r in of_kind(tmp_path / "run" / "metrics.jsonl", "step")] == [1, 2, 3, 4, 5]


def test_a_run_is_never_overwritten(run, tmp_path):
    run()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="--resume auto"):
        run()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_dry_run_writes_nothing(run, tmp_path, out):
    engine = FakeEngine()
    assert run(engine, dry_run=True) == 0
    assert not engine.batches and not (tmp_path / "run").exists() and "the plan's ledger" in out.getvalue()


def test_changed_settings_and_data_are_said_at_a_resume(run, texts, out):
    run(run__steps=2)
    (texts / "more.txt").write_text("another text\n" * 50)
    run(run__resume="auto", run__steps=3, optimizer__lr=2e-3)
    assert "settings changed since the last time: run.steps, optimizer.lr" in out.getvalue()
    assert "not bit for bit: corpus SHA-256 was" in out.getvalue()


def test_resuming_another_model_names_the_tensor(run):
    run(run__steps=2)
    with pytest.raises(CheckpointError, match=r"'model/blocks\.0\.attention\.out\.bias' is float32 \(16,\) .* float32 \(32,\)"):
        run(run__resume="auto", model__width=32)


@pytest.mark.parametrize("trace_nan", [False, True])
def test_a_loss_that_is_not_finite_stops_and_saves(run, tmp_path, trace_nan):
    with pytest.raises(NonFiniteError) as caught:
        run(FakeEngine(nan_at=4), trace_nan=trace_nan)
    said = str(caught.value)
    assert "the loss of step 4 of 6 is NaN or infinite" in said and "step-3" in said and "\n" not in said
    assert ("blocks.1.attention" in said) == trace_nan and ("--trace-nan" in said) != trace_nan
    assert said.endswith(f"with --resume auto, or go further back with --resume {tmp_path / 'run' / 'checkpoints' / 'step-2'}")
    assert (tmp_path / "run" / "checkpoints" / "step-3").is_dir()
    assert [r["step"] for r in of_kind(tmp_path / "run" / "metrics.jsonl", "step")] == [1, 2, 3]


def test_not_finite_at_the_first_step_after_a_resume_blames_the_checkpoint_and_names_the_one_before(run, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    run(run__steps=4)
    with pytest.raises(NonFiniteError) as caught:
        run(FakeEngine(nan_at=1), run__steps=6, run__resume="auto")
    said = str(caught.value)
    assert f"the first step after {checkpoints / 'step-4'}, which may be bad already" in said and f"--resume {checkpoints / 'step-2'}," in said
    assert "\n" not in said and sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-4"]
    with pytest.raises(NonFiniteError, match="there is no earlier one in this run, so begin a new run"):
        run(FakeEngine(nan_at=1), run__steps=6, run__resume=str(checkpoints / "step-2"))
    with pytest.raises(NonFiniteError) as caught:  # the second step after it is not that checkpoint's fault
        run(FakeEngine(nan_at=2), run__steps=6, run__resume=str(checkpoints / "step-2"))
    assert "bad already" not in str(caught.value)


def test_a_state_that_may_be_bad_takes_no_earlier_checkpoint_with_it(run, tmp_path):
    with pytest.raises(NonFiniteError):
        run(FakeEngine(nan_at=6), run__keep_last=1)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-4", "step-5"]


def test_a_save_is_tried_before_the_first_step_and_a_failed_one_leaves_the_folder_free(run, tmp_path, out, monkeypatch):
    def full(*arguments):
        raise CheckpointError("No space left on device")

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="nothing was trained"):
        patched.setattr(trial, "save", full)
        engine = FakeEngine()
        run(engine)
    assert not engine.batches
    run(run__steps=2)
    run(run__resume="auto")
    run(run__dir=str(tmp_path / "other"), run__steps=2, run__trial_save=False)
    assert out.getvalue().count("trial save") == 1


def test_a_damaged_newest_checkpoint_is_said_and_training_goes_on(run, tmp_path, out, monkeypatch):
    checkpoints, real = tmp_path / "run" / "checkpoints", trainer.save

    def save(path, step, extra):
        real(path, step, extra)
        if path.name == "step-4" and not (checkpoints / "damaged-0-step-4").exists():
            (path / "tensors.safetensors").write_bytes(b"torn")

    monkeypatch.setattr(trainer, "save", save)
    assert run(run__keep_last=1) == 0
    assert "step-4/tensors.safetensors is damaged: 4 bytes" in out.getvalue() and "kept as damaged-0-step-4" in out.getvalue()
    assert sorted(path.name for path in checkpoints.iterdir()) == ["damaged-0-step-4", "step-6"]


def test_a_damaged_last_checkpoint_is_saved_again(run, tmp_path, monkeypatch):
    checkpoints, real = tmp_path / "run" / "checkpoints", trainer.save

    def save(path, step, extra):
        real(path, step, extra)
        if path.name == "step-6" and not (checkpoints / "damaged-0-step-6").exists():
            (path / "tensors.safetensors").write_bytes(b"torn")

    monkeypatch.setattr(trainer, "save", save)
    run()
    assert newest_checkpoint(checkpoints) == checkpoints / "step-6"


def test_checkpoints_of_every_so_many_steps_stay_for_good(run, tmp_path):
    run(run__save_every=1, run__keep_last=1, run__keep_every=2, run__steps=5)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-2", "step-4", "step-5"]


def test_a_skipped_step_is_said_and_its_record_is_json(run, tmp_path, out):
    engine = FakeEngine(last=FakeLast(grad_norm=float("inf"), clipped_norm=float("inf"), skipped=True, loss_scale=65536.0))
    run(engine, run__steps=2)
    assert "step 2 skipped: gradients overflowed at loss scale 65536\n" in out.getvalue()
    for record in of_kind(tmp_path / "run" / "metrics.jsonl", "step"):
        assert record["loss_scale"] == 65536.0 and record["grad_norm"] is None
    run(run__dir=str(tmp_path / "other"), run__steps=2)
    assert all("loss_scale" not in record for record in of_kind(tmp_path / "other" / "metrics.jsonl", "step"))


def test_an_evaluation_that_a_signal_broke_off_is_made_up_for(run, tmp_path):
    assert run(FakeEngine(on_evaluate=lambda: signal.raise_signal(signal.SIGTERM))) == 128 + signal.SIGTERM
    assert of_kind(tmp_path / "run" / "metrics.jsonl", "eval") == []
    run(run__resume="auto")
    run(run__resume="auto")
    assert [record["step"] for record in of_kind(tmp_path / "run" / "metrics.jsonl", "eval")] == [2, 4, 6]


def test_tensorboard_has_what_metrics_has_however_often_a_run_stops(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def crash(number):
        if number == 4:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        run(FakeEngine(on_step=crash), run__tensorboard=True)
    run(FakeEngine(on_step=terminate_at(2)), run__tensorboard=True, run__resume="auto")
    run(run__tensorboard=True, run__resume="auto")
    run(run__tensorboard=True, run__resume="auto")  # finished: only reports
    reader = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    for tag, kind in (("train/loss", "step"), ("validation/loss", "eval")):
        expected = [(record["step"], record["loss"]) for record in of_kind(tmp_path / "run" / "metrics.jsonl", kind)]
        found = [(event.step, event.value) for event in reader.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)  # float32 there
    assert [event.step for event in reader.Scalars("train/lr")] == [1, 2, 3, 4, 5, 6]


def test_a_signal_in_an_evaluation_stops_there(run, tmp_path, out):
    evaluated = []

    def on_evaluate():
        evaluated.append(1)
        signal.raise_signal(signal.SIGINT)

    assert run(FakeEngine(on_evaluate=on_evaluate)) == 128 + signal.SIGINT
    assert evaluated == [1] and (tmp_path / "run" / "checkpoints" / "step-2").is_dir()
    assert "SIGINT: step 2 is saved; the same command with --resume auto continues from there" in out.getvalue()
    assert of_kind(tmp_path / "run" / "metrics.jsonl", "eval") == []


def test_json_output_is_one_record_a_line(run, tmp_path, out):
    run(as_json=True)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert records == read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[-1]["kind"] == "end" and set(records[-1]["counting_nats"]) == {"1", "2", "3"}


def test_too_little_text_is_said_before_planning(run, tmp_path):
    engine = FakeEngine()
    with pytest.raises(DataError, match="validation text"):
        run(engine, data__seq_len=600)
    assert not engine.options and not (tmp_path / "run").exists()


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_samples_do_not_depend_on_the_size_of_a_micro_batch(run, tmp_path, order):
    engines = [FakeEngine(), FakeEngine()]
    run(engines[0], run__dir=str(tmp_path / "a"), data__micro_batch_size=8, data__order=order)
    run(engines[1], run__dir=str(tmp_path / "b"), data__micro_batch_size=2, data__order=order)
    for whole, parts in zip(engines[0].batches, engines[1].batches, strict=True):
        assert torch.equal(whole["ids"], torch.cat([part["ids"] for part in parts]))


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 300, 2000).astype("<u2").tofile(path)
    return path


def test_a_run_on_tokens_is_measured_a_token(run, tmp_path, out, token_file):
    run(data__corpus=str(token_file), model__vocab=300)
    said = out.getvalue()
    assert "data: 1,900 tokens to train on, 100 to validate (the last 5%)" in said and "loss, nats/token" in said
    assert "validation loss" in said and "byte" not in said[said.index("data: ") :] and "counting models" not in said
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {(r["unit"], r["num_tokens"]) for r in records if r["kind"] == "eval"} == {("token", 2 * 4 * 16)}
    assert records[-1]["kind"] == "end" and "counting_nats" not in records[-1]


def test_epochs_of_tokens_are_resumed_within_an_epoch_and_across_its_end(run, tmp_path, out, token_file):
    # 1899 predictions of 16 are 119 windows, 8 a step: step 15 (from 1) ends the first epoch and begins the second.
    changes = {"data__corpus": str(token_file), "model__vocab": 300, "data__order": "epochs", "run__steps": 18, "run__save_every": 0}
    whole = FakeEngine()
    run(whole, run__dir=str(tmp_path / "whole"), **changes)
    for stop_at in (7, 14, 15):
        parts = [FakeEngine(on_step=terminate_at(stop_at)), FakeEngine()]
        for engine, resume in zip(parts, ("none", "auto")):
            run(engine, run__dir=str(tmp_path / f"stopped-{stop_at}"), run__resume=resume, **changes)
        batches = parts[0].batches + parts[1].batches
        assert len(batches) == 18 and all(torch.equal(a["ids"], b["ids"]) for x, y in zip(batches, whole.batches) for a, b in zip(x, y))
        assert equal(*(state(tmp_path / name / "checkpoints" / "step-18") for name in ("whole", f"stopped-{stop_at}")))
    labels = torch.cat([part["labels"] for batch in whole.batches for part in batch])
    assert (labels[:119] != -100).sum() == 1899
    assert "not bit for bit" not in out.getvalue()


def test_a_token_file_that_changes_under_a_run_stops_it_with_its_state_saved(run, tmp_path, token_file, out):
    kept = token_file.read_bytes()
    changes = {"data__corpus": str(token_file), "model__vocab": 300}

    def cut(number):
        if number == 3:
            token_file.write_bytes(kept[:100])

    with pytest.raises(DataError, match=r"changed while it was being read: it had 4,000 bytes and has 100"):
        run(FakeEngine(on_step=cut), run__eval_every=0, **changes)
    assert (tmp_path / "run" / "checkpoints" / "step-3").is_dir()
    token_file.write_bytes(kept)
    assert run(run__resume="auto", run__eval_every=0, **changes) == 0 and "not bit for bit" not in out.getvalue()
    run(run__dir=str(tmp_path / "whole"), run__eval_every=0, **changes)
    assert equal(*(state(tmp_path / name / "checkpoints" / "step-6") for name in ("run", "whole")))
    token_file.write_bytes(bytes(2) + kept[2:])
    run(run__resume="auto", run__steps=7, run__eval_every=0, **changes)
    assert "not bit for bit: corpus SHA-256 was" in out.getvalue()


def test_text_is_tokenized_once_into_the_folder_of_the_run(run, tmp_path, out):
    changes = {"data__tokenizer": str(save_tokenizer(tmp_path / "tokenizer")), "model__vocab": 300}
    assert run(dry_run=True, **changes) == 0
    assert "would first tokenize into" in out.getvalue() and not (tmp_path / "run").exists()
    assert run(run__steps=2, **changes) == 0 and run(run__resume="auto", run__steps=3, **changes) == 0
    said = out.getvalue()
    assert said.count("tokenized 2 documents") == 1 and "nats/token" in said and "not bit for bit" not in said
    assert [path.name for path in (tmp_path / "run" / "tokens").glob("*/*.bin")].count("train.bin") == 1
    run(dry_run=True, run__resume="auto", **changes)
    assert out.getvalue().count("would first tokenize into") == 1  # it is there already


def test_one_step_is_enough_for_the_memory_line(run, tmp_path, out):
    run(run__steps=5)
    assert run(run__steps=6, run__resume="auto") == 0
    assert out.getvalue().count("memory: predicted") == 2


def test_the_number_of_threads_is_a_setting(run):
    seen, before = [], torch.get_num_threads()
    try:
        run(FakeEngine(on_step=lambda number: seen.append(torch.get_num_threads())), run__threads=3)
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {3}


def test_sgd(run):
    assert run(optimizer__kind="sgd", optimizer__momentum=0.0, run__save_every=0, run__steps=1) == 0
