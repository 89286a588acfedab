"""Absences worked out by hand, and what holds of all of them. Nodes take a second each where nothing else is said."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.device.device import Device
from packhorse.device.links import Level, Link
from packhorse.graph.ir import Value
from packhorse.residency.saved import Parked, Saved, slice_of
from packhorse.residency.schedule import Absence, Pace, absences, leaving_order, pace_of, returning_order

pytestmark = pytest.mark.pure
HOST, SLICE, SLICE_ON_HOST = Parked(False, True), Parked(True, False), Parked(True, True)
TEN = [float(k) for k in range(11)]  # ten nodes: five forward, five backward


def saved(name, last, first):
    return Saved(Value(name, "u8", (64,), (1,)), last, first, True)


def away(values, how, depth=2, copy_s=0.0, gather_s=0.0, begins=TEN):
    return absences(values, {s.value.name: how for s in values}, depth, begins, Pace(2, lambda value: copy_s, lambda value: gather_s))


def test_a_link_that_is_faster_than_the_computation():
    """Half a second: it leaves at 1 and is gone when the second node after that begins; half a second before 9 is inside of node 8."""
    assert away([saved("a", 0, 9)], HOST, copy_s=0.5) == {"a": Absence(gone=2, fetch=8, fetched=9, whole=8, back=9)}


def test_without_a_link_time_it_is_gone_at_once_and_back_when_it_is_used():
    assert away([saved("a", 0, 9)], HOST) == {"a": Absence(1, 9, 9, 9, 9)}


THREE = [saved("a", 0, 9), saved("b", 1, 8), saved("c", 2, 7)]


def test_a_link_that_is_slower_one_copy_at_a_time():
    """Three seconds. The next copy waits for the one before it: a is gone where b leaves, b where c does. c would be gone at 4 + 3 + 3 = 10, after
    it is needed. Back: c needs to begin at 9 - 3 * 3 = 0 and cannot before it is gone; b behind it; a when b is there."""
    assert away(THREE, HOST, depth=1, copy_s=3.0) == {"a": Absence(2, 8, 9, 8, 9), "b": Absence(3, 7, 8, 7, 8), "c": Absence(7, 7, 7, 7, 7)}


def test_a_link_that_is_slower_two_copies_at_a_time():
    """a may take until c leaves, b until 4 + 3 = 7. b begins with c, and a, which may be third, when c is there."""
    assert away(THREE, HOST, depth=2, copy_s=3.0) == {"a": Absence(3, 7, 9, 7, 9), "b": Absence(7, 7, 8, 7, 8), "c": Absence(7, 7, 7, 7, 7)}


def test_copies_back_in_a_row_begin_early_enough_for_all_of_them():
    """A second and a half each, used at 9, 10 and 11 of twelve nodes: the last begins at 9.5, the one before at 8, the first at 6.5."""
    values = [saved("a", 0, 11), saved("b", 1, 10), saved("c", 2, 9)]
    found = away(values, HOST, depth=4, copy_s=1.5, begins=[float(k) for k in range(13)])
    assert [(found[name].fetch, found[name].fetched) for name in "cba"] == [(6, 9), (8, 10), (9, 11)]


def test_a_slice_is_left_at_once_and_gathered_in_time():
    """Two and a half seconds before 9 are inside of node 6."""
    assert away([saved("a", 0, 9)], SLICE, gather_s=2.5) == {"a": Absence(gone=1, fetch=6, fetched=6, whole=6, back=9)}
    assert away([saved("a", 0, 9)], SLICE) == {"a": Absence(1, 9, 9, 9, 9)}


def test_a_slice_on_the_host_is_fetched_before_it_is_gathered():
    """The gather begins at 6, and the copy half a second before that."""
    assert away([saved("a", 0, 9)], SLICE_ON_HOST, copy_s=0.5, gather_s=2.5) == {"a": Absence(gone=2, fetch=5, fetched=6, whole=6, back=9)}


def test_only_what_is_parked_is_away():
    found = absences(THREE, {"b": HOST}, 1, TEN, Pace(1, lambda value: 3.0, lambda value: 0.0))
    assert found == {"b": Absence(5, 5, 8, 5, 8)}


def test_what_copies_and_gathers_take():
    """Ten floats over four ranks: slices of three. To the host 3 s and 4 bytes a second; between ranks 1 s a message and 2 bytes a second."""
    value = Value("a", "f32", (2, 5), (5, 1))
    pace = pace_of(Device("d", "", levels=(Level("box", 4, Link(1.0, 2.0)),), host_link=Link(3.0, 4.0)), 4)
    s = Saved(value, 0, 9, True)
    assert slice_of(value, 4).shape == (3,)
    assert pace.copy_s(pace.leaving(s, HOST)) == 3 + 40 / 4 and pace.copy_s(pace.leaving(s, SLICE_ON_HOST)) == 3 + 12 / 4
    assert pace.gather_s(value) == 3 * 1 + 3 * 12 / 2
    bare = pace_of(Device("d", ""), 4)
    assert bare.copy_s(value) == bare.gather_s(value) == 0


@dataclass(frozen=True)
class Problem:
    saved: list
    parked: dict
    depth: int
    begins: list
    pivot: int
    pace: Pace

    @property
    def away(self):
        return absences(self.saved, self.parked, self.depth, self.begins, self.pace)


@st.composite
def problems(draw):
    """Any values of any nodes, any seconds; some nodes (views) take none."""
    forward, backward = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    seconds = st.sampled_from([0.0, 0.25, 1.0, 3.0])
    begins = [0.0]
    for took in draw(st.lists(seconds, min_size=forward + backward, max_size=forward + backward)):
        begins.append(begins[-1] + took)
    values, parked = [], {}
    for number in range(draw(st.integers(1, 6))):
        name = f"v{number}"
        values.append(saved(name, draw(st.integers(0, forward - 1)), draw(st.integers(forward, forward + backward - 1))))
        parked[name] = draw(st.sampled_from([HOST, SLICE, SLICE_ON_HOST]))
    copies = {name: draw(st.sampled_from([0.0, 0.5, 1.0, 2.5, 40.0])) for name in parked}
    gathers = {name: draw(st.sampled_from([0.0, 0.5, 2.0, 40.0])) for name in parked}
    pace = Pace(2, lambda value: copies[value.name.removeprefix(".slice.")], lambda value: gathers[value.name])
    return Problem(values, parked, draw(st.integers(1, 3)), begins, forward, pace)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_away_between_the_last_use_and_the_first(problem):
    found = problem.away
    assert found.keys() == problem.parked.keys()
    for s in problem.saved:
        how, a = problem.parked[s.value.name], found[s.value.name]
        assert s.last < a.gone <= a.fetch <= a.fetched <= a.back == s.first < len(problem.begins) - 1
        assert a.whole == (a.fetched if how.shard else a.fetch) <= a.back
        assert how.host or (a.gone == s.last + 1 and a.fetch == a.fetched)
        assert how.shard or a.fetched == a.back


@settings(max_examples=300, deadline=None)
@given(problems())
def test_never_more_under_way_than_the_depth(problem):
    """In each direction, and in the order in which they were started: what a queue that works in that order needs not to hold anybody up."""
    found = problem.away
    on_host = [s for s in problem.saved if problem.parked[s.value.name].host]
    to_host = [(s.last + 1, found[s.value.name].gone) for s in sorted(on_host, key=leaving_order)]
    back = [(found[s.value.name].fetch, found[s.value.name].fetched) for s in sorted(on_host, key=returning_order)]
    for direction in (to_host, back):
        starts = [start for start, _ in direction]
        assert starts == sorted(starts)
        for k, start in enumerate(starts):
            # one that is waited for where another begins, is waited for first
            assert sum(end > start for _, end in direction[:k]) < problem.depth


@settings(max_examples=300, deadline=None)
@given(problems())
def test_a_fast_link_holds_nobody_up(problem):
    """Where a copy to the host is waited for it has ended, if copies may queue and those before it did not come too late: as plain arithmetic."""
    found = absences(problem.saved, problem.parked, len(problem.saved), problem.begins, problem.pace)
    free = 0.0
    for s in sorted(problem.saved, key=leaving_order):
        how = problem.parked[s.value.name]
        if how.host:
            free = max(free, problem.begins[s.last + 1]) + problem.pace.copy_s(problem.pace.leaving(s, how))
            waits_at = found[s.value.name].gone
            assert problem.begins[waits_at] >= free or waits_at == s.first
            # and no later than it has to be
            assert waits_at == s.last + 1 or problem.begins[waits_at - 1] < free
