"""Where saved values live between the forward and the backward pass: the whole decision. No torch.

Every value that the forward pass makes and the backward pass reads is kept, computed again, cut into slices over the tensor parallel ranks (P_a), or
copied to the host (P_a+cpu; Rajbhandari et al. 2019, section 6.1). What is computed again is an order of nodes, which the methods of recompute/ make.
To each order this file proposes sets of values that wait elsewhere. A proposal is priced on integers: bytes alive while each node runs, and seconds
that the computation waits for links, which all values share. The cheapest that promise to fit are laid out, and the layout and the timeline of the
very program decide (planning/choose.py).

Which values go to the host is a question of how far the link may fall behind the forward pass (`lag`): with little lag, those whose copies hide
behind the computation; with any lag, all of them. Those that are made first go first, as they come back last. Recomputation knows of this: its
methods are asked once more with the bytes of such values left out, so that they drop what the link cannot carry.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from packhorse.device.device import Device
from packhorse.errors import BudgetError, UserError
from packhorse.graph.ir import Graph, Node, Ref
from packhorse.graph.operators import OWN_SLICE, is_tensor_collective
from packhorse.mesh import Mesh
from packhorse.planning.placement import Places, place
from packhorse.recompute.facts import Facts
from packhorse.recompute.mirror import Order
from packhorse.recompute.simulate import bytes_of
from packhorse.residency.park import begins_of, seconds_by_result
from packhorse.residency.saved import KEPT, Parked, Residency, Saved, saved_values, slice_of
from packhorse.residency.schedule import Absence, Pace, absences, leaving_order, pace_of, returning_order
from packhorse.units import align_up, format_bytes, parse_bytes

MODES = ("auto", "keep", "shard", "offload")
STATES = ("auto", "keep", "offload")  # of the optimizer
LAGS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the seconds of the graph
DEPTHS = (1, 2, 4, 16)  # copies under way in each direction
ORDERS = 16  # that values are parked in, spread over those that the methods of recomputation propose and that may still be the fastest
NEARLY = 1.01  # bytes that are counted to be so much above a limit are laid out too: what the layout says counts
LOOKS = 3  # so often, each time over those faster than the best so far


@dataclass(frozen=True)
class Limits:
    """room: bytes that arena and external tensors may take together; None: the fewer the better. host_bytes: of the host's pool."""

    room: int | None
    host_bytes: int

    @property
    def nearly(self) -> int | None:
        return None if self.room is None else int(self.room * NEARLY)


@dataclass(frozen=True)
class Price:
    """Bytes at their peaks, and seconds of one run."""

    arena_bytes: int
    external_bytes: int
    host_bytes: int
    seconds: float

    @property
    def peak(self) -> int:
        return self.arena_bytes + self.external_bytes


@dataclass(frozen=True)
class Stored:
    """The storage of a root: its space, bytes there, one past the last time at which it is alive, and when another result takes it over."""

    space: str
    size: int
    upper: int
    taken: int | None


