"""Accumulation on a graph small enough to read."""

import pytest

from packhorse.graph.accumulate import first_micro_batch, next_micro_batch
from packhorse.graph.text import parse_graph, print_graph
from packhorse.graph.verify import verify

pytestmark = pytest.mark.pure

MICRO = parse_graph(
    """graph micro
input %w: f32[3] = param "w"
input %seed: f32[] = constant "seed"
%l: f32[] = aten.sum.default(%w)  # forward |  | m.py:1
%g: f32[3] = aten.x.default(%seed, %w)  # backward | fc | m.py:1
%later: f32[3] = aten.x.default(%g)  # backward |  | m.py:1
output %l = metric "loss"
output %g = grad "w"
"""
)


def test_one_micro_batch_changes_nothing():
    assert first_micro_batch(MICRO, 1).nodes == MICRO.nodes


def test_the_next_adds_each_gradient_as_soon_as_it_exists():
    graph = next_micro_batch(MICRO, 4, {"w": (1,)})
    verify(graph)
    assert (
        print_graph(graph)
        == """graph next
input %w: f32[3] = param "w"
input %seed: f32[] = constant "seed"
input %.loss_before: f32[] = metric "loss"
input %.grad_before.w: f32[3] = grad "w"
%l: f32[] = aten.sum.default(%w)  # forward |  | m.py:1
%g: f32[3] = aten.x.default(%seed, %w)  # backward | fc | m.py:1
%.grad_total.w: f32[3] = aten.add.Tensor(%.grad_before.w, %g)  # backward | fc | m.py:1
%later: f32[3] = aten.x.default(%g)  # backward |  | m.py:1
%.loss_share: f32[] = aten.div.Scalar(%l, 4)  # forward |  |
%.loss_total: f32[] = aten.add.Tensor(%.loss_before, %.loss_share)  # forward |  |
output %.loss_total = metric "loss"
output %.grad_total.w = grad "w"
"""
    )
