"""A step of one program, small enough to know every byte by hand. x (64, 64) @ w1 (64, 128) -> gelu -> @ w2 (128, 32), all float32."""

import pytest

from packhorse.device.device import Cost, Device
from packhorse.graph.text import parse_graph
from packhorse.graph.verify import verify
from packhorse.mesh import Mesh
from packhorse.planning.persistent import Persistent, like, make_run
from packhorse.planning.plan import Options, Plan, plan_graph

# what a module or a file may be called: nothing of it may reach the page as HTML
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"

# Bytes: h1, g1, dg, dh 32768; h2, e, d2 8192. Alive, [from, till): %h1 [0, 2)  %g1 [1, 3)  %h2 [2, 5)  %e [3, 5) external  %d2 [4, 11)
# %.mirror1.h1 [5, 12)  %.mirror1.g1 [6, 9)  %dg [10, 12)  %dh [11, 14)
TEXT = f"""graph first
input %x: f32[64, 64] = batch "x"
input %w1: f32[64, 128] = param "w1"
input %w2: f32[128, 32] = param "w2"
%h1: f32[64, 128] = aten.mm.default(%x, %w1)  # forward | blocks.0.up | model.py:3
%g1: f32[64, 128] = aten.gelu.default(%h1)  # forward | {EVIL} | model.py:4
%h2: f32[64, 32] = aten.mm.default(%g1, %w2)  # forward | blocks.0.down | model.py:5
%e: f32[64, 32] = aten.flip.default(%h2, [0])  # forward |  | loss.py:9
%d2: f32[64, 32] = aten.mul.Tensor(%h2, %e)  # backward |  | loss.py:9
%.mirror1.h1: f32[64, 128] = aten.mm.default(%x, %w1)  # recompute | blocks.0.up | model.py:3
%.mirror1.g1: f32[64, 128] = aten.gelu.default(%.mirror1.h1)  # recompute | {EVIL} | model.py:4
%.mirror1.t: f32[128, 64]{{1, 128}} @.mirror1.g1+0 = aten.t.default(%.mirror1.g1)  # recompute | blocks.0.down | model.py:5
%dw2: f32[128, 32] = aten.mm.default(%.mirror1.t, %d2)  # backward | blocks.0.down | model.py:5
%t2: f32[32, 128]{{1, 32}} @w2+0 = aten.t.default(%w2)  # backward | blocks.0.down | model.py:5
%dg: f32[64, 128] = aten.mm.default(%d2, %t2)  # backward | blocks.0.down | model.py:5
%dh: f32[64, 128] = aten.gelu_backward.default(%dg, %.mirror1.h1)  # backward | {EVIL} | model.py:4
%tx: f32[64, 64]{{1, 64}} @x+0 = aten.t.default(%x)  # backward | blocks.0.up | model.py:3
%dw1: f32[64, 128] = aten.mm.default(%tx, %dh)  # backward | blocks.0.up | model.py:3
output %dw1 = grad "w1"
output %dw2 = grad "w2"
"""
DEVICE = Device("bench", "one second a call", {}, Cost(fixed_s=1.0))


def plan_by_hand(*, text=TEXT, budget=None, in_place=False, **programs):
    """The plan of the graph; further programs by name, as text. In place makes %g1, %d2 and %dh take storages over."""
    graphs = {name: parse_graph(given) for name, given in {"first": text, **programs}.items()}
    for graph in graphs.values():
        verify(graph)
    values = graphs["first"].values
    run = make_run("param.f32.g0", "parameters", "param", [("w1", values["w1"]), ("w2", values["w2"])])
    persistent = Persistent((run, like(run, "grad.f32.g0", "gradients", "grad")))
    options = Options(recompute="blocks", budget=budget, in_place=in_place, num_micro_batches=2 if "next" in programs else 1)
    planned = {name: plan_graph(graph, persistent, options) for name, graph in graphs.items()}
    everything = sum(p.seconds(DEVICE, Mesh()) for p in planned.values()) - sum(
        DEVICE.seconds(node, p.graph.values) for p in planned.values() for node in p.graph.nodes if node.phase == "recompute"
    )
    return Plan(planned, persistent, options, DEVICE, keep_everything_bytes=400_000, keep_everything_seconds=everything)


@pytest.fixture
def by_hand():
    return plan_by_hand


@pytest.fixture
def evil():
    return EVIL
