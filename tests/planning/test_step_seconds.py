from dataclasses import replace
from types import SimpleNamespace

import pytest

from packhorse.device.device import Cost, Device
from packhorse.device.links import Link
from packhorse.graph.text import parse_graph
from packhorse.mesh import Mesh
from packhorse.planning.step_seconds import StepSeconds, in_words, step_seconds

pytestmark = pytest.mark.pure
BARE = Device("bench", "one second a call", other=Cost(fixed_s=1.0))
LINKED = replace(BARE, host_link=Link(1.0, 100.0), band=(0.5, 2.0))  # 400 bytes take five seconds
TEXT = """graph first
input %x: f32[100] = batch "x"
%a: f32[100] = aten.gelu.default(%x)  # forward | |
%.host.a: f32[100] = packhorse.to_host.default(%a, axis="host", tag="to host a")  # forward | |
%b: f32[100] = aten.gelu.default(%x)  # forward | |
%c: f32[100] = aten.gelu.default(%b)  # forward | |
 = packhorse.wait.default(%a, %.host.a, axis="host", tag="to host a")  # forward | |
"""


def step(device, **times):
    """A step that runs the graph so often: each run takes 1 + max(2, the copy) seconds."""
    planned = {name: SimpleNamespace(graph=parse_graph(TEXT)) for name in times}
    return SimpleNamespace(programs=planned, device=device, options=SimpleNamespace(mesh=Mesh()), times=times.get, seconds=6.0 * sum(times.values()))


def test_sums_over_the_runs_of_a_step():
    found = step_seconds(step(LINKED, agree=0, first=1, next=3))
    assert found == StepSeconds(24.0, {"computation": 12.0, "to host": 20.0}, {"to host": 12.0}) and found.streams == ["to host"]


def test_in_words_with_what_is_hidden():
    total, computation, copies = in_words(step_seconds(step(LINKED, first=1)), LINKED)
    assert " ".join(total.split()) == "step, predicted 6 s (3 to 12) on bench"
    assert computation.split() == ["computation", "3", "s"]
    assert " ".join(copies.split()) == "to host 5 s 3 s of it waited for, 2 s hidden behind computation"


def test_a_device_without_the_link_says_so():
    lines = in_words(StepSeconds(3.0, {"computation": 3.0, "to host": 0.0, "dp": 0.0, "tp": 0.0}, {}), BARE)
    assert [line.split()[0] for line in lines] == ["step,", "computation", "the", "the"]
    assert "has no host_link, so copies to and from the host take no time here" in lines[2]
    assert "has no levels, so collectives beside the computation (dp, tp) take no time here" in lines[3]


def test_nothing_is_said_of_a_step_without_streams_on_a_device_without_links():
    assert in_words(StepSeconds(3.0, {"computation": 3.0}, {}), BARE) == []
