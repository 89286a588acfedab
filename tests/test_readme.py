"""The README's Python, run as it stands there."""

import copy
import re
from pathlib import Path

import pytest
import torch

import packhorse as ph

pytestmark = pytest.mark.cpu
README = (Path(__file__).parent.parent / "README.md").read_text()


def block(beginning: str) -> str:
    """The one Python block that holds `beginning`."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.S) if beginning in text]
    return found


def test_three_calls(capsys):
    exec(block("torch.nn.Sequential(torch.nn.Linear(64"), {})
    out = capsys.readouterr().out
    assert "peak instant" in out and "measured" in out


def test_a_hugging_face_loop(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from tiny_tokenizer import save_tokenizer

    save_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer" / "tokenizer.json"), pad_token="<pad>")
    torch.manual_seed(0)
    settings = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    longer = tokenizer(["to be", "or not"], return_tensors="pt", padding=True)
    ids = longer["input_ids"].repeat(1, 3)
    loader = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}] * 2
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names = {"ph": ph, "tokenizer": tokenizer, "texts": ["to be or not to be", "that"], "model": model, "optimizer": optimizer}
    monkeypatch.chdir(tmp_path)
    exec(block("batch = {**tokenizer"), names | {"scheduler": scheduler, "loader": loader})
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert all(torch.equal(a, b) for a, b in zip(saved.state_dict().values(), model.state_dict().values()))
    assert any(not torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))


def test_a_rank_of_1024(capsys):
    names = {"torch": torch, "ph": ph}
    exec(block("ph.Mesh(dp=1024)"), names)
    out, plan = capsys.readouterr().out, names["plan"]
    psi = sum(p.numel() for p in names["model"].parameters())
    assert "gathered parameters" in out and "sent to other ranks" in out
    # fp32: parameters, gradients and two moments, a 1,024th of each, and padding of at most 64 bytes a shard and unit
    assert 16 * psi / 1024 <= plan.persistent_bytes <= 16 * psi / 1024 + 40 * 4 * 64 + 2000
    assert plan.comm_bytes == pytest.approx(3 * 4 * psi * 1023 / 1024, rel=0.02)


def test_the_recipe_in_sixteen_bits():
    from torch.nn.utils import clip_grad_norm_

    from packhorse.models.gpt import GPT

    torch.manual_seed(0)
    mine = GPT(vocab=20, layers=1, width=16, heads=2, seq_len=8, dropout=0.1)
    model = copy.deepcopy(mine)
    ids = torch.randint(0, 20, (2, 8))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    step = ph.compile(mine, ph.plan(mine, batch, optimizer=torch.optim.AdamW(mine.parameters(), lr=1e-2), precision="bf16", clip_norm=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = {"torch": torch, "clip_grad_norm_": clip_grad_norm_, "device": "cpu", "batch": batch, "num_micro_batches": 1, "scale": 1}
    torch.manual_seed(1)
    for _ in range(3):
        narrow = copy.deepcopy(model)
        for parameter in narrow.parameters():
            parameter.data = parameter.data.bfloat16()
        exec(block("copy of the model whose parameters"), names | {"narrow": narrow, "model": model, "optimizer": optimizer, "clip_norm": 0.1})
    torch.manual_seed(1)
    for _ in range(3):
        step(batch)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), model.parameters()))


def test_a_budget_in_bytes():
    from packhorse.models.gpt import GPT

    torch.manual_seed(0)
    model = GPT(vocab=64, layers=4, width=32, heads=2, seq_len=64)
    ids = torch.randint(0, 64, (8, 64))
    names = {"ph": ph, "model": model, "batch": {"ids": ids, "labels": ids.roll(-1, 1)}, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(block('budget="60%"'), names)
    plan = names["plan"]
    assert plan.peak_bytes <= 0.6 * plan.keep_everything_bytes
    assert plan.overhead_seconds > 0
