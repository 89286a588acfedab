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


def test_a_mark_goes_to_what_stands_in_the_place_of_a_copy():
    lines = [
        'input %w: f32[2] = param "w"',
        "%a: f32[2] = aten.exp.default(%w)  # forward",
        '%b: f32[2] = aten.clone.default(%a) mark keep "kept"  # forward',
        "%c: f32[2] = aten.clone.default(%b)  # forward",
        '%d: f32[2] = aten.clone.default(%c) mark drop ""  # forward',
        "%e: f32[2] = aten.add.Tensor(%c, %d)  # forward",
        'output %e = metric "loss"',
    ]
    after = drop_clones(parse_graph("graph g\n" + "\n".join(lines)))
    verify(after)
    # what is kept and what is dropped are two values
    assert [(node.op, node.mark, node.mark_name) for node in after.nodes] == [
        ("aten.exp.default", "keep", "kept"),
        ("aten.clone.default", "drop", ""),
        ("aten.add.Tensor", "", ""),
    ]
