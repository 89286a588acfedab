"""What a budget's error says where the simulation is not the layout, or a method finds nothing; a mark that the exact method obeys."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import packhorse as ph
from beside_plain import Plain, adamw, assert_same
from packhorse.bench.replan import replanned
from packhorse.errors import BudgetError
from packhorse.planning import choose

pytestmark = pytest.mark.cpu


class Chain(nn.Module):
    """Five linear layers with tanh; the mean square of what comes out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class Norms(nn.Module):
    """Instance norms with statistics around a convolution; the mean square of what comes out."""

    def __init__(self):
        super().__init__()
        self.first = nn.InstanceNorm2d(3, track_running_stats=True, affine=True)
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, track_running_stats=True)

    def forward(self, x):
        return self.last(F.hardswish(self.conv(self.first(x).relu_()))).square().mean()


@pytest.mark.unchecked  # its layouts are worse than ours on purpose
def test_the_least_that_an_error_names_is_the_one_that_minimum_reaches(monkeypatch):
    exact = choose.plan_graph

    def losing_bytes(*given):  # a plan with more buffers may lose less than one with fewer
        planned = exact(*given)
        layout = planned.layout
        gap = 64 * ((len(layout.offsets) % 3) * 3)
        offsets = {name: offset + gap for name, offset in layout.offsets.items()}
        return replace(planned, layout=replace(layout, offsets=offsets, height=layout.height + gap))

    monkeypatch.setattr(choose, "plan_graph", losing_bytes)
    model = Norms()
    batch = {"x": torch.randn(4, 3, 8, 8)}
    none = ph.plan(model, batch, optimizer=adamw(model.parameters()), recompute="none")

    def planned(budget):
        return replanned(none, model, adamw(model.parameters()), "optimal", budget)

    least = planned("minimum").peak_bytes
    assert planned(least).peak_bytes == least
    for budget in (1, least - 1):
        with pytest.raises(BudgetError) as error:
            planned(budget)
        assert int(re.search(r"the least that works is .*?\((\d+) bytes\)", str(error.value))[1]) == least


def test_the_exact_method_too_says_the_least_where_it_finds_nothing():
    model, batch = Chain(), {"x": torch.randn(64, 16)}

    def planned(budget):
        return ph.plan(model, batch, optimizer=adamw(model.parameters()), recompute="milp", budget=budget)

    least = planned("minimum").peak_bytes
    with pytest.raises(BudgetError, match=rf"the least that works is .* \({least} bytes\)"):
        planned(1)


class Dropping(Chain):
    def forward(self, x):
        for layer in self.layers[:-1]:
            x = ph.drop(F.gelu(layer(x)))
        return self.layers[-1](x).square().mean()


@pytest.mark.parametrize("budget", ["100%", "100MiB"])
def test_the_exact_method_drops_what_is_marked_though_there_is_room(budget):
    torch.manual_seed(0)
    model, batch = Dropping(), {"x": torch.randn(64, 16)}
    plain = Plain(model, [batch], clip_norm=None, steps=2)
    plan = ph.plan(model, batch, optimizer=adamw(model.parameters()), recompute="milp", budget=budget)
    again = [node.mark for node in plan.programs["first"].graph.nodes if node.phase == "recompute" and not node.is_view]
    assert again.count("drop") == 4
    assert_same(ph.compile(model, plan), batch, plain, budget)
