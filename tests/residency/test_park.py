"""Parking changes no bit: graphs whose saved values wait on the host, beside the graphs as they were, whatever waits and whenever.

Slices, which need several ranks, have tests of their own in tests/planning and tests/parallel.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chain_graphs import uniform_chain
from packhorse.capture.capture import capture
from packhorse.capture.dtypes import LONG
from packhorse.device.device import Cost, Device
from packhorse.device.links import Level, Link
from packhorse.graph.ir import Graph, Node, Ref, Value
from packhorse.graph.operators import FROM_HOST, TO_HOST, WAIT, operator
from packhorse.graph.text import parse_graph, print_graph
from packhorse.graph.verify import verify
from packhorse.mesh import Mesh
from packhorse.recompute.facts import facts_of
from packhorse.recompute.mirror import order_of, replay
from packhorse.residency.park import begins_of, park, seconds_by_result
from packhorse.residency.saved import Parked, Residency, Saved, saved_values, slice_of
from packhorse.runtime.kernels import own_slice
from packhorse.runtime.reference import run_graph
from zoo import MODELS, batch_for

pytestmark = pytest.mark.cpu
HOST, SLICE, SLICE_ON_HOST = Parked(False, True), Parked(True, False), Parked(True, True)


def on_host(*names, depth=2):
    return Residency(tuple((name, HOST) for name in names), depth)


def told(graph: Graph) -> list[str]:
    """One line a node: what it makes, its operator, what it reads, its tag."""
    lines = []
    for node in graph.nodes:
        made = " ".join(value.name for value in node.outputs)
        tag = dict(node.kwargs).get("tag")
        lines.append(f"{made} = {node.op.split('.')[1]}({' '.join(node.arg_names())})" + (f" {tag}" if tag else ""))
    return lines


# A second for each node, half a second for a copy.
SLOW = Device("d", "", {}, Cost(1.0), host_link=Link(0.5, 1e30))
SECONDS = {name: 1.0 for name in ("v0", "v1", "v2", "g2", "g1", "g0")}


def test_two_values_by_hand():
    """v0 leaves when v1 is made, at 2, and is gone at 3. v1 leaves at 3, where it is needed again: its copies hide behind nothing. v0 comes back
    while g2 is made."""
    graph = park(uniform_chain(3), on_host("v0", "v1"), SECONDS, SLOW, 1, 0)
    verify(graph)
    assert told(graph) == [
        "v0 = cat(x)",
        "v1 = cat(v0)",
        ".flat.v0 = views(v0)",
        ".host.v0 = to_host(.flat.v0) to host v0",
        "v2 = cat(v1)",
        " = wait(.flat.v0 .host.v0) to host v0",
        ".flat.v1 = views(v1)",
        ".host.v1 = to_host(.flat.v1) to host v1",
        " = wait(.flat.v1 .host.v1) to host v1",
        ".fetched.v1 = from_host(.host.v1) from host v1",
        " = wait(.host.v1 .fetched.v1) from host v1",
        ".fetched.v0 = from_host(.host.v0) from host v0",
        ".back.v1 = views(.fetched.v1)",
        "g2 = cat(v2 .back.v1)",
        " = wait(.host.v0 .fetched.v0) from host v0",
        ".back.v0 = views(.fetched.v0)",
        "g1 = cat(g2 .back.v0)",
        "g0 = cat(g1)",
    ]
    assert {node.phase for node in graph.nodes if node.op == TO_HOST} == {"forward"}
    assert {node.phase for node in graph.nodes if node.op == FROM_HOST} == {"backward"}


def test_a_slice_by_hand():
    """16 elements over three ranks: slices of 6, and 18 of them together. 2 messages and 48 bytes take 2 s: the gather begins two nodes early."""
    device = Device("d", "", {}, Cost(1.0), levels=(Level("box", 3, Link(0.5, 48.0)),))
    graph = park(uniform_chain(3), Residency((("v0", SLICE),)), SECONDS, device, 3, 2)
    verify(graph)
    assert told(graph) == [
        "v0 = cat(x)",
        "v1 = cat(v0)",
        ".flat.v0 = views(v0)",
        ".slice.v0 = own_slice(.flat.v0)",
        ".whole.v0 = all_gather(.slice.v0) gather v0",
        "v2 = cat(v1)",
        "g2 = cat(v2 v1)",
        " = wait(.slice.v0 .whole.v0) gather v0",
        ".back.v0 = views(.whole.v0)",
        "g1 = cat(g2 .back.v0)",
        "g0 = cat(g1)",
    ]
    assert [graph.values[name].shape for name in (".slice.v0", ".whole.v0", ".back.v0")] == [(6,), (18,), (16,)]
    assert dict(graph.nodes[3].kwargs) == {"ranks": 3, "rank": 2}


def test_a_slice_on_the_host_by_hand():
    graph = park(uniform_chain(3), Residency((("v0", SLICE_ON_HOST),)), SECONDS, SLOW, 2, 0)
    verify(graph)
    assert [line for line in told(graph) if ".v0" in line and "cat" not in line] == [
        ".flat.v0 = views(v0)",
        ".slice.v0 = own_slice(.flat.v0)",
        ".host.v0 = to_host(.slice.v0) to host v0",
        " = wait(.slice.v0 .host.v0) to host v0",
        ".fetched.v0 = from_host(.host.v0) from host v0",
        " = wait(.host.v0 .fetched.v0) from host v0",
        ".whole.v0 = all_gather(.fetched.v0) gather v0",
        " = wait(.fetched.v0 .whole.v0) gather v0",
        ".back.v0 = views(.whole.v0)",
    ]
    assert graph.values[".host.v0"].shape == graph.values[".fetched.v0"].shape == (8,)


def test_what_is_not_saved_is_not_parked():
    graph = uniform_chain(3)
    assert park(graph, on_host("v2", "g2", "x", "nothing"), SECONDS, SLOW, 1, 0) is graph


# A value with gaps and a view of it, masks, indices, a number, one that is read by its shape first, one that is read by its shape alone, one of
# which a view is handed out, one that dies in the forward pass.
ODD = """graph first
input %x: f32[3, 4] = batch "x"
%memory: f32[3, 4]{6, 1} = aten.new_empty_strided.default(%x, [3, 4], [6, 1])
%gap: f32[3, 4]{6, 1} = aten.copy.default(%memory, %x)
%half: f32[3, 2]{6, 1} @gap+8 = aten.slice.Tensor(%gap, 1, 2, 4)
%mask: bool[3, 4] = aten.gt.Scalar(%x, 0.0)
%max: f32[3], %index: i64[3] = aten.max.dim(%x, 1)
%total: f32[] = aten.sum.default(%gap)
%shape: f32[3, 4] = aten.tanh.default(%x)
%handed: f32[3, 4] = aten.sin.default(%x)
%part: f32[4] @handed+0 = aten.select.int(%handed, 0, 0)
%loss: f32[] = aten.mul.Tensor(%total, %total)
%none: bool[3, 4] = aten.zeros_like.default(%mask)  # backward |  |
%g0: f32[3, 2] = aten.mul.Tensor(%half, %half)  # backward |  |
%column: i64[3, 1] @index+0 = aten.unsqueeze.default(%index, 1)  # backward |  |
%g1: f32[3, 4] = aten.where.self(%mask, %gap, %handed)  # backward |  |
%g2: f32[3, 1] = aten.gather.default(%g1, 1, %column)  # backward |  |
%zeros: f32[3, 4] = aten.zeros_like.default(%shape)  # backward |  |
%g3: f32[3, 4] = aten.add.Tensor(%zeros, %g1)  # backward |  |
%g4: f32[3, 4] = aten.mul.Tensor(%g3, %total)  # backward |  |
%again: f32[3, 2]{6, 1} @gap+8 = aten.slice.Tensor(%gap, 1, 2, 4)  # backward |  |
%g5: f32[3, 2] = aten.add.Tensor(%again, %g2)  # backward |  |
output %loss = metric "loss"
output %part = buffer "part"
output %g0 = grad "a"
output %g2 = grad "b"
output %g4 = grad "c"
output %g5 = grad "d"
"""


def names(saved: list[Saved]) -> list[str]:
    return [s.value.name for s in saved]


def test_what_is_saved_of_an_odd_graph():
    """Not what is read by its shape alone, not what is handed out, not what the backward pass makes."""
    graph = parse_graph(ODD)
    verify(graph)
    saved = {s.value.name: s for s in saved_values(graph)}
    assert list(saved) == ["gap", "mask", "index", "total"]
    at = {node.outputs[0].name: index for index, node in enumerate(graph.nodes)}
    uses = {"gap": ("total", "g0"), "mask": ("mask", "g1"), "index": ("max", "g2"), "total": ("loss", "g4")}
    assert {name: (s.last, s.first) for name, s in saved.items()} == {name: (at[last], at[first]) for name, (last, first) in uses.items()}


@cache
def model_graph(name: str) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph of a small model's step, and what it reads."""
    torch.manual_seed(0)
    if name == "odd":
        graph = parse_graph(ODD)
        return graph, {"x": torch.randn(3, 4)}
    model = MODELS[name]().train()
    batch = batch_for(model)
    captured = capture(model, batch, None)
    tables = {"param": dict(model.named_parameters()), "buffer": dict(model.named_buffers()), "batch": batch}
    tables["constant"] = {"seed": torch.tensor(1.0), **captured.constants}
    graph = captured.first
    return graph, {i.value.name: tables[i.role][i.target].detach().clone() for i in graph.inputs if i.role != "random"}


