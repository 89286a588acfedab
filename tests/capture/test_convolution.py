"""Convolutions as the kernel that eager runs: rewritten where it can write into planned memory, left alone elsewhere, always eager's bits."""

import copy

import pytest
import torch
from torch import nn

import packhorse as ph

pytestmark = pytest.mark.cpu

NETS = {
    "1x1, no bias": (lambda: nn.Conv2d(4, 6, 1, bias=False), 2, True),
    "1x1 with bias": (lambda: nn.Conv2d(4, 6, 1), 2, True),
    "1x1 in fp64": (lambda: nn.Conv2d(4, 6, 1).double(), 2, True),
    "3x3 in fp64": (lambda: nn.Conv2d(4, 6, 3, padding=1).double(), 2, True),
    "3x3": (lambda: nn.Conv2d(4, 6, 3, padding=1), 2, False),
    "many images": (lambda: nn.Conv2d(4, 6, 1), 16, False),
    "in groups": (lambda: nn.Conv2d(4, 6, 1, groups=2), 2, False),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2).double(), 2, False),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 2), 2, False),
    "channels last": (lambda: nn.Conv2d(4, 6, 3).double().to(memory_format=torch.channels_last), 2, False),
}


@pytest.mark.parametrize("name", NETS)
def test_bits_and_kernel(name):
    make, images, plain = NETS[name]
    torch.manual_seed(0)
    # the first convolution's input needs no gradient, the second's does
    mine = nn.Sequential(make(), nn.ReLU(), nn.Conv2d(6, 4, 1).to(next(make().parameters()).dtype), nn.ReLU(), make())
    theirs, x = copy.deepcopy(mine), torch.randn(images, 4, 9, 9, dtype=next(mine.parameters()).dtype)
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    plan = ph.plan(mine, x, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), loss=loss)
    step = ph.compile(mine, plan)
    for _ in range(3):
        optimizer.zero_grad()
        wanted = loss(theirs(x), x)
        wanted.backward()
        optimizer.step()
        assert torch.equal(step(x), wanted)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters()))
    nodes = [node for node in plan.programs["first"].graph.nodes if "conv" in node.op]
    first_and_last = [node for node in nodes if node.module in ("0", "4")]
    assert all(("slow" in node.op) == plain for node in first_and_last), [node.op for node in nodes]
    if plain and images == 2:  # gradients are written where they persist, without a copy
        assert not [copy for copy in plan.programs["first"].placement.copies if copy.target[0] == "grad"]
