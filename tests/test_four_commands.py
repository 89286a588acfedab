"""The four commands of the README on a Hugging Face model: train, resume, export, begin again from what was exported."""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from packhorse.checkpoint import read_checkpoint
from packhorse.cli.main import app

pytestmark = pytest.mark.cpu
transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = ["data.seq_len=16", "data.micro_batch_size=2", "data.global_batch_size=4", "schedule.kind=constant", "run.eval_every=0"]


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(2):
        (folder / f"{n}.txt").write_text("".join(f"{n} line {j}: to be or not to be, that is it.\n" for j in range(200)))
    return folder


@pytest.fixture
def tokenizer(tmp_path, text):
    """A tokenizer of 200 tokens made from the text, as save_pretrained lays it out."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train([str(path) for path in text.iterdir()], trainers.BpeTrainer(vocab_size=200, special_tokens=["<|endoftext|>"], show_progress=False))
    folder = tmp_path / "tokenizer"
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def test_train_resume_export_reload(tmp_path, text, tokenizer):
    settings = [f"data.corpus={text}", f"data.tokenizer={tokenizer}", f"model.config={EXAMPLES / 'hf'}", *TINY]
    given = [word for setting in settings for word in ("--set", setting)]
    run, whole, out, again = (tmp_path / name for name in ("run", "whole", "out", "again"))

    command("train", EXAMPLES / "hf.toml", *given, "--set", f"run.dir={run}", "--set", "run.steps=3")
    command("train", EXAMPLES / "hf.toml", *given, "--set", f"run.dir={run}", "--set", "run.steps=6", "--resume", "auto")
    said = command("ckpt", "to-hf", run, out)
    assert "LlamaForCausalLM gives the same" in said and "bit for bit" in said

    command("train", EXAMPLES / "hf.toml", *given, "--set", f"run.dir={whole}", "--set", "run.steps=6")
    resumed, unbroken = (read_checkpoint(folder / "checkpoints" / "step-6")[0] for folder in (run, whole))
    assert resumed.keys() == unbroken.keys() and all(torch.equal(resumed[name], unbroken[name]) for name in resumed)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(tensor, resumed[f"param/{name}"]) for name, tensor in loaded.named_parameters())
    assert (
        transformers.AutoTokenizer.from_pretrained(out).encode("to be") == Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("to be").ids
    )

    said = command("ckpt", "from-hf", out, again)
    assert (again / "model" / "tokenizer.json").exists()
    words = re.search(r"packhorse (train .*?) --set data.corpus=FOLDER", said).group(1).split()
    command(
        *words, *given, "--set", f"run.dir={again}", "--set", f"model.config={again / 'model'}", "--set", "run.steps=1", "--set", "optimizer.lr=0"
    )
    started = read_checkpoint(again / "checkpoints" / "step-1")[0]
    assert all(torch.equal(tensor, started[f"param/{name}"]) for name, tensor in loaded.named_parameters())


def test_the_example_is_the_one_that_its_files_say():
    config = json.loads((EXAMPLES / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 256  # one for each byte


def test_the_commands_as_the_readme_shows_them(tmp_path, monkeypatch):
    """Each line between the markers, in a folder that holds what a clone does."""
    root = EXAMPLES.parent
    block = (root / "README.md").read_text().split("<!-- four commands: begin -->")[1].split("<!-- four commands: end -->")[0]
    lines = [line.split()[1:] for line in block.splitlines() if line.startswith("packhorse ")]
    assert [words[0] for words in lines] == ["train", "train", "ckpt", "ckpt"]
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(root / name)
    monkeypatch.chdir(tmp_path)
    outputs = [command(*words) for words in lines]
    assert "resumed from" in outputs[1] and "bit for bit" in outputs[2]
    trained = read_checkpoint(tmp_path / "runs/hf/checkpoints/step-60")[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/hf-out")
    assert all(torch.equal(tensor, trained[f"param/{name}"]) for name, tensor in loaded.named_parameters())
    assert (tmp_path / "runs/again/config.toml").exists()