@cache
def outcome(name: str) -> dict:
    torch.manual_seed(1)
    return run_graph(*model_graph(name))


def any_device(data) -> Device:
    """Copies that take no time, hide, or never end."""
    return Device("d", "", {}, Cost(1.0), host_link=Link(data.draw(st.sampled_from([0.0, 0.7, 3.0, 1e4])), 1e30))


def check_copies(graph: Graph, depth: int) -> None:
    """Every copy is waited for once, and no more than `depth` in a direction are under way."""
    open_: dict[str, list[str]] = {TO_HOST: [], FROM_HOST: []}
    for node in graph.nodes:
        tag = dict(node.kwargs).get("tag")
        if node.op in open_:
            assert tag not in open_[node.op]
            open_[node.op].append(tag)
            assert len(open_[node.op]) <= depth
        elif node.op == WAIT:
            open_[TO_HOST if tag.startswith("to host") else FROM_HOST].remove(tag)
    assert not any(open_.values())


def check_nothing_is_held(graph: Graph, parked: list[Saved]) -> None:
    """From where its copy has ended, nobody reads a parked value any more, views of it included."""
    gone = {dict(node.kwargs)["tag"]: index for index, node in enumerate(graph.nodes) if node.op == WAIT}
    for s in parked:
        readers = [i for i, node in enumerate(graph.nodes) if not node.is_view and any(graph.values[n].root == s.value.name for n in contents(node))]
        assert max(readers) == gone[f"to host {s.value.name}"]


