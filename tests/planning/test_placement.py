"""Homes of values on graphs small enough to work out by hand, and random graphs against the oracle."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value, contiguous_strides
from packhorse.graph.own_outputs import own_outputs
from packhorse.graph.text import parse_graph
from packhorse.graph.verify import verify
from packhorse.planning.persistent import Persistent, make_run
from packhorse.planning.placement import place
from packhorse.planning.plan import Options, plan_graph
from packhorse.program.check import check_program
from packhorse.program.lower import lower
from packhorse.runtime.arena import Arena
from packhorse.runtime.executor import BoundProgram
from packhorse.runtime.reference import run_graph
from packhorse.runtime.storage import allocate, views

pytestmark = pytest.mark.cpu


def homes(text, places, in_place=True):
    graph = parse_graph(text)
    verify(graph)
    return place(graph, places, in_place)


W = 'input %w: f32[16] = param "w"\n'
PLACES = {("param", "w"): ("p", 0, (1,)), ("grad", "w"): ("g", 64, (1,)), ("buffer", "b"): ("b", 0, (1,))}


def test_a_result_takes_over_an_argument_that_dies_and_an_output_goes_straight_home():
    text = (
        f"graph g\n{W}%a: f32[16] = aten.exp.default(%w)  # forward\n%b: f32[16] = aten.tanh.default(%a)  # forward\n"
        '%c: f32[16] = aten.{}(%b, %w)  # backward\noutput %c = grad "w"\n'
    )
    found = homes(text.format("mm.default"), PLACES)
    assert [(s.name, s.space, s.lower, s.upper, s.roots) for s in found.storages] == [("a", "arena", 0, 3, ("a", "b"))]
    assert (found.homes["c"].space, found.homes["c"].key, found.homes["c"].offset) == ("persistent", "g", 64)
    assert not found.copies
    # what the output may take over is made there too, and so on, where the program finds nothing of worth
    found = homes(text.format("mul.Tensor"), PLACES)
    assert not found.storages and not found.copies
    assert {(found.homes[name].key, found.homes[name].offset) for name in "abc"} == {("g", 64)}
    assert [s.roots for s in homes(text.format("mul.Tensor"), PLACES, in_place=False).storages] == [("a",), ("b",)]


def test_an_argument_that_lives_on_is_not_taken_over():
    text = (
        f"graph g\n{W}%a: f32[16] = aten.exp.default(%w)  # forward\n%b: f32[16] = aten.tanh.default(%a)  # forward\n"
        '%c: f32[16] = aten.mul.Tensor(%b, %a)  # backward\n%d: f32[16] = aten.mm.default(%c, %w)  # backward\noutput %d = grad "w"\n'
    )
    assert {s.roots for s in homes(text, PLACES).storages} == {("a",), ("b", "c")}
    assert {s.roots for s in homes(text, PLACES, in_place=False).storages} == {("a",), ("b",), ("c",)}


def test_a_view_or_another_layout_of_the_argument_forbids_taking_over():
    for second in ("%v: f32[16] @a+0 = aten.flip.default(%a)", "%v: f32[4, 4] @a+0 = aten.view.default(%a)"):
        text = f"graph g\n{W}%a: f32[16] = aten.exp.default(%w)  # forward\n{second}  # forward\n"
        text += '%c: f32[16] = aten.mul.Tensor(%a, %v)  # backward\noutput %c = grad "w"\n'
        found = homes(text.replace('output %c = grad "w"', '%d: f32[16] = aten.mm.default(%c, %c)  # backward\noutput %d = grad "w"'), PLACES)
        taken = any(s.roots == ("a", "c") for s in found.storages)
        assert taken == (second.startswith("%v: f32[16]"))  # a view with the very same layout is the same bytes; another shape is not


def test_an_old_value_that_is_read_later_is_copied_over_at_its_last_read():
    found = homes(
        'graph g\ninput %b: f32[16] = buffer "b"\n%n: f32[16] = aten.exp.default(%b)  # forward\n%m: f32[16] = aten.mm.default(%n, %n)  # forward\n'
        '%o: f32[16] = aten.mm.default(%b, %m)  # forward\noutput %n = buffer "b"\noutput %o = grad "w"\n',
        PLACES,
    )
    assert [(c.time, c.name, c.home.key) for c in found.copies] == [(2, "n", "b")]


def test_an_old_value_may_be_overwritten_by_an_elementwise_successor():
    found = homes('graph g\ninput %b: f32[16] = buffer "b"\n%n: f32[16] = aten.exp.default(%b)  # forward\noutput %n = buffer "b"\n', PLACES)
    assert not found.copies and found.homes["n"] == found.homes["b"]


def test_an_adopted_output_is_copied_home_at_once_and_let_go():
    found = homes(
        f'graph g\n{W}%a: f32[16] = aten.unknown.default(%w)  # backward\n%c: f32[16] = aten.exp.default(%w)  # backward\noutput %a = grad "w"\n',
        PLACES,
    )
    slot = next(s for s in found.storages if s.space == "external")
    assert (slot.lower, slot.upper) == (0, 1)
    assert [(c.time, c.name) for c in found.copies] == [(0, "a")]


# -- random graphs ------------------------------------------------------------------------------------------------------------------------

N = 4


@dataclass
class Maker:
    """Random graphs over (N, N) matrices: elementwise operators, products, views, an operator that adopts, outputs and buffers in any order."""

    draw: object

    def build(self) -> Graph:
        draw = self.draw
        square = contiguous_strides((N, N))
        inputs = [Input(Value(n, "f32", (N, N), square), role, n) for n, role in [("w", "param"), ("b0", "buffer"), ("b1", "buffer")]]
        known = [i.value for i in inputs]
        nodes = []
        for k in range(draw(st.integers(1, 14))):
            a, b = draw(st.sampled_from(known)), draw(st.sampled_from(known))
            kind = draw(st.sampled_from(["add", "mul", "tanh", "exp", "mm", "t", "slice", "softmax", "cumsum", "clone", "relu"]))
            nodes.append(self.node(kind, f"v{k}", a, b))
            known.append(nodes[-1].outputs[0])
        whole = [v for v in known if v.shape == (N, N)]
        outputs = [Output(draw(st.sampled_from(whole)).name, "grad", f"g{k}") for k in range(draw(st.integers(0, 3)))]
        outputs += [Output(draw(st.sampled_from(whole)).name, "buffer", n) for n in draw(st.lists(st.sampled_from(["b0", "b1"]), unique=True))]
        return Graph("random", tuple(inputs), tuple(nodes), tuple(outputs))

    def node(self, kind: str, name: str, a: Value, b: Value) -> Node:
        full = a.shape == (N, N)
        if kind == "t" and full:
            return Node("aten.t.default", (Ref(a.name),), (), (Value(name, "f32", (N, N), a.strides[::-1], a.root, a.offset),))
        if kind == "slice" and full:
            value = Value(name, "f32", (2, N), a.strides, a.root, a.offset + 4 * a.strides[0])
            return Node("aten.slice.Tensor", (Ref(a.name), 0, 1, 3), (), (value,))
        result = Value(name, "f32", a.shape, contiguous_strides(a.shape))
        if kind == "mm" and b.shape == (N, N):
            return Node("aten.mm.default", (Ref(a.name), Ref(b.name)), (), (result,))
        if kind in ("add", "mul") and a.shape == b.shape:
            return Node(f"aten.{kind}.Tensor", (Ref(a.name), Ref(b.name)), (), (result,))
        if kind == "softmax":
            return Node("aten._softmax.default", (Ref(a.name), -1, False), (), (result,))
        if kind == "cumsum":
            return Node("aten.cumsum.default", (Ref(a.name), 0), (), (result,))
        kind = kind if kind in ("tanh", "exp", "relu", "clone") else "neg"
        return Node(f"aten.{kind}.default", (Ref(a.name),), (), (result,))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.booleans(), st.booleans())
def test_random_graphs_run_as_the_oracle_does(data, in_place, share):
    graph = own_outputs(Maker(data.draw).build())
    verify(graph)
    square = Value("", "f32", (N, N), contiguous_strides((N, N)))
    runs = [make_run("p", "parameters", "param", [("w", square)]), make_run("b", "buffers", "buffer", [("b0", square), ("b1", square)])]
    runs.append(make_run("g", "gradients", "grad", [(f"g{k}", square) for k in range(3)]))
    persistent = Persistent(tuple(runs))
    planned = plan_graph(graph, persistent, Options(in_place=in_place, share=share))
    program = lower(planned)
    check_program(program, {run.name: run.num_bytes for run in persistent.runs})
    memory = allocate(persistent, torch.device("cpu"))
    torch.manual_seed(0)
    given_tensors = {n: torch.randn(N, N) for n in ("w", "b0", "b1")}
    views(persistent, memory, "param")["w"].copy_(given_tensors["w"])
    for n in ("b0", "b1"):
        views(persistent, memory, "buffer")[n].copy_(given_tensors[n])
    wanted = run_graph(graph, given_tensors)
    BoundProgram(program, Arena(planned.arena_bytes, torch.device("cpu")), memory, []).run({})
    for (role, target), tensor in wanted.items():
        assert torch.equal(views(persistent, memory, role)[target].nan_to_num(), tensor.nan_to_num()), (role, target)


def test_a_kernel_that_updates_in_place_works_on_a_copy_unless_its_argument_becomes_the_result():
    text = (
        'graph g\ninput %x: f32[2, 4] = batch "x"\ninput %b: f32[4] = buffer "b"\ninput %v: f32[4] = buffer "v"\n'
        "%o: f32[2, 4], %m: f32[4], %i: f32[4], %nb: f32[4], %nv: f32[4] = "
        "aten._native_batch_norm_legit_functional.default(%x, None, None, %b, %v, True, 0.1, 1e-05)  # forward\n"
        'output %nb = buffer "TARGET"\noutput %nv = buffer "v"\n'
    )
    places = {("buffer", name): (name, 0, (1,)) for name in ("b", "v", "other")}
    same = homes(text.replace("TARGET", "b"), places)
    assert same.homes["nb"] == same.homes["b"] and not same.copies
    elsewhere = homes(text.replace("TARGET", "other"), places)
    assert elsewhere.homes["nb"].key == "other" and elsewhere.homes["nv"] == elsewhere.homes["v"]  # b itself stays as it is
