"""Simulated bytes are those of the real placement and layout, on graphs with in-place results, views, batch norm, dropout, and any mirrors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from chain_graphs import facts, uniform_chain
from packhorse.capture.capture import capture
from packhorse.capture.flat_storage import Widths, flat_storage
from packhorse.models.gpt import GPT
from packhorse.planning.plan import Options, plan_graph
from packhorse.recompute.facts import facts_of
from packhorse.recompute.mirror import order_of, replay
from packhorse.recompute.simulate import bytes_of, live_nodes, seconds_of

pytestmark = pytest.mark.cpu


def test_a_chain_by_hand():
    """While g(k) runs with everything kept: v0 .. v(k-1), g(k+1) and g(k); g0 goes to where gradients persist. Values take 64 bytes."""
    known = facts(uniform_chain(4))
    order = known.plain_order()
    #         v0 v1 v2 v3 g3 g2 g1 g0; the loss, v3, has its own place
    assert bytes_of(known, order).arena == [64, 128, 192, 192, 256, 256, 192, 64]
    assert seconds_of(known, order) == 8.0


def test_a_mirror_that_nobody_reads_does_not_run():
    known = facts(uniform_chain(3))
    assert live_nodes(known, (0, 1, 2, 1, 3, 4, 5)) == [True, True, True, True, True, True, True]
    assert live_nodes(known, (0, 1, 2, 3, 4, 1, 5))[5] is False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
        self.out = nn.Linear(3 * 64, 5)

    def forward(self, x, y):
        for conv, norm in zip(self.convs, self.norms):
            x = nn.functional.dropout(torch.relu(norm(conv(x))), 0.1) + x
        return nn.functional.cross_entropy(self.out(x.flatten(1)), y)


def _captured(kind: str):
    torch.manual_seed(0)
    if kind == "net":
        model, batch = Net(), {"x": torch.randn(2, 3, 8, 8), "y": torch.tensor([0, 1])}
    else:
        model, batch = (
            GPT(vocab=32, layers=2, width=16, heads=2, seq_len=8, dropout=0.1),
            {"ids": torch.zeros(2, 8).long(), "labels": torch.ones(2, 8).long()},
        )
    captured = capture(model.train(), batch, None, 2)
    persistent, _ = flat_storage(model, torch.optim.SGD(model.parameters(), lr=0.1), captured, None, Widths(None, None, False))
    return captured, persistent


CAPTURED = {}


@pytest.mark.parametrize("kind", ["net", "gpt"])
@pytest.mark.parametrize("program", ["first", "next"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_as_placement_and_layout_say(kind, program, data):
    captured, persistent = CAPTURED[kind] if kind in CAPTURED else CAPTURED.setdefault(kind, _captured(kind))
    graph = getattr(captured, program)
    in_place = data.draw(st.booleans())
    known = facts_of(graph, persistent.places(), [1.0] * len(graph.nodes), in_place)
    order = order_of(known, {i: data.draw(st.integers(0, 2)) for i in range(known.num_nodes) if known.forward[i] and known.real[i]})
    planned = plan_graph(replay(graph, order), persistent, Options(in_place=in_place))
    found = bytes_of(known, order)
    assert max(found.arena) == planned.layout.lower_bound
    assert max(found.external) == planned.external_bytes
    extra = sum(not node.is_view and node.op != "packhorse.random_state.default" for node in planned.graph.nodes)
    assert sum(live_nodes(known, order)) == extra
