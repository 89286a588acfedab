"""Which copies vanish, on a graph small enough to read."""

import pytest

from packhorse.graph.drop_clones import drop_clones
from packhorse.graph.text import parse_graph, print_graph
from packhorse.graph.verify import verify

pytestmark = pytest.mark.pure


def test_only_copies_that_nothing_can_tell_from_their_source_vanish():
    graph = parse_graph(
        """graph g
input %w: f32[2, 3] = param "w"
%w2: f32[2, 3] = aten.clone.default(%w)  # forward
%a: f32[2, 3] = aten.exp.default(%w2)  # forward
%b: f32[2, 3] = aten.clone.default(%a)  # forward
%c: f32[2, 3] = aten.clone.default(%b)  # forward
%v: f32[3, 2]{1, 3} @c+0 = aten.t.default(%c)  # forward
%d: f32[3, 2] = aten.clone.default(%v, memory_format=<memory_format contiguous_format>)  # forward
%e: f32[6] = aten.cat.default([%d, %b], 0)  # backward
output %c = metric "loss"
output %e = grad "w"
"""
    )
    after = drop_clones(graph)
    verify(after)
    # the parameter's copy stays (its source may be overwritten by an update), and so does the one into another layout
    assert (
        print_graph(after)
        == """graph g
input %w: f32[2, 3] = param "w"
%w2: f32[2, 3] = aten.clone.default(%w)  # forward |  |
%a: f32[2, 3] = aten.exp.default(%w2)  # forward |  |
%v: f32[3, 2]{1, 3} @a+0 = aten.t.default(%a)  # forward |  |
%d: f32[3, 2] = aten.clone.default(%v, memory_format=<memory_format contiguous_format>)  # forward |  |
%e: f32[6] = aten.cat.default([%d, %a], 0)  # backward |  |
output %a = metric "loss"
output %e = grad "w"
"""
    )
