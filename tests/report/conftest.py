"""A step of one program, small enough to know every byte by hand. x (64, 64) @ w1 (64, 128) -> gelu -> @ w2 (128, 32), all float32."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from packhorse.device.device import Cost, Device
from packhorse.device.links import Level, Link
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

# One of two tp ranks; %h waits as a slice, %g on the host. Bytes: h, g, dg, dh 32768, slices of them 16384; k, e, d 8192. Alive, [from, till):
# %h [0, 4)  %g [1, 9)  %.slice.h [3, 14)  %k [4, 10)  %.host.g [6, 12)  %e [7, 10)  %d [9, 19)  %.fetched.g [10, 17)  %.whole.h [12, 21)
# %dg [19, 21)  %dh [20, 23)
PARKED = """graph first
input %x: f32[64, 64] = batch "x"
input %w1: f32[64, 128] = param "w1"
input %w2: f32[128, 32] = param "w2"
%h: f32[64, 128] = aten.mm.default(%x, %w1)  # forward | up | m.py:1
%g: f32[64, 128] = aten.gelu.default(%h)  # forward | act | m.py:2
%.flat.h: f32[8192] @h+0 = packhorse.views.default(%h)  # forward | act | m.py:2
%.slice.h: f32[4096] = packhorse.own_slice.default(%.flat.h, ranks=2, rank=0)  # forward | act | m.py:2
%k: f32[64, 32] = aten.mm.default(%g, %w2)  # forward | down | m.py:3
%.flat.g: f32[8192] @g+0 = packhorse.views.default(%g)  # forward | down | m.py:3
%.host.g: f32[8192] = packhorse.to_host.default(%.flat.g, axis="host", tag="to host g")  # forward | down | m.py:3
%e: f32[64, 32] = aten.gelu.default(%k)  # forward | | m.py:4
 = packhorse.wait.default(%.flat.g, %.host.g, axis="host", tag="to host g")  # forward | |
%d: f32[64, 32] = aten.mul.Tensor(%k, %e)  # backward | | m.py:4
%.fetched.g: f32[8192] = packhorse.from_host.default(%.host.g, axis="host", tag="from host g")  # backward | down | m.py:3
 = packhorse.wait.default(%.host.g, %.fetched.g, axis="host", tag="from host g")  # backward | |
%.whole.h: f32[8192] = packhorse.all_gather.default(%.slice.h, axis="tp", ranks=2, rank=0, tag="gather h")  # backward | act | m.py:2
 = packhorse.wait.default(%.slice.h, %.whole.h, axis="tp", tag="gather h")  # backward | |
%.back.g: f32[64, 128] @.fetched.g+0 = packhorse.views.default(%.fetched.g)  # backward | down | m.py:3
%tg: f32[128, 64]{1, 128} @.fetched.g+0 = aten.t.default(%.back.g)  # backward | down | m.py:3
%dw2: f32[128, 32] = aten.mm.default(%tg, %d)  # backward | down | m.py:3
%tw: f32[32, 128]{1, 32} @w2+0 = aten.t.default(%w2)  # backward | down | m.py:3
%dg: f32[64, 128] = aten.mm.default(%d, %tw)  # backward | down | m.py:3
%.back.h: f32[64, 128] @.whole.h+0 = packhorse.views.default(%.whole.h)  # backward | act | m.py:2
%dh: f32[64, 128] = aten.gelu_backward.default(%dg, %.back.h)  # backward | act | m.py:2
%tx: f32[64, 64]{1, 64} @x+0 = aten.t.default(%x)  # backward | up | m.py:1
%dw1: f32[64, 128] = aten.mm.default(%tx, %dh)  # backward | up | m.py:1
output %dw1 = grad "w1"
output %dw2 = grad "w2"
"""
# two seconds a copy of %g, one second the gather of %h
LINKED = replace(DEVICE, host_link=Link(0.0, 16384.0), levels=(Level("pair", 2, Link(0.5, 32768.0)),))


ALONE = Mesh()


def plan_by_hand(*, text=TEXT, budget=None, in_place=False, device=DEVICE, mesh=ALONE, residency="auto", **programs):
    """The plan of the graph; further programs by name, as text. In place makes %g1, %d2 and %dh take storages over."""
    graphs = {name: parse_graph(given) for name, given in {"first": text, **programs}.items()}
    for graph in graphs.values():
        verify(graph)
    values = graphs["first"].values
    run = make_run("param.f32.g0", "parameters", "param", [("w1", values["w1"]), ("w2", values["w2"])])
    persistent = Persistent((run, like(run, "grad.f32.g0", "gradients", "grad")))
    micros = 2 if "next" in programs else 1
    options = Options("blocks", budget, num_micro_batches=micros, in_place=in_place, mesh=mesh, residency=residency)
    planned = {name: plan_graph(graph, persistent, options) for name, graph in graphs.items()}
    everything = sum(p.seconds(device, mesh) for p in planned.values()) - sum(
        device.seconds(node, p.graph.values) for p in planned.values() for node in p.graph.nodes if node.phase == "recompute"
    )
    return Plan(planned, persistent, options, device, keep_everything_bytes=400_000, keep_everything_seconds=everything)


@pytest.fixture
def by_hand():
    return plan_by_hand


@pytest.fixture
def parked():
    """Rank 0 of two tp ranks, with a slice and a value on the host; on a device with links, unless another is given."""
    return lambda device=LINKED, **given: plan_by_hand(text=PARKED, device=device, mesh=Mesh(dp=1, tp=2), residency="offload", **given)


@pytest.fixture
def evil():
    return EVIL


class Reader(HTMLParser):
    """Elements with their attributes, the text of each cell, and everything that would be fetched."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.rows, self.open = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.open = tag

    def handle_data(self, data):
        if self.rows and self.rows[-1] and self.open in ("td", "th", "span"):
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        if tag == "tr":
            self.open = None

    def tags(self):
        return [tag for tag, _ in self.elements]


@pytest.fixture
def reader():
    return Reader
