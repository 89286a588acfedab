"""When saved values leave and come back: pure arithmetic on the times at which nodes begin. No torch.

Places are indices of nodes: what happens "at" one comes just before it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from packhorse.device.device import Device
from packhorse.graph.ir import Value
from packhorse.residency.saved import Parked, Saved, slice_of


@dataclass(frozen=True)
class Absence:
    """gone: where its memory is free (its copy to the host has ended). fetch, fetched: where a copy back begins, and where it is waited for. whole:
    where the memory of all of it is taken again: with `fetch`, or where the all-gather of a slice begins. back: its first use."""

    gone: int
    fetch: int
    fetched: int
    whole: int
    back: int


@dataclass(frozen=True)
class Pace:
    """copy_s: seconds of a copy to the host, or back, of a value; gather_s: of an all-gather of slices of it over the tensor parallel ranks."""

    tp: int
    copy_s: Callable[[Value], float]
    gather_s: Callable[[Value], float]

    def leaving(self, saved: Saved, how: Parked) -> Value:
        """What of a value goes to the host."""
        return slice_of(saved.value, self.tp) if how.shard else saved.value


def pace_of(device: Device, tp: int) -> Pace:
    """As a device file says; without a link copies and gathers take no time."""

    def copy_s(value: Value) -> float:
        return device.host_link.seconds(value.extent_bytes) if device.host_link else 0.0

    def gather_s(value: Value) -> float:
        return device.collective_seconds(slice_of(value, tp).extent_bytes * (tp - 1), tp, tp)

    return Pace(tp, copy_s, gather_s)


def absences(saved: Sequence[Saved], parked: Mapping[str, Parked], depth: int, begins: Sequence[float], pace: Pace) -> dict[str, Absence]:
    """Root -> when it is away, for every saved value that is parked. begins: seconds at which each node begins, and the last one ends.

    A copy to the host begins after the last use in the forward pass, one behind the other, and is waited for when it should have ended. A copy back
    begins just early enough, in the order of use. Of neither are more than `depth` under way.
    """
    those = [s for s in saved if s.value.name in parked]
    gone = _gone(sorted(those, key=leaving_order), parked, depth, begins, pace)
    found: dict[str, Absence] = {}
    order = sorted(those, key=returning_order)
    gathers = {s.value.name: _gather_from(s, parked[s.value.name], begins, pace) for s in order}
    starts = _starts([s for s in order if parked[s.value.name].host], parked, depth, begins, pace, gone, gathers)
    for s in order:
        name = s.value.name
        fetch = starts.get(name, gathers[name])
        whole = max(fetch, gathers[name])
        found[name] = Absence(gone[name], fetch, whole, whole if parked[name].shard else fetch, s.first)
    return found


def leaving_order(saved: Saved) -> tuple:
    """Values in the order in which they leave."""
    return saved.last, saved.value.name


def returning_order(saved: Saved) -> tuple:
    """And in which they come back."""
    return saved.first, saved.last, saved.value.name


def _gone(saved: Sequence[Saved], parked: Mapping[str, Parked], depth: int, begins: Sequence[float], pace: Pace) -> dict[str, int]:
    gone: dict[str, int] = {}
    open_: list[tuple[Saved, int]] = []
    done = 0.0
    for s in saved:
        at, how = s.last + 1, parked[s.value.name]
        if not how.host:
            gone[s.value.name] = at
            continue
        if len(open_) == depth:
            before, due = open_.pop(0)
            gone[before.value.name] = min(due, at)
        done = max(done, begins[at]) + pace.copy_s(pace.leaving(s, how))
        open_.append((s, max(at, bisect_left(begins, done))))
    return gone | {s.value.name: min(due, s.first) for s, due in open_}


def _gather_from(s: Saved, how: Parked, begins: Sequence[float], pace: Pace) -> int:
    """Where the all-gather of a slice begins: early enough to end before the use. The first use itself for what is not cut."""
    took = pace.gather_s(s.value) if how.shard else 0.0
    return max(s.last + 1, min(s.first, bisect_right(begins, begins[s.first] - took) - 1)) if took else s.first


def _starts(
    saved: Sequence[Saved],
    parked: Mapping[str, Parked],
    depth: int,
    begins: Sequence[float],
    pace: Pace,
    gone: Mapping[str, int],
    gathers: Mapping[str, int],
) -> dict[str, int]:
    """Where copies back begin."""
    needed = [gathers[s.value.name] for s in saved]
    latest, due = [0.0] * len(saved), float("inf")
    for k in range(len(saved) - 1, -1, -1):
        due = latest[k] = min(due, begins[needed[k]]) - pace.copy_s(pace.leaving(saved[k], parked[saved[k].value.name]))
    starts: list[int] = []
    for k, s in enumerate(saved):
        just_in_time = min(needed[k], bisect_right(begins, latest[k]) - 1)
        not_before = max(starts[-1] if starts else 0, gone[s.value.name], needed[k - depth] if k >= depth else 0)
        starts.append(min(max(just_in_time, not_before), s.first))
    return {s.value.name: start for s, start in zip(saved, starts)}
