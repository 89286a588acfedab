"""Lifespans worked out by hand."""

import pytest

from packhorse.errors import CheckError
from packhorse.graph.liveness import Lifespan, check_schedule, lifespans, live_bytes
from packhorse.graph.text import parse_graph

pytestmark = pytest.mark.pure

# a 64 B (times 0-3: read through its view at 3), b 32 B (1-2), c 64 B (2, read only for its shape at 4), d 16 B (3-4, then output), e 4 B (4)
GRAPH = parse_graph(
    """graph g
input %w: f32[16] = param "w"
%a: f32[16] = aten.exp.default(%w)  # forward |  |
%b: f32[8] = aten.x.default(%a)  # forward |  |
%c: f32[16] = aten.x.default(%b)  # forward |  |
%v: f32[8] @a+0 = aten.slice.Tensor(%a)  # forward |  |
%d: f32[4] = aten.x.default(%v)  # forward |  |
%e: f32[1] = aten.nll_loss_backward.default(%d, %c)  # backward |  |
output %d = metric "loss"
"""
)


def test_views_share_and_unread_arguments_keep_nothing():
    assert lifespans(GRAPH) == {
        "a": Lifespan(0, 5), "b": Lifespan(1, 3), "c": Lifespan(2, 3), "d": Lifespan(4, 7), "e": Lifespan(5, 6)
    }  # fmt: skip
    assert live_bytes(GRAPH) == [64, 96, 160, 64, 80, 20]


def test_the_checker_rejects_lives_too_short_or_too_long():
    spans = lifespans(GRAPH)
    check_schedule(GRAPH, spans)
    for name, wrong in [("a", Lifespan(0, 4)), ("b", Lifespan(1, 4)), ("d", Lifespan(4, 6)), ("c", Lifespan(1, 3))]:
        with pytest.raises(CheckError, match=f"%{name} is used over"):
            check_schedule(GRAPH, {**spans, name: wrong})
