import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import packhorse
from packhorse.bench import batch, by_hand
from packhorse.bench.chains import Workload, gpt_chain, resnet_chain
from packhorse.cli.benches import NAMES, run_bench
from packhorse.errors import BudgetError, UserError
from packhorse.models.gpt import GPT
from packhorse.models.resnet import resnet

pytestmark = pytest.mark.cpu

LAYERS, WIDTH, VOCAB, BATCH, TOKENS = 4, 16, 32, 2, 16


def tiny_ids(n):
    return {name: torch.randint(0, VOCAB, (n, TOKENS)) for name in ("ids", "labels")}


TINY = batch.Workload("tiny", 2, lambda: GPT(vocab=VOCAB, layers=LAYERS, width=WIDTH, heads=2, seq_len=TOKENS), tiny_ids)
SEARCHED = batch.Workload("searched", 3, lambda: GPT(vocab=8, layers=1, width=4, heads=1, seq_len=TOKENS), tiny_ids)
CHAIN = Workload(
    "tiny",
    lambda: gpt_chain(layers=LAYERS, width=WIDTH, heads=2, vocab=VOCAB, seq_len=TOKENS),
    lambda: {name: torch.randint(0, VOCAB, (BATCH, TOKENS)) for name in ("inputs", "labels")},
)
IMAGES = Workload(
    "tiny net", lambda: resnet_chain(depth=8, width=4), lambda: {"inputs": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}
)


# -- batch ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def row():
    """Without the search, which plans a dozen times."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "largest_multiple", lambda workload, budget: 4)
        return batch.measure("tiny", TINY, rounds=1)


def test_four_times_the_batch_in_eagers_bytes(row):
    """Bit-equal to plain PyTorch at 4 b, exact, within eager's bytes at b; accumulation differs by rounding alone."""
    assert row.good and row.equal and row.measured_bytes == row.planned_bytes and row.measured_bytes + row.outside_bytes <= row.eager_bytes
    assert 0 <= row.apart <= 64 * torch.finfo(torch.float32).eps
    assert row.eager_wide_bytes > row.eager_bytes and row.extra_flops > 0 and row.time > 0


def test_eagers_bytes_are_a_closed_form_where_there_is_one():
    """y = sum(x w): parameter, gradient, two states and a step count; in a step at least the product of x and w is held, and less than twice that."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x):
            return (x * self.w).sum()

    persistent, product = 4 * 4 + 4 + 3 * 4, 4 * 1000
    found = batch._eager(Product(), [{"x": torch.randn(1000)}]).num_bytes
    assert persistent + product <= found < persistent + 2 * product


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 5, 8, 14])
def test_the_largest_multiple_is_the_largest(monkeypatch, largest):
    """Nothing is allocated to find it."""

    def plan(model, given, *, budget, **settings):
        tensors = [*given.values(), *model.parameters()]
        assert budget == 1000 and settings["recompute"] == "optimal" and all(t.device.type == "meta" for t in tensors)
        if len(given["ids"]) > largest * SEARCHED.b:
            raise BudgetError("too small")

    monkeypatch.setattr(packhorse, "plan", plan)
    assert batch.largest_multiple(SEARCHED, 1000) == largest


def test_group_norm_takes_the_place_of_every_batch_norm():
    """So that the mean loss of two halves is the loss of the whole, which it is not with batch norm."""
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))

    def gap(model):
        return abs((model(images[:2], labels[:2]) + model(images[2:], labels[2:])) / 2 - model(images, labels)).item()

    model = batch.group_norm(resnet(8)).train()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert gap(model) < 1e-5 < 1e-3 < gap(resnet(8).train())


BROKEN = (
    {"measured_bytes": 11},
    {"outside_bytes": 2},
    {"equal": False},
    {"apart": 1e-4},
)


def test_a_broken_promise_is_a_failure():
    kept = batch.Row("gpt", 4, 11, 40, 10, 10, 1, True, 1e-7, 1.0, 1.0, 0.1, 8)
    assert kept.good and replace(kept, apart=None).good
    for broken in BROKEN:
        assert not replace(kept, **broken).good, broken
    assert "another computation" in batch.render([replace(kept, apart=None)], 3) and "0 of 1 train" in batch.render([replace(kept, equal=False)], 3)


# -- by hand -------------------------------------------------------------------------------------------------------------------------


def test_it_is_the_plan_by_hand():
    """Both recompute each block but its last product, which nothing in the backward pass reads; bits are PyTorch's."""
    torch.set_num_threads(1)
    row = by_hand.measure("tiny", CHAIN, rounds=1)
    tokens = BATCH * TOKENS
    block = 2 * tokens * WIDTH * (3 * WIDTH + WIDTH + 4 * WIDTH) + 4 * BATCH * TOKENS * TOKENS * WIDTH
    assert row.hand_flops == row.ours_flops == LAYERS * block
    assert row.exact and row.equal == row.hand_equal == "yes" and row.ratio > 0


def test_checkpointing_counts_a_batch_twice_and_the_plan_does_not():
    torch.set_num_threads(1)
    row = by_hand.measure("tiny net", IMAGES, rounds=1)
    assert row.exact and row.equal == "yes" and row.hand_equal == "buffers differ"
    assert 0 < row.ours_flops <= row.hand_flops


def test_slower_or_other_bits_is_a_failure():
    kept = by_hand.Row("tiny", 1.0, 2.0, 1.0, 0.92, 10, 10, 5, 5, "yes", "buffers differ", True)
    assert kept.good
    for broken in ({"ratio": 0.921}, {"equal": "buffers differ"}, {"hand_equal": "no"}, {"exact": False}):
        assert not replace(kept, **broken).good, broken


# -- the commands --------------------------------------------------------------------------------------------------------------------


def test_the_commands(monkeypatch, capsys, tmp_path, row):
    monkeypatch.setitem(batch.MODELS, "gpt", TINY)
    monkeypatch.setattr(batch, "measure", lambda name, workload, rounds: replace(row, name=name))
    monkeypatch.setitem(by_hand.MODELS, "gpt-24", CHAIN)
    monkeypatch.setattr(by_hand, "MOST", 100.0)
    for name, model, module in (("batch", "gpt", batch), ("by-hand", "gpt-24", by_hand)):
        assert name in NAMES
        page = tmp_path / f"{name}.md"
        page.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
        assert run_bench(name, ["--model", model, "--rounds", "1", "--write", str(page)], as_json=True) == 0
        assert [found["name"] for found in json.loads(capsys.readouterr().out)] == [model]
        text = page.read_text()
        assert "| tiny |" in text and "old" not in text and text.startswith("before") and text.endswith("after\n")
        with pytest.raises(UserError, match=re.escape("--rounds 0")):
            run_bench(name, ["--rounds", "0"], as_json=True)
        with pytest.raises(UserError, match="has no lines"):
            run_bench(name, ["--write", str(tmp_path / "nowhere.md")], as_json=True)
