"""The gradient of a tied embedding in rows: bits of plain PyTorch, with repeated tokens and a padding token, and one tensor less."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import packhorse as ph
from packhorse.graph.embedding_rows import ADD_ROWS

pytestmark = pytest.mark.cpu


class Tied(nn.Module):
    def __init__(self, vocab, width, padding):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width, padding_idx=padding)
        self.hidden = nn.Linear(width, width)

    def forward(self, ids, labels):
        x = torch.tanh(self.hidden(self.tokens(ids)))
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [5, 200])
def test_bits_of_plain_pytorch(padding, dtype, vocab):
    torch.manual_seed(0)
    model = Tied(vocab, 16, padding).to(dtype)
    ids, labels = torch.randint(0, vocab, (2, 4, 9))
    model(ids, labels).backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    plan = ph.plan(model, {"ids": ids, "labels": labels}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert sum(node.op == ADD_ROWS for node in plan.programs["first"].graph.nodes) == 1
    step = ph.compile(model, plan)
    step({"ids": ids, "labels": labels})
    for name, grad in step.grads().items():
        assert torch.equal(grad, want[name]), name
    assert step.ledger().measured_peak_bytes == plan.peak_bytes


def test_two_embeddings_of_one_weight_are_left_as_they_are():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(50, 8)

        def forward(self, ids):
            return (self.tokens(ids[:, 0]) * self.tokens(ids[:, 1])).square().mean()

    torch.manual_seed(0)
    model, ids = Twice(), torch.randint(0, 50, (20, 2))
    model(ids).backward()
    want = model.tokens.weight.grad.clone()
    step = ph.compile(model, ph.plan(model, (ids,), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    step((ids,))
    assert torch.equal(step.grads()["tokens.weight"], want)
