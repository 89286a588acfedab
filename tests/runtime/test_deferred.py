"""Models whose values are made later have the bits of ordinary ones, and are made one tensor after another."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import packhorse as ph
from packhorse.capture.trace import distinct
from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT
from packhorse.models.resnet import equal_stages
from packhorse.runtime.deferred import NeedsValues, made, order_of, recipe_of

pytestmark = pytest.mark.cpu


class Views(nn.Module):
    """Values written through views, in several passes, from one tensor to another, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(6)
        self.tokens = nn.Embedding(5, 6, padding_idx=2)
        self.register_buffer("table", torch.arange(6.0).exp())
        with torch.no_grad():
            self.a.weight[2:4].normal_(std=0.1)
            self.a.weight.mul_(2)
            self.b.bias.copy_(self.a.bias * 3)
            self.norm.weight[1] = 7.0

    def forward(self, x):
        return F.mse_loss(self.norm(self.b(self.a(x))), x)


def reseeding():
    torch.manual_seed(9)
    first = nn.Linear(4, 4)
    torch.manual_seed(3)
    return nn.Sequential(first, nn.Linear(4, 5))


MAKERS = {
    "GPT": lambda: GPT(vocab=40, layers=2, width=16, heads=2, seq_len=8),
    "BERT": lambda: BERT(vocab=40, layers=2, width=16, heads=2, seq_len=8),
    "ResNet": lambda: equal_stages(32, classes=10, width=4),
    "views": Views,
    "reseeding": reseeding,
}


def tensors(model):
    return {**distinct(model.named_parameters(remove_duplicate=False)), **distinct(model.named_buffers(remove_duplicate=False))}


@pytest.mark.parametrize("name", MAKERS)
def test_values_of_an_ordinary_construction(name):
    torch.manual_seed(5)
    want = tensors(MAKERS[name]())
    torch.manual_seed(5)
    model = ph.deferred(MAKERS[name])
    assert all(tensor.device.type == "meta" for tensor in tensors(model).values())
    recipe, known_as = recipe_of(tensors(model))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    found = list(made(recipe, torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), before)
    assert [known for known, _ in found] == order_of(recipe)
    got = dict(found)
    assert {known_as[n] for n in want} == got.keys()
    for n, tensor in want.items():
        assert torch.equal(got[known_as[n]], tensor), n


def test_few_tensors_are_held_at_a_time(monkeypatch):
    """Each weight is written in two passes, the second over all: the first pass' values are gone by then."""
    import packhorse.runtime.deferred as deferred

    model = ph.deferred(lambda: GPT(vocab=40, layers=8, width=16, heads=2, seq_len=8))
    recipe, _ = recipe_of(tensors(model))
    whole = sum(t.nbytes for t in tensors(model).values())
    most, run = 0, deferred._run

    def watched(call, held, *args, **kwargs):
        nonlocal most
        run(call, held, *args, **kwargs)
        most = max(most, sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held.values()}.values()))

    monkeypatch.setattr(deferred, "_run", watched)
    for _ in made(recipe, torch.device("cpu")):
        pass
    assert most < whole / 4


def test_one_rank_trains_it_as_an_ordinary_one():
    ids = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1))
    batch, losses = {"ids": ids, "labels": ids}, []
    for make in (lambda: ph.deferred(MAKERS["GPT"]), MAKERS["GPT"]):
        torch.manual_seed(5)
        model = make()
        step = ph.compile(model, ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters())))
        losses.append([float(step(batch)) for _ in range(3)])
        assert all(p.device.type == "cpu" for p in model.parameters())
    assert losses[0] == losses[1]


def test_values_that_the_construction_looks_at_are_refused():
    def looks():
        layer = nn.Linear(3, 3)
        if layer.weight.sum() > 0:
            nn.init.zeros_(layer.weight)
        return layer

    with pytest.raises(NeedsValues, match="asks for values of its tensors"):
        ph.deferred(looks)


def test_other_models_on_meta_are_refused_when_compiled():
    with torch.device("meta"):
        model = MAKERS["GPT"]()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    batch = {"ids": ids, "labels": ids}
    plan = ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(ph.UserError, match=r"meta device.*packhorse\.deferred"):
        ph.compile(model, plan)
