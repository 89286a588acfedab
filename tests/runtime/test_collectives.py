"""Collectives of one tensor over the axis `tp`, planned and run by ranks that are threads, over gloo itself: sums, bytes sent, memory."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist

import packhorse.parallel.pieces as pieces
from packhorse.capture.dtypes import LONG
from packhorse.graph.text import parse_graph
from packhorse.graph.verify import verify
from packhorse.parallel.volume import sent_bytes
from packhorse.planning.persistent import Persistent, make_run
from packhorse.planning.plan import Options, plan_graph
from packhorse.program.check import check_program
from packhorse.program.lower import lower
from packhorse.runtime.arena import Arena
from packhorse.runtime.executor import BoundProgram
from packhorse.runtime.reference import run_graph
from packhorse.runtime.storage import allocate, views
from packhorse.runtime.transport import Transport
from packhorse.units import align_up

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def groups():
    """Number of ranks -> a process group for each."""
    return {count: on_each(count, partial(dist.ProcessGroupGloo, dist.HashStore(), size=count, timeout=timedelta(seconds=20))) for count in (2, 3, 4)}


def on_each(count, act):
    """What act(rank) returns on each of so many threads."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: act(rank=rank), range(count)))


def graph_of(shape, ranks, rank, dtype):
    """%x is summed up, beside itself and in place, and %z gathered, and summed up in parts; their columns lie one after another in memory."""
    x, z = f"{dtype}[{shape[0]}, {shape[1]}]{{1, {shape[0]}}}", f"{dtype}[6, 4]{{1, 6}}"
    flat, part = f"{dtype}[{24 * ranks}]", f"{dtype}[4, {6 // ranks}]"
    on = f'axis="tp", ranks={ranks}, rank={rank}'
    return parse_graph(f"""graph g
input %x: {x} = param "x"
input %z: {z} = param "z"
%s: {x} = packhorse.tensor_sum.default(%x, {on}, tag="a")  # forward
%d: {x} = aten.neg.default(%s)  # forward
%i: {x} = packhorse.tensor_sum.default(%d, {on}, tag="b")  # forward
%g: {flat} = packhorse.tensor_gather.default(%z, {on}, tag="c")  # forward
%p: {part} = packhorse.tensor_scatter.default(%z, {on}, tag="d")  # forward
%sum: {x} = aten.neg.default(%s)  # forward
%twice: {x} = aten.neg.default(%i)  # forward
%all: {flat} = aten.neg.default(%g)  # forward
%own: {part} = aten.neg.default(%p)  # forward
output %sum = buffer "sum"
output %twice = buffer "twice"
output %all = buffer "all"
output %own = buffer "own"
""")


def planned(shape, ranks, rank, dtype):
    graph = graph_of(shape, ranks, rank, dtype)
    verify(graph)
    inputs = [(name, graph.values[name]) for name in "xz"]
    outputs = [(out.target, graph.values[out.name]) for out in graph.outputs]
    persistent = Persistent((make_run("p", "parameters", "param", inputs), make_run("b", "buffers", "buffer", outputs)))
    plan = plan_graph(graph, persistent, Options())
    program = lower(plan)
    check_program(program, {run.name: run.num_bytes for run in persistent.runs})
    return plan, persistent, program


def in_order(tensors):
    """Their sum, in the order of the ranks."""
    return reduce(torch.add, tensors)


