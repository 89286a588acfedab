"""Dropout at every kind of rate: 1/(1-p) rounds differently in the operator that a trace sees than in F.dropout, for some p."""

import copy

import pytest
import torch
from torch import nn

import packhorse as ph

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_rate_as_eager(dtype):
    rates = [0.0, 1.0, 1 / 3, *(k / 40 for k in range(1, 40)), *(0.2 * k / 27 for k in range(1, 27))]
    model = nn.Sequential(*(nn.Dropout(p) for p in rates if p < 1))
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, dtype=dtype))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.drops = weight, model

        def forward(self, x):
            return sum((drop(self.weight * x).square().sum() for drop in self.drops), nn.functional.dropout(self.weight, 1.0).sum())

    mine = Net()
    plain, x = copy.deepcopy(mine), torch.randn(16, 64, dtype=dtype)
    step = ph.compile(mine, ph.plan(mine, x, optimizer=torch.optim.SGD(mine.parameters(), lr=0.0)))
    torch.manual_seed(1)
    wanted = plain(x)
    wanted.backward()
    torch.manual_seed(1)
    assert torch.equal(step(x), wanted)
    assert torch.equal(step.grads()["weight"], plain.weight.grad)
