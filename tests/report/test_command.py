"""`packhorse report` on a model of its own, by the command's own code."""

import json

import pytest
from typer.testing import CliRunner

from packhorse.cli.main import app

pytestmark = pytest.mark.cpu
CONFIG = """
[model]
layers = 1
width = 32
heads = 2
[data]
seq_len = 16
micro_batch_size = 2
global_batch_size = 4
[optimizer]
clip_norm = 1.0
"""


@pytest.mark.parametrize("given", ["a folder", "a file", "--out"])
def test_where_the_page_goes(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(CONFIG)
    (run / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 1.0, "step_s": 2.0, "memory_bytes": 3072}\n')
    arguments = {
        "a folder": (["run"], run / "report.html"),
        "a file": (["run/config.toml"], tmp_path / "report.html"),
        "--out": (["run", "--out", "named.html"], tmp_path / "named.html"),
    }
    words, expected = arguments[given]
    done = CliRunner().invoke(app, ["report", *words, "--json"], catch_exceptions=False)
    facts = json.loads(done.stdout)
    assert (tmp_path / facts["path"]).resolve() == expected and expected.stat().st_size == facts["bytes"]
    text = expected.read_text(encoding="utf-8")
    assert "<title>packhorse: one step of gpt (layers 1, width 32, heads 2), fp32" in text
    assert ('<td class="number">3.000 KiB</td>' in text) == (given != "a file")  # what the run has measured; a configuration has run nothing
    for program in ("first", "next", "norm", "update"):
        assert f"<td>{program}</td>" in text


def test_the_path_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(CONFIG)
    assert CliRunner().invoke(app, ["report", "a.toml", "--set", "model.width=16"]).stdout.strip() == "report.html"