class Terrain:
    """One graph (an order of recomputation, before ZeRO's pass), on which sets of parked values are priced."""

    def __init__(self, graph: Graph, places: Places, in_place: bool, device: Device, mesh: Mesh):
        self.graph, self.tp, self.device = graph, mesh.tp, device
        self.pace: Pace = pace_of(device, mesh.tp)
        self.begins = begins_of(graph, seconds_by_result(graph, device, mesh))
        placement = place(graph, places, in_place)
        made = {value.name: time for time, node in enumerate(graph.nodes) for value in node.outputs if value is not None}
        self.stored: dict[str, Stored] = {}  # by root
        self.alive = {space: np.zeros(len(graph.nodes) + 2, dtype=np.int64) for space in ("arena", "external")}
        for storage in placement.storages:
            size, upper = align_up(storage.size, 64) if storage.space == "arena" else storage.size, min(storage.upper, len(graph.nodes) + 1)
            _add(self.alive[storage.space], storage.lower, upper, size)
            for root, successor in zip(storage.roots, (*storage.roots[1:], None)):
                self.stored[root] = Stored(storage.space, size, upper, None if successor is None else made[successor])
        # sums and gathers over tp that the computation waits for: behind gathers of slices that are under way
        self.behind = [index for index, node in enumerate(graph.nodes) if device.levels and is_tensor_collective(node.op)]

    @cached_property
    def saved(self) -> list[Saved]:
        """Values that may wait elsewhere, in the order in which they are made."""
        return [s for s in saved_values(self.graph) if s.value.name in self.stored]

    def how(self, s: Saved, shard: bool, host: bool) -> Parked | None:
        """How a value waits where slices, the host or both are to be used; None: it gains nothing and stays."""
        cut = shard and s.replicated and align_up(slice_of(s.value, self.tp).extent_bytes, 64) < align_up(s.value.extent_bytes, 64)
        return Parked(cut, host) if cut or host else None

    def price(self, residency: Residency) -> Price:
        """What the graph takes with these values parked: no less than its lower bound in truth, and as a rule just that.

        What is done between two nodes counts with one of them: a slice from the node before it is cut, and with the one before which it is gathered.
        """
        parked = dict(residency.parked)
        those = [s for s in self.saved if s.value.name in parked]
        away = absences(those, parked, residency.depth, self.begins, self.pace)
        change = {space: steps.copy() for space, steps in self.alive.items()}
        on_host = 0
        for s in those:
            how, gone, stored = parked[s.value.name], away[s.value.name], self.stored[s.value.name]
            cut = slice_of(s.value, self.tp)
            whole, waiting = align_up(cut.extent_bytes * self.tp if how.shard else s.value.extent_bytes, 64), align_up(cut.extent_bytes, 64)
            longer = how.shard and cut.extent_bytes * self.tp > s.value.extent_bytes
            _add(change[stored.space], s.last + 1 if how.shard else gone.gone, stored.upper, -stored.size)
            if longer and stored.taken is not None:  # what comes back has padding, and so nothing can take it over
                _add(change["arena"], gone.whole, stored.taken + 1, whole)
                _add(change["arena"], stored.taken, stored.upper, align_up(stored.size, 64))
            else:
                _add(change["arena"], gone.whole, stored.upper, whole)
            if how.shard and how.host:
                _add(change["arena"], s.last, gone.gone, waiting)
                _add(change["arena"], gone.fetch, max(gone.back, gone.whole + 1), waiting)
            elif how.shard:
                _add(change["arena"], s.last, max(gone.back, gone.whole + 1), waiting)
            if how.host:
                on_host += waiting if how.shard else whole
        arena, external = (int(change[space].cumsum()[: max(len(self.graph.nodes), 1)].max()) for space in ("arena", "external"))
        return Price(arena, external, on_host, self.begins[-1] + self._held_up(those, parked, away))

    def _held_up(self, those: Sequence[Saved], parked: Mapping[str, Parked], away: Mapping[str, Absence]) -> float:
        """Seconds that the computation waits for copies and gathers, or cuts slices itself."""
        events: list[tuple[int, str, str, float]] = []  # in the order of the pass at each node: node, stream, name, seconds (None: the wait)
        waits = -1.0
        for s in sorted(those, key=leaving_order):
            name, how, gone = s.value.name, parked[s.value.name], away[s.value.name]
            if how.shard:
                events.append((s.last + 1, "computation", name, self._cutting_s(s)))
            if how.host:
                took = self.pace.copy_s(self.pace.leaving(s, how))
                events += [(s.last + 1, "out", name, took), (gone.gone, "out", name, waits)]
        for s in sorted(those, key=returning_order):
            name, how, gone = s.value.name, parked[s.value.name], away[s.value.name]
            if how.host:
                took = self.pace.copy_s(self.pace.leaving(s, how))
                events += [(gone.fetch, "in", name, took), (gone.fetched, "in", name, waits)]
            if how.shard:
                events += [(gone.whole, "tp", name, self.pace.gather_s(s.value)), (gone.back, "tp", name, waits)]
        if any(how.shard for how in parked.values()):
            events += [(index, "tp", "", waits) for index in self.behind]
        waited = 0.0
        free = {"out": 0.0, "in": 0.0, "tp": 0.0}
        ends: dict[tuple[str, str], float] = {}
        for node, stream, name, took in sorted(events, key=lambda event: event[0]):
            now = self.begins[node] + waited
            if stream == "computation":
                waited += took
            elif took == waits:
                waited += max(0.0, ends.get((stream, name), free[stream]) - now)
            else:
                ends[stream, name] = free[stream] = max(now, free[stream]) + took
        return waited

    def _cutting_s(self, s: Saved) -> float:
        """What the computation takes to cut a value."""
        return self.device.seconds(Node(OWN_SLICE, (Ref(s.value.name),), (), (slice_of(s.value, self.tp),)), self.graph.values)

    @cached_property
    def turn(self) -> float:
        """Seconds at which the backward pass begins."""
        return next((self.begins[index] for index, node in enumerate(self.graph.nodes) if node.phase == "backward"), self.begins[-1])

    def everywhere(
        self, shard: bool, host: bool, depth: int, lag: float = float("inf"), most: int | None = None, until: float = float("inf")
    ) -> Residency:
        """All values parked for which it helps; on the host those whose copies begin no more than `lag` seconds late and end by `until`, up to `most`
        bytes."""
        found: dict[str, Parked] = {}
        done, bytes_there = 0.0, 0
        for s in sorted(self.saved, key=lambda s: (s.last, s.value.name)):
            how = self.how(s, shard, host)
            if how is not None and how.host:
                leaving = self.pace.leaving(s, how)
                took, size = self.pace.copy_s(leaving), align_up(leaving.extent_bytes, 64)
                ready = self.begins[s.last + 1]
                # by the time that it is there it has to come back
                late = done > ready + lag or max(done, ready) + took > until
                short = max(done, ready) + 2 * took >= self.begins[s.first] and lag != float("inf")
                if late or short or (most is not None and bytes_there + size > most):
                    how = self.how(s, shard, False)
                else:
                    done, bytes_there = max(done, ready) + took, bytes_there + size
            if how is not None:
                found[s.value.name] = how
        return Residency(tuple(sorted(found.items())), depth)