@pytest.mark.parametrize("bucket", [2 << 20, 48])
@pytest.mark.parametrize("dtype", ["f64", "bf16"])
@pytest.mark.parametrize("shape", [(5, 5), (6, 8), (1, 1)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_like_plain_sums(ranks, shape, dtype, bucket, groups, monkeypatch):
    monkeypatch.setattr(pieces, "BUCKET_BYTES", bucket)
    torch.manual_seed(0)
    xs = [torch.randn(shape[::-1]).to(LONG[dtype]).t() for _ in range(ranks)]
    zs = [torch.randn(4, 6).to(LONG[dtype]).t() for _ in range(ranks)]

    def act(rank):
        plan, persistent, program = planned(shape, ranks, rank, dtype)
        memory = allocate(persistent, torch.device("cpu"))
        transport = Transport(groups[ranks][rank], ranks, rank)
        bound = BoundProgram(program, Arena(plan.arena_bytes, torch.device("cpu")), memory, [], axes={"tp": transport})
        bound.run({})  # of other values: what collectives keep of a run is not what they sum up
        for name, given in (("x", xs), ("z", zs)):
            views(persistent, memory, "param")[name].copy_(given[rank])
        assert bound.run({}).arena_bytes == align_up(plan.arena_bytes, 64)
        assert transport.sent_bytes == 2 * sent_bytes(plan.graph)
        for name, given in (("x", xs), ("z", zs)):
            assert torch.equal(views(persistent, memory, "param")[name], given[rank]), "parameters stay as they are"
        return views(persistent, memory, "buffer")

    total = in_order(xs)
    flat = [z.t().reshape(-1) for z in zs]
    for rank, found in enumerate(on_each(ranks, act)):
        assert torch.equal(found["sum"], -total)
        assert torch.equal(found["twice"], -in_order([-total] * ranks))
        assert torch.equal(found["all"], -torch.cat(flat))
        assert torch.equal(found["own"].view(-1), -in_order(flat).view(ranks, -1)[rank])


def test_the_bucket_counts_where_a_rank_sums_up_nothing(groups):
    """9 elements on 4 ranks are 3, 3, 3 and none. The bucket, 3 elements to and from each other rank, is all that the arena holds."""

    def act(rank):
        graph = parse_graph(f"""graph g
input %x: f64[9] = param "x"
%s: f64[9] = packhorse.tensor_sum.default(%x, axis="tp", ranks=4, rank={rank}, tag="a")  # forward
output %s = buffer "s"
""")
        value = graph.values["x"]
        persistent = Persistent((make_run("p", "parameters", "param", [("x", value)]), make_run("b", "buffers", "buffer", [("s", value)])))
        plan = plan_graph(graph, persistent, Options())
        assert plan.arena_bytes == align_up(2 * 3 * 3 * 8, 64)
        transport = Transport(groups[4][rank], 4, rank)
        program = BoundProgram(
            lower(plan), Arena(plan.arena_bytes, torch.device("cpu")), allocate(persistent, torch.device("cpu")), [], None, {"tp": transport}
        )
        assert program.run({}).arena_bytes == align_up(plan.arena_bytes, 64)
        assert transport.sent_bytes == sent_bytes(graph) == 8 * (6 + 9 if rank < 3 else 9)

    on_each(4, act)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_sent(ranks):
    """2 (N - 1) / N of 25 elements where the shards of a sum are even; else each rank sends what others own, and then what it owns."""
    owned = {2: [13, 12], 3: [9, 9, 7]}[ranks]
    for rank, own in enumerate(owned):
        of_sums = 2 * ((25 - own) + own * (ranks - 1))
        of_z = 24 * (ranks - 1) + 24 // ranks * (ranks - 1)
        assert sent_bytes(graph_of((5, 5), ranks, rank, "f32")) == 4 * (of_sums + of_z)


def test_a_sum_is_in_place_where_its_argument_dies():
    _, _, program = planned((6, 8), 2, 0, "f32")
    calls = {dict(c.kwargs)["tag"]: c for c in program.instructions if c.op.startswith("packhorse.tensor_")}
    places = {tag: [(o.space, o.key, o.offset) for o in (call.args[0], call.outputs[0])] for tag, call in calls.items()}
    assert places["b"][0] == places["b"][1] and places["a"][0] != places["a"][1]
    assert [calls[tag].scratch.extent_bytes if calls[tag].scratch else 0 for tag in "abcd"] == [2 * 24 * 4, 2 * 24 * 4, 0, 2 * 12 * 4]


def test_the_oracle_runs_one_rank():
    given = {"x": torch.randn(5, 5).t(), "z": torch.randn(4, 6).t()}
    found = run_graph(graph_of((5, 5), 1, 0, "f32"), given)
    assert torch.equal(found["buffer", "sum"], -given["x"]) and torch.equal(found["buffer", "twice"], given["x"])
    assert torch.equal(found["buffer", "all"], -given["z"].t().reshape(-1)) and torch.equal(found["buffer", "own"], -given["z"].t())
    with pytest.raises(ValueError, match="2 ranks"):
        run_graph(graph_of((5, 5), 2, 0, "f32"), given)
