import json
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from packhorse.checkpoint import write_checkpoint
from packhorse.cli.main import app
from packhorse.errors import CheckpointError

pytestmark = pytest.mark.cpu


def packhorse(*arguments):
    return CliRunner().invoke(app, ["ckpt", *map(str, arguments)])


@pytest.fixture
def run(tmp_path):
    for step in (2, 4):
        write_checkpoint(tmp_path / "checkpoints" / f"step-{step}", {"w": torch.ones(1000)}, {})
    records = [{"kind": "step", "step": 2, "loss": 1.25}, {"kind": "eval", "step": 2, "loss": 1.5}, {"kind": "step", "step": 4, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def damage(run, step):
    (run / "checkpoints" / f"step-{step}" / "tensors.safetensors").write_bytes(b"torn")


def test_ls(run):
    damage(run, 4)
    shown = packhorse("ls", run)
    assert shown.exit_code == 0
    header, first, second = shown.stdout.splitlines()
    assert header.split() == ["checkpoint", "bytes", "saved", "whole", "loss", "validation"]
    assert first.split()[0] == "step-2" and first.split()[-3:] == ["yes", "1.2500", "1.5000"]
    assert second.split()[0] == "step-4" and second.split()[-3:] == ["no", "1.0000", "-"]
    assert all(len(line) <= 80 for line in (header, first, second))
    assert packhorse("ls", run / "checkpoints").stdout == shown.stdout
    rows = json.loads(packhorse("ls", run, "--json").stdout)
    assert [(row["step"], row["whole"], row["loss"], row["validation_loss"]) for row in rows] == [(2, True, 1.25, 1.5), (4, False, 1.0, None)]
    assert rows[0]["damage"] is None and "damaged: 4 bytes" in rows[1]["damage"]


def test_ls_of_an_empty_folder(tmp_path):
    assert packhorse("ls", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"
    assert json.loads(packhorse("ls", tmp_path, "--json").stdout) == []


def test_verify(run):
    whole = packhorse("verify", run)
    assert whole.exit_code == 0 and whole.stdout.count(": whole, ") == 2
    damage(run, 2)
    assert packhorse("verify", run / "checkpoints" / "step-4").exit_code == 0
    shown = packhorse("verify", run, "--json")
    assert [row["whole"] for row in json.loads(shown.stdout)] == [False, True]
    assert isinstance(shown.exception, CheckpointError)  # exit code 2 in main
    said = str(shown.exception)
    assert said.startswith("of 2 checkpoints 1 not whole, the first: ") and "step-2/tensors.safetensors is damaged: 4 bytes" in said
    for path, message in ((run / "checkpoints" / "step-2", "is damaged"), (run / "checkpoints" / "step-9", "no checkpoint at")):
        assert message in str(packhorse("verify", path).exception)


def test_a_checkpoint_names_its_run(run, monkeypatch):
    seen = []
    module = types.ModuleType("packhorse.checkpoint.hugging_face")
    module.export_run = lambda run, out, *, checkpoint=None, say: seen.append((run, checkpoint))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "is a checkpoint, and lies in no run" in str(packhorse("to-hf", run / "checkpoints" / "step-2", "out").exception)
    (run / "config.toml").touch()
    monkeypatch.chdir(run / "checkpoints")
    packhorse("to-hf", "step-2", "out")
    packhorse("to-hf", run, "out")
    assert seen == [(run, Path("step-2")), (run, None)]
    both = packhorse("to-hf", "step-2", "out", "--checkpoint", "step-4")
    assert "step-2 is a checkpoint, and --checkpoint names one too" in str(both.exception)


def test_to_and_from_hugging_face_hand_over_what_was_asked(monkeypatch):
    seen = []

    def export_run(run, out, *, checkpoint=None, say):
        seen.append((run, out, checkpoint))
        say("written")

    def import_folder(folder, run, *, say):
        seen.append((folder, run))
        say("begun")

    module = types.ModuleType("packhorse.checkpoint.hugging_face")
    module.export_run, module.import_folder = export_run, import_folder
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert packhorse("to-hf", "run", "out").stdout == "written\n"
    packhorse("to-hf", "run", "out", "--checkpoint", "run/checkpoints/step-3")
    assert packhorse("from-hf", "folder", "run").stdout == "begun\n"
    assert seen == [(Path("run"), Path("out"), None), (Path("run"), Path("out"), Path("run/checkpoints/step-3")), (Path("folder"), Path("run"))]
    assert '{"run": "run", "out": "out"}' in packhorse("to-hf", "run", "out", "--json").stdout


def test_reshard_ls_and_verify(run):
    source, out = run / "checkpoints" / "step-2", run / "checkpoints" / "step-3"
    assert packhorse("reshard", source, out, "--ranks", 3).stdout.startswith(f"{source} written to {out}: 3 files, ")
    assert len(list(out.glob("rank-*.safetensors"))) == 3
    assert [line.split()[0] for line in packhorse("ls", run).stdout.splitlines()] == ["checkpoint", "step-2", "step-3", "step-4"]
    assert packhorse("verify", run).stdout.count(": whole, ") == 3
    assert '"ranks": 1' in packhorse("reshard", out, run / "back", "--ranks", 1, "--json").stdout
    (out / "rank-0001.safetensors").unlink()
    assert "rank-0001.safetensors is missing" in str(packhorse("verify", out).exception)
    assert "rank-0001.safetensors is missing" in str(packhorse("reshard", out, run / "new", "--ranks", 2).exception)
    assert not (run / "new").exists()