def check_mode(mode: str, of_states: str, mesh: Mesh, host_budget: int | str | None) -> None:
    """Raises UserError for a mode that is none, of saved values or of optimizer states, for slices without ranks to cut for, and for the host without
    a budget there."""
    if mode not in MODES:
        raise UserError(f"residency={mode!r} is no way for saved values to wait; expected one of {', '.join(MODES)}")
    if of_states not in STATES:
        raise UserError(f"optimizer_residency={of_states!r} is no place for optimizer states; expected one of {', '.join(STATES)}")
    if of_states == "offload" and host_budget is None:
        raise UserError(
            "optimizer_residency='offload' keeps optimizer states and master weights on the host, and host_budget is None, which gives them no "
            "memory there; set host_budget (bytes, or '8GiB')"
        )
    if mode == "shard" and mesh.tp == 1:
        raise UserError(
            "residency='shard' (P_a of ZeRO-R) cuts saved values that all tensor parallel ranks have alike, and this mesh has tp=1: there is nobody "
            "to share them with; use several tp ranks (mesh.tp), residency='offload' with a host_budget, or recomputation under a budget"
        )
    if mode == "offload" and host_budget is None:
        raise UserError(
            "residency='offload' copies saved values to the host, and host_budget is None, which gives it no memory there; set host_budget (bytes, "
            "'8GiB', or a share of the saved values such as '50%')"
        )


def host_budget_bytes(host_budget: int | str | None, saved_bytes: int) -> int:
    """A budget of the host as bytes: None is nothing, "30%" a share of the bytes that the forward pass saves when everything is kept.

    Raises BudgetError for what is none.
    """
    if host_budget is None:
        return 0
    if isinstance(host_budget, int) and not isinstance(host_budget, bool) and host_budget >= 0:
        return host_budget
    try:
        if isinstance(host_budget, str) and host_budget.strip().endswith("%"):
            share = float(host_budget.strip()[:-1])
            if 0 <= share <= 100:
                return int(saved_bytes * share / 100)
        elif isinstance(host_budget, str):
            return parse_bytes(host_budget)
    except (UserError, ValueError):
        pass
    raise BudgetError(f"cannot read the host_budget {host_budget!r}; write a number of bytes, 8GiB, or a share of the saved values such as 30%")


def check_host(need: int, states: int, given: int) -> None:
    """Raises BudgetError where optimizer states and what comes to be updated need more of the host than it may give. need: in all; states: of it."""
    if need > given:
        raise BudgetError(
            f"optimizer states on the host need {format_bytes(need)} ({need} bytes) there, {format_bytes(states)} of it states, the rest "
            f"gradients and parameters on their way, and host_budget is {format_bytes(given)} ({given} bytes); raise it to that, shard the states "
            "over more ranks (zero_stage=1), or keep them on the device (optimizer_residency='keep')"
        )


def saved_bytes(graph: Graph) -> int:
    """Bytes of all values that the forward pass saves and that could wait elsewhere, as they lie in a pool."""
    return sum(align_up(s.value.extent_bytes, 64) for s in saved_values(graph))


