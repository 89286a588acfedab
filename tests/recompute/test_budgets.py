"""Does a budget hold? A cover of `packhorse bench frontier --cells`: models of every shape, small, and eight budgets from all to the least."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import packhorse as ph
from beside_plain import METHODS, Plain, adamw, assert_same, plans_of
from packhorse.bench.cells import DenseNet, Mixture, Model, UNet, attempt
from packhorse.bench.replan import replanned
from packhorse.errors import BudgetError, UserError
from packhorse.models.gpt import GPT
from packhorse.models.lstm import LSTM
from packhorse.models.resnet import equal_stages
from packhorse.planning.budget import budget_bytes
from packhorse.units import format_bytes

pytestmark = pytest.mark.cpu


def pairs(rows: int, length: int):
    return lambda: {name: torch.randint(0, 64, (rows, length)) for name in ("ids", "labels")}


def images(rows: int, side: int):
    return lambda: {"images": torch.randn(rows, 3, side, side), "labels": torch.randint(0, 10, (rows,))}


CELLS = [
    ("optimal", Model("ResNet", lambda: equal_stages(8, classes=10, width=4), images(2, 32))),
    ("optimal", Model("LSTM", lambda: LSTM(vocab=64, layers=1, width=16, dropout=0.1), pairs(4, 6))),
    ("recursive", Model("GPT", lambda: GPT(vocab=64, layers=3, width=32, heads=4, seq_len=16, dropout=0.1), pairs(4, 16))),
    ("optimal", Model("U-Net", lambda: UNet(4, 2), images(2, 16))),
    ("chen", Model("DenseNet", lambda: DenseNet(2, 3, 8), images(2, 16))),
    ("optimal", Model("mixture of experts", lambda: Mixture(layers=1, tokens=32), pairs(2, 16))),
]


@pytest.mark.parametrize("method, model", CELLS, ids=lambda case: getattr(case, "name", case))
def test_eight_budgets_from_all_to_the_least(method, model, monkeypatch):
    monkeypatch.setattr("packhorse.recompute.improve.NODES_LOOKED_AT", 5_000)  # a shorter search: other proposals, judged alike
    outcome = attempt(model, method)
    if method != "optimal":  # what its proposals cannot meet is refused by it; the cells that were met stand
        assert outcome.cells and all(cell.held and cell.exact and cell.equal for cell in outcome.cells) and outcome.monotone
        return
    assert not outcome.failure
    assert [(c.held, c.exact, c.equal) for c in outcome.cells] == [(True, True, True)] * 8
    assert outcome.monotone and outcome.least_bytes < outcome.none_bytes
