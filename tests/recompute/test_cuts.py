"""Cuts of a forward pass, by hand."""

import pytest

from chain_graphs import facts, node, uniform_chain
from packhorse.graph.ir import Graph, Input, Output, Value
from packhorse.recompute.cuts import blocks_of, crossings, cut_places
from packhorse.recompute.rules import evenly

pytestmark = pytest.mark.pure


def graph_of(forward: list, backward: list) -> Graph:
    last = forward[-1].outputs[0].name
    outputs = (Output(last, "metric", "loss"), Output(backward[-1].outputs[0].name, "grad", "w"))
    return Graph("first", (Input(Value("x", "f32", (16,), (1,)), "batch", "x"),), (*forward, *backward), outputs)


def residual(blocks: int) -> Graph:
    """a -> b -> c = a + b, `blocks` times: one value crosses between blocks, two inside."""
    forward, before = [node("s", ["x"])], "s"
    for k in range(blocks):
        forward += [node(f"a{k}", [before]), node(f"b{k}", [f"a{k}"]), node(f"c{k}", [before, f"b{k}"])]
        before = f"c{k}"
    forward.append(node("loss", [before], elements=1))
    backward = [node("gl", [before], "backward")]
    for k in range(blocks - 1, -1, -1):
        above = f"g{k + 1}" if k < blocks - 1 else "gl"
        backward.append(node(f"h{k}", [above, f"a{k}"], "backward"))
        backward.append(node(f"g{k}", [f"h{k}", f"c{k - 1}" if k else "s"], "backward"))
    return graph_of(forward, backward)


def test_a_residual_net_is_cut_between_its_blocks():
    known = facts(residual(4))
    at = crossings(known)
    names = [[known.names[s] for s in at.crossing[p]] for p in cut_places(known, at)]
    assert names == [[], ["s"], ["c0"], ["c1"], ["c2"]]  # behind c3 there is the loss alone
    blocks = blocks_of(known, at, cut_places(known, at))
    assert sorted(n for b in blocks for n in b.forward + b.backward) == list(known.plain_order())


def test_gradients_stand_with_their_blocks():
    known = facts(residual(4))
    at = crossings(known)
    for block in blocks_of(known, at, cut_places(known, at)):
        inside = {known.graph.nodes[n].outputs[0].name for n in block.forward}
        for n in block.backward:
            name = known.graph.nodes[n].outputs[0].name
            if name.startswith("h"):
                assert f"a{name[1:]}" in inside


def test_every_place_of_a_uniform_chain_is_a_cut():
    known = facts(uniform_chain(10))
    at = crossings(known)
    assert [len(c) for c in at.crossing] == [0] + [1] * 9
    assert len(cut_places(known, at)) >= 8


def test_what_crosses_a_long_skip():
    """u skips over v and w: both cross where v and w do."""
    forward = [node("u", ["x"]), node("v", ["u"]), node("w", ["v"]), node("y", ["w", "u"]), node("loss", ["y"], elements=1)]
    known = facts(graph_of(forward, [node("g", ["y", "v"], "backward")]))
    at = crossings(known)
    assert [sorted(known.names[s] for s in c) for c in at.crossing] == [[], ["u"], ["u", "v"], ["u", "w"], ["y"]]
    assert at.size == (0, 64, 128, 128, 64)


def test_nine_layers_in_five_segments():
    assert evenly(list(range(9)), 5) == [0, 2, 4, 6, 8]
    for n in range(1, 40):
        for k in range(1, n + 1):
            starts = evenly(list(range(n)), k)
            lengths = [b - a for a, b in zip(starts, [*starts[1:], n])]
            assert len(lengths) == k and max(lengths) - min(lengths) <= 1
