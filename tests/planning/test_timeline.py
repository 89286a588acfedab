"""Runs worked out by hand. A node of computation takes as many seconds as its result has bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.device.device import Cost, Device
from packhorse.device.links import Level, Link
from packhorse.errors import UserError
from packhorse.graph.ir import Graph, Input, Node, Ref, Value
from packhorse.graph.operators import ALL_GATHER, ALL_REDUCE, FROM_HOST, TENSOR_GATHER, TENSOR_SUM, TO_HOST, WAIT
from packhorse.mesh import Mesh
from packhorse.planning.timeline import COMPUTATION, Event, seconds_beside, timeline

pytestmark = pytest.mark.pure
# inside a box of 4 a message takes 1 s and a byte 0.5 s, beyond it 10 s and 2 s; to the host 3 s and 0.25 s
LINKED = Device("d", "", {}, Cost(0.0, 1.0), levels=(Level("box", 4, Link(1.0, 2.0)), Level("net", 64, Link(10.0, 0.5))), host_link=Link(3.0, 4.0))
BARE = Device("d", "", {}, Cost(0.0, 1.0))
MESH = Mesh(dp=2, tp=4)


def flat(name, num_bytes):
    return Value(name, "u8", (num_bytes,), (1,))


class Line:
    """A graph, node by node. `x` is its input, of 8 bytes."""

    def __init__(self):
        self.nodes = []

    def work(self, seconds):
        """Fills memory: nothing is read."""
        return self.add("aten.full.default", (), flat(f"w{len(self.nodes)}", seconds))

    def add(self, op, args, *outputs, **kwargs):
        self.nodes.append(Node(op, tuple(Ref(arg) for arg in args), tuple(kwargs.items()), outputs))
        return self

    def gather(self, tag, axis, ranks, num_bytes=8):
        """Sends x to each of the other ranks."""
        return self.add(ALL_GATHER, ("x",), flat(tag, num_bytes * ranks), axis=axis, ranks=ranks, rank=0, tag=tag)

    def copy(self, op, tag, num_bytes):
        return self.add(op, ("x",), flat(tag, num_bytes), axis="host", tag=tag)

    def wait(self, tag, axis):
        return self.add(WAIT, (), axis=axis, tag=tag)

    @property
    def graph(self):
        return Graph("line", (Input(flat("x", 8), "batch", "x"),), tuple(self.nodes), ())


def run(line, device=LINKED, mesh=MESH):
    return timeline(line.graph, device, mesh)


def test_a_gather_hides_behind_the_computation():
    """tp: 3 messages and 3 * 8 bytes in the box, 3 + 12 = 15 s."""
    found = run(Line().work(5).gather("g", "tp", 4).work(20).wait("g", "tp").work(1))
    assert found.seconds == 26 and found.stalls == {} and found.busy == {COMPUTATION: 26, "tp": 15}
    assert found.events == (Event("tp", "g", 1, 5, 20),) and found.positions == (0, 5, 5, 25, 25)


def test_a_wait_holds_the_computation_up():
    found = run(Line().work(5).gather("g", "tp", 4).work(4).wait("g", "tp").work(1))
    assert found.seconds == 21 and found.stalls == {"tp": 11} and found.positions == (0, 5, 5, 9, 20)


def test_one_axis_is_one_queue_and_two_are_two():
    """dp reaches over both boxes: 1 message and 8 bytes over the net, 10 + 16 = 26 s. Two of them end at 52, one over tp meanwhile at 15."""
    line = Line().gather("a", "dp", 2).gather("b", "dp", 2).gather("c", "tp", 4).wait("c", "tp").work(7).wait("b", "dp")
    found = run(line)
    assert found.events == (Event("dp", "a", 0, 0, 26), Event("dp", "b", 1, 26, 52), Event("tp", "c", 2, 0, 15))
    assert found.stalls == {"tp": 15, "dp": 52 - 22} and found.seconds == 52 and found.busy == {COMPUTATION: 7, "tp": 15, "dp": 52}


def test_copies_run_in_both_directions_at_once():
    """8 bytes take 3 + 2 = 5 s. Two to the host end at 5 and 10; one back begins at 1 and ends at 6; a tag may occur in both directions."""
    line = Line().copy(TO_HOST, "a", 8).copy(TO_HOST, "b", 8).work(1).copy(FROM_HOST, "c", 8).wait("c", "host").wait("b", "host")
    found = run(line)
    spans = [(event.stream, event.begin_s, event.end_s) for event in found.events]
    assert spans == [("to host", 0, 5), ("to host", 5, 10), ("from host", 1, 6)]
    assert found.stalls == {"from host": 5, "to host": 4} and found.seconds == 10


def test_a_tensor_collective_is_waited_for_at_once_behind_what_is_queued():
    """A gather over tp until 15; the sum of 8 bytes over 4 ranks sends 6 to be summed and 6 of sums, in 6 messages: 6 + 6 = 12 s."""
    line = Line().gather("g", "tp", 4).work(2).add(TENSOR_SUM, ("x",), flat("s", 8), axis="tp", ranks=4, rank=0, tag="s").work(1).wait("g", "tp")
    found = run(line)
    assert found.events[1] == Event("tp", "s", 2, 15, 27) and found.stalls == {"tp": 25} and found.seconds == 28
    gathered = Node(TENSOR_GATHER, (Ref("x"),), (("axis", "tp"), ("ranks", 4), ("rank", 0), ("tag", "t")), (flat("t", 32),))
    assert seconds_beside(gathered, line.graph, LINKED, MESH) == 15


def test_an_all_reduce_has_two_rounds():
    """Two dp ranks: half of 8 bytes goes each way in each round, 2 messages of 10 s and 8 bytes of 2 s."""
    kwargs = {"axis": "dp", "ranks": 2, "rank": 0, "tag": "r", "offsets": (0,), "shard": 4}
    line = Line().add(f"{ALL_REDUCE}1", ("x",), flat("r", 8), **kwargs).wait("r", "dp")
    assert run(line).seconds == 2 * 10 + 8 * 2


def test_the_world_may_reach_over_more_than_tp_does():
    inside, beyond = Mesh(dp=1, tp=4), Mesh(dp=2, tp=4)
    assert run(Line().gather("g", "world", 4).wait("g", "world"), mesh=inside).seconds == 3 + 12
    assert run(Line().gather("g", "world", 8).wait("g", "world"), mesh=beyond).seconds == 7 * 10 + 7 * 8 * 2


def test_what_nobody_waits_for_ends_too():
    assert run(Line().work(2).gather("g", "tp", 4).work(1)).seconds == 17


def test_without_links_everything_beside_is_free():
    line = Line().work(5).gather("g", "tp", 4).copy(TO_HOST, "a", 8).wait("g", "tp").wait("a", "host").work(1)
    assert run(line, BARE).seconds == 6
    # as ever, a tensor collective then counts as an operator: 8 bytes in, 8 out
    summed = Line().add(TENSOR_SUM, ("x",), flat("s", 8), axis="tp", ranks=4, rank=0, tag="s")
    assert run(summed, BARE).seconds == 16 and run(summed, BARE).events == ()


def test_a_mesh_that_is_too_large_for_the_machine():
    with pytest.raises(UserError, match="joins at most 64 ranks"):
        run(Line().gather("g", "dp", 32), mesh=Mesh(dp=32, tp=4))


def test_nothing_takes_no_time():
    found = run(Line())
    assert found.seconds == 0 and found.positions == () and found.busy == {COMPUTATION: 0}


@st.composite
def lines(draw):
    """Computation, starts and waits in any order that a program may have."""
    line, started = Line(), []
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["work", "gather", "copy", "sum", "wait"]))
        if kind == "work":
            line.work(draw(st.integers(1, 40)))
        elif kind == "gather":
            axis = draw(st.sampled_from(["dp", "tp", "world"]))
            line.gather(f"{number}", axis, {"dp": 2, "tp": 4, "world": 8}[axis])
            started.append((f"{number}", axis))
        elif kind == "copy":
            line.copy(draw(st.sampled_from([TO_HOST, FROM_HOST])), f"{number}", draw(st.integers(1, 99)))
            started.append((f"{number}", "host"))
        elif kind == "sum":
            line.add(TENSOR_SUM, ("x",), flat(f"{number}", 8), axis="tp", ranks=4, rank=0, tag=f"{number}")
        elif started:
            line.wait(*started.pop(draw(st.integers(0, len(started) - 1))))
    return line


@given(lines())
def test_a_run_is_as_long_as_its_longest_stream_and_no_longer_than_all_in_turn(line):
    found, alone = run(line), sum(LINKED.seconds(node, line.graph.values) for node in line.graph.nodes)
    assert found.busy[COMPUTATION] == alone
    assert max(found.busy.values()) <= found.seconds <= sum(found.busy.values())
    assert found.seconds >= alone + sum(found.stalls.values())
    for event, later in zip(found.events, found.events[1:]):
        assert event.begin_s <= event.end_s
        assert all(event.end_s <= other.begin_s for other in found.events[found.events.index(later) :] if other.stream == event.stream)
    assert list(found.positions) == sorted(found.positions)


@given(lines())
def test_without_links_a_run_is_the_sum_of_its_nodes(line):
    assert run(line, BARE).seconds == sum(BARE.seconds(node, line.graph.values) for node in line.graph.nodes)