def contents(node: Node) -> list[str]:
    """What a node reads of more than the shape."""
    unread = {arg.name for position in operator(node.op).unread if isinstance(arg := node.args[position], Ref)}
    return [name for name in node.arg_names() if name not in unread]


@pytest.mark.parametrize("name", ["odd", *MODELS])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_bits_stay_whatever_waits(name, data):
    graph, inputs = model_graph(name)
    random = data.draw(st.randoms(use_true_random=False))
    if name != "odd" and data.draw(st.booleans()):
        counts = {i: random.choice([0, 0, 1, 2]) for i, n in enumerate(graph.nodes) if n.phase == "forward" and not n.is_view}
        graph = replay(graph, order_of(_facts(graph), counts))
    chosen = [s for s in saved_values(graph) if random.random() < 0.6]
    depth, device = data.draw(st.integers(1, 3)), any_device(data)
    parked = park(graph, on_host(*names(chosen), depth=depth), seconds_by_result(graph, device, Mesh()), device, 1, 0)
    verify(parked)
    assert parse_graph(print_graph(parked)) == parked
    check_copies(parked, depth)
    check_nothing_is_held(parked, chosen)
    torch.manual_seed(1)
    found, wanted = run_graph(parked, inputs), outcome(name)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def _facts(graph):
    ends = [(i.role, i.target, i.value) for i in graph.inputs] + [(o.role, o.target, graph.values[o.name]) for o in graph.outputs]
    return facts_of(graph, {(role, target): (f"{role} {target}", 0, value.strides) for role, target, value in ends}, [1.0] * len(graph.nodes))


def test_nothing_of_what_a_step_hands_out_waits():
    for name in MODELS:
        graph, _ = model_graph(name)
        handed = {graph.values[out.name].root for out in graph.outputs if out.role != "random"}
        saved = names(saved_values(graph))
        assert saved and not handed & set(saved)


def test_dtypes_that_wait():
    """What the models save, so that the test of bits has seen them: masks of a byte, indices, numbers."""
    saved = [s.value for name in MODELS for s in saved_values(model_graph(name)[0])]
    assert {"f32", "bool", "i64"} <= {value.dtype for value in saved} and any(value.shape == () for value in saved)
    assert any(operator(n.op).kind == "adopt" for n in model_graph("conv")[0].nodes for v in n.outputs if v in saved), "some are adopted"


def test_a_node_takes_its_seconds_whichever_of_its_results_somebody_wants():
    """A gradient of a convolution whose input needs none has None as its first result."""
    graph = model_graph("conv")[0]
    assert any(node.outputs and node.outputs[0] is None for node in graph.nodes)
    device = Device("d", "", {}, Cost(1.0))
    computed = sum(not node.is_view for node in graph.nodes)
    assert begins_of(graph, seconds_by_result(graph, device, Mesh()))[-1] == computed


@pytest.mark.parametrize("dtype", ["bool", "u8", "i64", "bf16", "f32", "c64"])
@pytest.mark.parametrize("numel, tp", [(1, 1), (1, 4), (3, 4), (8, 4), (9, 4), (13, 3), (5, 8)])
def test_slices_of_all_ranks_are_the_value(dtype, numel, tp):
    """Also where there are fewer elements than ranks; behind the last element there are zeros, the same in every run."""
    value = torch.randint(1, 100, (numel,)).to(LONG[dtype])
    sliced = slice_of(Value("x", dtype, (numel,), (1,)), tp)
    assert sliced.shape == (-(-numel // tp),) and sliced.dtype == dtype
    made = []
    for rank in range(tp):
        made.append(torch.full(sliced.shape, 77).to(LONG[dtype]))
        own_slice([made[-1]], None, value, ranks=tp, rank=rank)
    joined = torch.cat(made)
    assert torch.equal(joined[:numel], value) and not joined[numel:].any()


def test_a_slice_of_a_value_with_gaps_is_of_its_memory():
    gap = parse_graph(ODD).values["gap"]
    assert slice_of(gap, 4).shape == (4,)  # of 6 + 6 + 4 elements
    assert Saved(gap, 0, 9, True).waiting_bytes(SLICE, 4) == 64 and Saved(gap, 0, 9, True).waiting_bytes(HOST, 4) == 0
