from dataclasses import replace

import pytest
import torch
from torch import nn

from packhorse.bench import cells
from packhorse.bench.cells import NUM_BUDGETS, Cell, Model, Outcome, attempt, models, render
from packhorse.bench.rivals import loss_of

pytestmark = pytest.mark.cpu


def test_the_matrix_has_a_row_for_each_kind_and_each_has_a_finite_loss():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    known = models()
    assert [m.name for m in known] == [
        "ResNet-128", "LSTM-256", "GPT-12", "GPT-24", "U-Net", "DenseNet", "mixture of experts, static capacity", "Hugging Face Llama",
        "Hugging Face T5", "Hugging Face ViT",
    ]  # fmt: skip
    for model in known:
        assert torch.isfinite(loss_of(model.make().train(), model.batch())), model.name


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_a_row_keeps_its_word_from_all_to_the_least():
    found = attempt(Model("layers", Layers, lambda: {"x": torch.randn(64, 16)}), num_budgets=3)
    assert not found.failure and len(found.cells) == 3 and found.monotone
    assert all(cell.held and cell.exact and cell.equal for cell in found.cells)
    assert found.cells[0].budget_bytes > found.cells[1].budget_bytes > found.cells[2].budget_bytes == found.least_bytes
    # 64 rows of 16 floats are 4096 bytes; of 4 layers at least the inputs of two need not be kept
    assert found.none_bytes - found.least_bytes >= 2 * 64 * 16 * 4


@pytest.mark.parametrize("table", ["gradients", "losses"])
def test_one_bit_off_eager_is_seen(monkeypatch, table):
    eager = cells._eager

    def off(model, batch):
        seen = eager(model, batch)
        if table == "losses":
            return replace(seen, losses=[seen.losses[0], seen.losses[1] * (1 + 2**-23)])
        last = "layers.3.0.bias"
        return replace(seen, gradients={**seen.gradients, last: seen.gradients[last].nextafter(torch.tensor(9.0))})

    monkeypatch.setattr(cells, "_eager", off)
    found = attempt(Model("layers", Layers, lambda: {"x": torch.randn(64, 16)}), method="sqrt", num_budgets=1)
    assert [cell.equal for cell in found.cells] == [False] and not found.kept


def test_what_cannot_be_captured_is_a_row_with_its_reason():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x).mean()
            return y * 2 if y.item() > 0 else y

    found = attempt(Model("asks", Asks, lambda: {"x": torch.randn(2, 4)}))
    assert found.failure and not found.cells and not found.kept
    assert found.failure.replace("|", "\\|") in render([found])


def test_one_broken_promise_is_seen():
    good = Outcome("m", 9, 200, 100, 50, tuple(Cell(b, b - 1, b - 1, True) for b in range(200, 200 - NUM_BUDGETS, -1)))
    assert good.kept and good.monotone
    first = good.cells[0]
    broken = (replace(first, measured_bytes=201, predicted_bytes=201), replace(first, predicted_bytes=198), replace(first, equal=False))
    for cell in broken:
        assert not replace(good, cells=(cell, *good.cells[1:])).kept
    risen = replace(good, cells=(replace(first, measured_bytes=190, predicted_bytes=190), *good.cells[1:]))
    assert not risen.monotone and not risen.kept
    assert not replace(good, cells=good.cells[1:]).kept  # a row with a budget left out
    page = render([good, replace(good, cells=(broken[0], *good.cells[1:]))])
    assert "16 cells: 15 within their budget, 16 measured as predicted, 16 with losses" in page
    assert "| m | 9 | 0.000 | 0.000 | 0.500 | 0.333 | 8 of 8 | 8 of 8 | 8 of 8 | yes | 0 |  |" in page and "| 7 of 8 |" in page
