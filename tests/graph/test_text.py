"""parse(print(g)) == g, and what malformed text answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import UserError
from packhorse.graph.ir import Const, Graph, Input, Node, Output, Ref, Value, contiguous_strides
from packhorse.graph.text import parse_graph, print_graph
from packhorse.graph.verify import verify

pytestmark = pytest.mark.pure

TEXT = """graph first
input %fc.weight: f32[4, 8] = param "fc.weight"
input %batch.x: f32[2, 8] = batch "x"
input %rng0: rng[] = random "default"
%t: f32[8, 4]{1, 8} @fc.weight+0 = aten.t.default(%fc.weight)  # forward | fc | model.py:12
%mm: f32[2, 4] = aten.mm.default(%batch.x, %t)  # forward | fc | model.py:12
%drop.0: f32[2, 4], %drop.1: bool[2, 4] = aten.native_dropout.default(%mm, 0.1, True) rng %rng0 -> %rng1  # forward |  | model.py:13
%slice: f32[2, 2]{4, 1} @drop.0+8 = aten.slice.Tensor(%drop.0, 1, 2, 9223372036854775807)  # forward |  | model.py:14
%sum: f32[] = aten.sum.dim_IntList(%slice, [0, 1], dtype=<dtype float32>, keep=None, name="a \\"b\\"")  # forward |  |
%kept: f32[] = aten.neg.default(%sum, generator=<generator generator blocks.0.noise>) mark keep "a \\"b\\" # | c"  # forward |  |
%lost: f32[] = aten.neg.default(%kept) mark drop "" replicated  # forward |  |
%none.0: f32[], _ = aten.two.default([%sum, %sum], -1.5e-07, inf)  # backward |  |
output %none.0 = metric "loss"
output %rng1 = random "default"
"""


def test_hand_written_text_means_what_it_says():
    graph = parse_graph(TEXT)
    verify(graph)
    assert graph.nodes[0].is_view and not graph.nodes[1].is_view
    assert graph.nodes[2].rng_in == "rng0" and graph.nodes[2].rng_out == "rng1"
    assert graph.values["slice"] == Value("slice", "f32", (2, 2), (4, 1), "drop.0", 8)
    assert graph.values["slice"].extent_bytes == 4 * (4 + 1 + 1)
    assert graph.nodes[4].kwargs == (("dtype", Const("dtype", "float32")), ("keep", None), ("name", 'a "b"'))
    assert (graph.nodes[5].mark, graph.nodes[5].mark_name, graph.nodes[5].generator) == ("keep", 'a "b" # | c', "generator blocks.0.noise")
    assert (graph.nodes[6].mark, graph.nodes[6].mark_name, graph.nodes[6].generator) == ("drop", "", "default")
    assert [node.replicated for node in graph.nodes] == [False] * 6 + [True, False]
    assert graph.nodes[7].args == ((Ref("sum"), Ref("sum")), -1.5e-07, float("inf"))
    assert graph.nodes[7].outputs[1] is None
    assert (graph.nodes[0].module, graph.nodes[0].source, graph.nodes[7].phase) == ("fc", "model.py:12", "backward")
    assert print_graph(graph) == TEXT


def test_malformed_text_names_line_and_column():
    for line, seen in [
        ("%a: f32[2 = aten.x.default()", "line 2"),
        ("%a: f32[] = aten.x.default(%b", "line 2"),
        ("input %a f32[] = param", "line 2"),
    ]:
        with pytest.raises(UserError, match=seen):
            parse_graph(f"graph g\n{line}\n")


names = st.text(st.sampled_from("abcxyz._019"), min_size=1, max_size=8)
scalars = st.one_of(
    st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(st.sampled_from('ab "\\%#|é'), max_size=6),
    st.sampled_from([Const("dtype", "float32"), Const("device", "cuda:0"), Const("memory_format", "channels_last"), Const("generator", "generator")])
)  # fmt: skip


@st.composite
def graphs(draw) -> Graph:
    """Random well-formed graphs: inputs, nodes over earlier values, views, random states."""
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    inputs, nodes, known = [], [], []
    for k in range(draw(st.integers(1, 3))):
        shape = draw(shapes)
        value = Value(f"{draw(names)}{k}i", draw(st.sampled_from(["f32", "i64", "bool"])), shape, contiguous_strides(shape))
        inputs.append(Input(value, "param", draw(names)))
        known.append(value)
    rng = None
    if draw(st.booleans()):
        rng = "rng0"
        inputs.append(Input(Value("rng0", "rng", (), ()), "random", "default"))
    for k in range(draw(st.integers(0, 6))):
        source = draw(st.sampled_from(known))
        args = (Ref(source.name), *draw(st.lists(scalars, max_size=3)), tuple(draw(st.lists(scalars, max_size=2))))
        shape = draw(shapes)
        view = draw(st.booleans())
        value = (
            Value(f"v{k}", source.dtype, source.shape, source.strides, source.root, source.offset)
            if view
            else Value(f"v{k}", "f32", shape, contiguous_strides(shape))
        )
        after = None
        if rng is not None and not view and draw(st.booleans()):
            after = f"r{k}"
        mark = draw(st.sampled_from(["", "keep", "drop"]))
        kwargs = tuple((key, draw(scalars)) for key in draw(st.lists(st.sampled_from(["a", "dim", "out_dtype"]), unique=True)))
        nodes.append(
            Node(
                "aten.x.default",
                args,
                kwargs,
                (value,),
                draw(st.sampled_from(["forward", "backward"])),
                "m",
                "f.py:1",
                rng if after else None,
                after,
                mark,
                draw(names) if mark == "keep" else "",
            )
        )
        rng = after or rng
        known.append(value)
    return Graph("g", tuple(inputs), tuple(nodes), (Output(known[-1].name, "metric", "loss"),))


@given(graphs())
def test_any_graph_prints_and_parses_back(graph):
    verify(graph)
    assert parse_graph(print_graph(graph)) == graph
