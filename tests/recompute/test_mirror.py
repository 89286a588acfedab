"""Mirrors: Algorithm 2 worked out by hand and by a literal reading of the paper; graphs with mirrors compute the same bits."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import packhorse as ph
from chain_graphs import facts, node, uniform_chain
from packhorse.capture.capture import capture
from packhorse.graph.ir import Graph, Input, Output, Value
from packhorse.graph.verify import verify
from packhorse.recompute.mirror import RANDOM_STATE_BYTES, order_of, replay
from packhorse.runtime.reference import run_graph

pytestmark = pytest.mark.cpu


def names(graph: Graph, order: tuple[int, ...]) -> str:
    return " ".join(graph.nodes[index].outputs[0].name for index in order)


def test_one_segment_is_mirrored_just_before_its_first_gradient():
    """v1, v2 dropped: they come back before g3, which reads v2, and not before."""
    graph = uniform_chain(5)
    assert names(graph, order_of(facts(graph), {1: 1, 2: 1})) == "v0 v1 v2 v3 v4 g4 v1 v2 g3 g2 g1 g0"


def test_recursion_with_counts_above_one():
    """m = 2 for v1: it runs on the way to v2 (first mirror of both), and again when g2 wants it."""
    graph = uniform_chain(4)
    order = order_of(facts(graph), {0: 0, 1: 2, 2: 1})
    assert names(graph, order) == "v0 v1 v2 v3 v1 v2 g3 v1 g2 g1 g0"


def test_counts_are_as_far_as_needed_only():
    """Nobody in the backward pass reads v3's value but g4 through v3 itself: with v2 kept, v3 alone comes back."""
    graph = uniform_chain(5)
    assert names(graph, order_of(facts(graph), {3: 1})) == "v0 v1 v2 v3 v4 v3 g4 g3 g2 g1 g0"


def algorithm_2(graph: Graph, counts: dict[int, int]) -> list[tuple[str, int]]:
    """The paper's pseudo code on the forward and backward nodes of a graph: (name, mirror), in the order of V'."""
    maker = {v.name: i for i, n in enumerate(graph.nodes) for v in n.outputs}
    forward = [i for i, n in enumerate(graph.nodes) if n.phase == "forward"]
    newest = {i: (i, 0) for i in forward}
    pred: dict[tuple[int, int], list[tuple[int, int]]] = {}
    topological = []
    for k in range(max(counts.values(), default=0) + 1):
        for v in forward:
            if k <= counts.get(v, 0):
                newest[v] = (v, k)
                pred[v, k] = [newest[maker[a]] for a in graph.nodes[v].arg_names() if a in maker]
                topological.append((v, k))
    done = [(v, 0) for v in forward]
    for i, n in enumerate(graph.nodes):
        if n.phase == "forward":
            continue
        ancestors, stack = set(), [newest[maker[a]] for a in n.arg_names() if a in maker and maker[a] in newest]
        while stack:
            item = stack.pop()
            if item not in ancestors:
                ancestors.add(item)
                stack += pred[item]
        done += [item for item in topological if item in ancestors and item not in done]
        done.append((i, 0))
    return [(graph.nodes[i].outputs[0].name, k) for i, k in done]


@st.composite
def dags(draw) -> Graph:
    n = draw(st.integers(2, 7))
    reads = [[f"v{i}" for i in sorted(draw(st.sets(st.integers(0, k - 1), max_size=3)))] if k else [] for k in range(n)]
    forward = [node(f"v{k}", reads[k] or ["x"]) for k in range(n)]
    backward = [
        node(f"g{k}", [f"g{k + 1}"] * (k < n - 1) + [f"v{i}" for i in sorted(draw(st.sets(st.integers(0, n - 1), max_size=3)))] or ["x"], "backward")
        for k in range(n - 1, -1, -1)
    ]
    outputs = (Output(f"v{n - 1}", "metric", "loss"), Output("g0", "grad", "w"))
    return Graph("first", (Input(Value("x", "f32", (16,), (1,)), "batch", "x"),), (*forward, *backward), outputs)


@settings(max_examples=150, deadline=None)
@given(dags(), st.data())
def test_any_graph_as_the_paper_says(graph, data):
    """Where no kept value is computed along with a pass (the one addition), the order is the paper's own."""
    known = facts(graph)
    counts = {k: data.draw(st.integers(0, 1)) for k, n in enumerate(graph.nodes) if n.phase == "forward"}
    order = order_of(known, counts)
    seen: dict[int, int] = {}
    ours = []
    for index in order:
        seen[index] = seen.get(index, -1) + 1
        ours.append((graph.nodes[index].outputs[0].name, seen[index]))
    assert [item for item in ours if item[1] or item[0][0] == "g"] == [item for item in algorithm_2(graph, counts) if item[1] or item[0][0] == "g"]


class Mixed(nn.Module):
    """Views, several results, batch norm, dropout, an input used twice, a value that both passes read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x, y):
        x = torch.relu(self.norm(self.conv(x)))
        a, b = nn.functional.max_pool2d(nn.functional.dropout(x, 0.3), 2).flatten(1).chunk(2, 1)
        z = torch.softmax(self.out(a * b.tanh()) + self.out(a), 1)
        return nn.functional.nll_loss(torch.log(z), y)


@pytest.fixture(scope="module")
def mixed():
    torch.manual_seed(0)
    model = Mixed().train()
    batch = {"x": torch.randn(3, 2, 4, 8), "y": torch.tensor([0, 2, 1])}
    graph = capture(model, batch, None).first
    tables = {"param": dict(model.named_parameters()), "buffer": dict(model.named_buffers()), "constant": {"seed": torch.tensor(1.0)}}
    tables["batch"] = {".".join(["", k]).lstrip("."): v for k, v in batch.items()}
    inputs = {i.value.name: tables[i.role][i.target].detach().clone() for i in graph.inputs if i.role != "random"}
    torch.manual_seed(1)
    wanted = run_graph(graph, inputs)
    return graph, inputs, wanted, torch.get_rng_state()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_mirrors_change_no_bit_and_leave_the_generator_where_it_was(mixed, data):
    graph, inputs, wanted, state = mixed
    counts = {i: data.draw(st.integers(0, 3)) for i, n in enumerate(graph.nodes) if n.phase == "forward" and not n.is_view}
    mirrored = replay(graph, order_of(facts_with_places(graph), counts))
    verify(mirrored)
    torch.manual_seed(1)
    found = run_graph(mirrored, inputs)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert torch.equal(torch.get_rng_state(), state)


def facts_with_places(graph):
    from packhorse.recompute.facts import facts_of

    ends = [(i.role, i.target, i.value) for i in graph.inputs] + [(o.role, o.target, graph.values[o.name]) for o in graph.outputs]
    places = {(role, target): (f"{role} {target}", 0, value.strides) for role, target, value in ends}
    return facts_of(graph, places, [1.0] * len(graph.nodes))


def test_a_saved_random_state_is_as_large_as_torchs():
    assert torch.get_rng_state().numel() == RANDOM_STATE_BYTES


def test_batch_norm_moves_its_statistics_once_a_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).train()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 1, 8, 8)
    plan = ph.plan(model, x, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), loss=lambda out, batch: out.mean(), recompute="recursive")
    assert sum(node.phase == "recompute" and "batch_norm" in node.op for node in plan.programs["first"].graph.nodes) >= 2
    ph.compile(model, plan)(x)
    plain(x)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers()))
