"""Kept results move into planned memory: on text, and in a step of convolutions that stays bit-equal."""

import copy

import pytest
import torch
from torch import nn

import packhorse as ph
from packhorse.graph.into_arena import into_arena
from packhorse.graph.text import parse_graph, print_graph
from packhorse.graph.verify import verify

pytestmark = pytest.mark.cpu

BEFORE = """graph first
input %x: f32[1, 4, 4, 4] = batch "x"
input %w: f32[4, 4, 1, 1] = param "w"
%c: f32[1, 4, 4, 4] = aten.convolution.default(%x, %w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # forward | conv | net.py:1
%v: f32[16, 4] @c+0 = aten.view.default(%c, [16, 4])  # forward | conv | net.py:2
%t: f32[16, 4] = aten.tanh.default(%v)  # forward |  | net.py:3
%l: f32[] = aten.sum.default(%t)  # forward |  | net.py:4
%g: f32[16, 4] = aten.tanh_backward.default(%v, %v)  # backward |  | net.py:3
output %l = metric "loss"
output %g = grad "w"
"""

AFTER = """graph first
input %x: f32[1, 4, 4, 4] = batch "x"
input %w: f32[4, 4, 1, 1] = param "w"
%c: f32[1, 4, 4, 4] = aten.convolution.default(%x, %w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # forward | conv | net.py:1
%.kept.c: f32[1, 4, 4, 4] = aten.clone.default(%c)  # forward | conv | net.py:1
%v: f32[16, 4] @.kept.c+0 = aten.view.default(%.kept.c, [16, 4])  # forward | conv | net.py:2
%t: f32[16, 4] = aten.tanh.default(%v)  # forward |  | net.py:3
%l: f32[] = aten.sum.default(%t)  # forward |  | net.py:4
%g: f32[16, 4] = aten.tanh_backward.default(%v, %v)  # backward |  | net.py:3
output %l = metric "loss"
output %g = grad "w"
"""


def test_by_hand():
    moved = into_arena(parse_graph(BEFORE))
    verify(moved)
    assert print_graph(moved) == print_graph(parse_graph(AFTER))


def test_a_mark_moves_along():
    text = BEFORE.replace("[0, 0], 1)  # forward | conv | net.py:1", '[0, 0], 1) mark keep "c"  # forward | conv | net.py:1')
    nodes = into_arena(parse_graph(text)).nodes
    assert (nodes[0].mark, nodes[1].mark, nodes[1].mark_name) == ("", "keep", "c")


def test_convolutions_under_every_budget():
    """Some plan keeps convolutions' results in the arena; all are bit-equal and measured as predicted."""
    torch.manual_seed(0)
    layers = [module for _ in range(5) for module in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 32 * 32, 3)).train()
    x = torch.randn(8, 8, 32, 32)
    plain = copy.deepcopy(net)
    plain(x).square().mean().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    moved = 0
    for budget in (None, "85%", "70%", "60%", "50%", "minimum"):
        mine = copy.deepcopy(net)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
        step = ph.compile(mine, ph.plan(mine, x, optimizer=optimizer, loss=lambda out, batch: out.square().mean(), budget=budget))
        step(x)
        ledger = step.ledger()
        assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes
        assert all(torch.equal(grad, wanted[name]) for name, grad in step.grads().items())
        moved += any(v.name.startswith(".kept.") for node in step.plan.programs["first"].graph.nodes for v in node.outputs if v)
    assert moved
