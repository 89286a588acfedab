"""What is wrong with data is one paragraph and exit code 2, before anything is planned or written."""

import os
import sys

import numpy as np
import pytest

from packhorse.cli.main import main
from tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.cpu


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder: good and bad files of each kind, and an empty configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("")
    (tmp_path / "good.txt").write_text("the horse carries what the rider packs\n" * 500)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\n')
    (tmp_path / "torn.jsonl").write_text('{"text": "fine"}\n{"text": "to')
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "gone.txt").symlink_to(tmp_path / "nowhere")
    np.arange(20_000, dtype="<u4").tofile(tmp_path / "wide.bin")
    np.full(20_000, 7, dtype="<u2").tofile(tmp_path / "narrow.bin")
    np.full(10, 7, dtype="<u2").tofile(tmp_path / "short.bin")
    np.full(20_000, 7, dtype="<u2").tofile(tmp_path / "cut.bin")
    os.truncate(tmp_path / "cut.bin", 39_999)
    save_tokenizer(tmp_path / "tokenizer")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.corpus=nowhere"], "there is no such folder"),
        (["data.corpus=empty"], "found no text in empty"),
        (["data.corpus=folder"], "cannot read folder/gone.txt: No such file"),
        (["data.corpus=bad.jsonl"], "bad.jsonl line 2: there is no 'text' among its keys 'body'"),
        (["data.corpus=torn.jsonl"], "torn.jsonl line 2 is no JSON"),
        (["data.corpus=torn.jsonl", "data.tokenizer=tokenizer", "model.vocab=300"], "torn.jsonl line 2 is no JSON"),
        (["data.corpus=good.txt", "data.seq_len=50000"], "too little training text: 18525 bytes"),
        (["data.corpus=good.txt", "data.tokenizer=tokenizer"], "and the model a vocabulary of 256"),
        (["data.corpus=good.txt", "data.tokenizer=broken"], "broken/tokenizer.json is no tokenizer"),
        (["data.corpus=good.txt", "data.tokenizer=gpt2"], "Nothing is downloaded"),
        (["data.corpus=short.bin"], "too little training text: 10 tokens, expected at least data.seq_len + 1 = 129"),
        (["data.corpus=cut.bin"], "no multiple of 2, the size of a uint16 token"),
        (["data.corpus=wide.bin"], "looks like uint32 and is read as uint16"),
        (["data.corpus=wide.bin", "data.token_dtype=uint32"], "token 19,999 at place 19,999 of wide.bin is outside the model's vocabulary of 256"),
        (["data.corpus=narrow.bin", "data.token_dtype=uint32"], "token 458,759 at place 0 of narrow.bin is outside"),
        (["data.corpus=good.txt", "data.order=epoch"], "did you mean epochs?"),
    ],
)
def test_mistakes_in_data(folder, monkeypatch, capsys, settings, message):
    monkeypatch.setattr(sys, "argv", ["packhorse", "train", "a.toml", *(word for setting in settings for word in ("--set", setting))])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("packhorse: ") and said.count("\n") == 1 and message in said
    assert [path for path in folder.glob("runs/run/**/*") if path.name not in ("tokens", ".lock")] == []