def by_hand(terrain: Terrain, mode: str, host_bytes: int) -> Residency:
    """Every value that can wait as `mode` says. Raises BudgetError if the host has too little memory for that."""
    if mode == "keep":
        return KEPT
    found = terrain.everywhere(terrain.tp > 1, mode == "offload", 2)
    need = terrain.price(found).host_bytes
    if mode == "offload" and need > host_bytes:
        raise BudgetError(
            f"residency='offload' needs {format_bytes(need)} ({need} bytes) of the host's memory for {len(found.parked)} saved values, and "
            f"host_budget is {format_bytes(host_bytes)} ({host_bytes} bytes); raise it to that, recompute more (recompute='blocks' saves less), or "
            "leave residency 'auto', which copies what fits"
        )
    return found


def proposals(terrain: Terrain, limits: Limits, mesh: Mesh) -> Iterator[tuple[Residency, Price]]:
    """Sets of parked values for one order that fit, or nearly; without a limit of bytes the leanest ones."""
    families = [(shard, host) for shard, host in product((False, True), (False, True)) if (shard or host) and (mesh.tp > 1 or not shard)]
    if not limits.host_bytes:
        families = [(shard, host) for shard, host in families if not host]
    seen: set[Residency] = set()
    total = terrain.begins[-1]
    for (shard, host), depth in product(families, DEPTHS):
        lags: Iterable[tuple[float, float]] = [(float("inf"), float("inf"))]
        if host and limits.room is not None:  # what is not gone when the backward pass begins, that has to wait for: at the peak
            lags = product([lag * total for lag in LAGS], (terrain.turn, float("inf")))
        for lag, until in lags:
            found = terrain.everywhere(shard, host, depth, lag, limits.host_bytes, until)
            if not found.parked or found in seen:
                continue
            seen.add(found)
            price = terrain.price(found)
            if limits.nearly is None or price.peak <= limits.nearly:
                yield found, price
                if shard and not host and limits.room is not None and price.peak <= limits.room and depth == DEPTHS[0]:
                    yield _fewest(terrain, found, limits.room)


def _fewest(terrain: Terrain, all_of_them: Residency, room: int) -> tuple[Residency, Price]:
    """No more slices than are needed, the largest first, of those the ones that come back last. all_of_them: fits."""
    parked = dict(all_of_them.parked)
    those = sorted((s for s in terrain.saved if s.value.name in parked), key=lambda s: (-s.value.extent_bytes, -s.first))

    def first(count: int) -> tuple[Residency, Price]:
        found = Residency(tuple(sorted((s.value.name, parked[s.value.name]) for s in those[:count])), all_of_them.depth)
        return found, terrain.price(found)

    low, high = 0, len(those)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if first(middle)[1].peak <= room else (middle, high)
    return first(high)


def unbeaten(found: Iterable[tuple[Residency, Price]]) -> list[Residency]:
    """Those of one order that no other beats in seconds and in bytes, the fastest first."""
    kept: list[tuple[Residency, Price]] = []
    for residency, price in sorted(found, key=lambda item: (item[1].seconds, item[1].peak, item[1].host_bytes)):
        if not kept or price.peak < kept[-1][1].peak:
            kept.append((residency, price))
    return [residency for residency, _ in kept]


def _add(steps: np.ndarray, lower: int, upper: int, size: int) -> None:
    """Bytes more (or fewer) over [lower, upper), as changes from one node to the next."""
    steps[lower] += size
    steps[upper] -= size


def likely(terrain: Terrain, limits: Limits) -> list[Residency]:
    """What may wait elsewhere, as far as the graph that keeps everything tells, whose terrain this is."""
    shard, host = terrain.tp > 1, limits.host_bytes > 0
    sets = [terrain.everywhere(shard, host, 2, lag * terrain.begins[-1], limits.host_bytes) for lag in (LAGS[2:6:3] if host else (0.0,))]
    return [found for found in dict.fromkeys(sets) if found.parked]


def discounted(facts: Facts, residency: Residency, share: float) -> Facts:
    """Facts in which values on the host take no bytes, and others that wait elsewhere a share of theirs."""
    away = dict(residency.parked)

    def left(name: str, size: int) -> int:
        return size if name not in away else 0 if away[name].host else int(size * share)

    return replace(facts, sizes=tuple(left(name, size) for name, size in zip(facts.names, facts.sizes)))


def foretold(facts: Facts, order: Order, peak: int, sliced: Residency, tp: int, host_bytes: int) -> int:
    """About what an order takes if all that may wait elsewhere does, no less than that as a rule. peak: what it takes without; sliced: what waits as
    slices of tp ranks in the order that keeps everything."""
    least = bytes_of(discounted(facts, sliced, 0.0), order).peak if sliced.parked else peak
    return peak - (peak - least) * (tp - 1) // tp - host_bytes


def spread(items: Sequence, most: int) -> list:
    """At most so many of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]
