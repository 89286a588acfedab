"""Graphs -> Plan: methods of recomputation propose, the exact layout judges. A pure function of the graphs and the options. No torch.

Proposals are ranked by their seconds; their bytes are simulated, and the one that is taken is laid out: a plan never exceeds its budget.
As proposals do
not depend on the budget, a smaller budget never gives a higher peak.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from packhorse.device.device import Device
from packhorse.errors import BudgetError, UserError
from packhorse.graph.into_arena import into_arena
from packhorse.graph.ir import Graph
from packhorse.parallel.zero import Gathering, Zero
from packhorse.planning.budget import budget_bytes, too_small
from packhorse.planning.persistent import Persistent, seen_by
from packhorse.planning.plan import GraphPlan, LaidOut, Options, Plan, Rest, plan_graph, times_of
from packhorse.planning.residency import (
    LOOKS,
    NEARLY,
    ORDERS,
    Limits,
    Terrain,
    by_hand,
    check_host,
    discounted,
    foretold,
    host_budget_bytes,
    likely,
    proposals,
    saved_bytes,
    spread,
    unbeaten,
)
from packhorse.recompute.bound import NOWHERE, Elsewhere, least_extra_seconds
from packhorse.recompute.chen import chen
from packhorse.recompute.facts import Facts, facts_of
from packhorse.recompute.mirror import Order, order_of, replay
from packhorse.recompute.optimal import is_large, is_outside, optimal
from packhorse.recompute.simulate import bytes_of, live_nodes, seconds_of
from packhorse.recompute.table import METHODS
from packhorse.residency.park import node_seconds, park, seconds_by_result
from packhorse.residency.saved import KEPT, Residency

LOOKED_AT = 6  # plans within the budget that are laid out, where some of them park values: the fastest is taken
LEANEST = 16  # plans that are laid out to find the leanest, of those that simulation cannot tell apart
MICRO = ("last", "next", "first")  # programs that are searched, the one that needs more first


@dataclass(frozen=True)
class Candidate:
    """An order of a graph, and the values that wait elsewhere in it, with simulated bytes and seconds."""

    facts: Facts
    order: Order
    arena_bytes: int
    external_bytes: int
    seconds: float
    residency: Residency = KEPT

    @property
    def peak(self) -> int:
        """Of arena and external tensors together."""
        return self.arena_bytes + self.external_bytes

    @cached_property
    def graph(self) -> Graph:
        return self.facts.graph if self.order == self.facts.plain_order() else replay(self.facts.graph, self.order)


@dataclass(frozen=True)
class Chosen:
    """The plan of one program, laid_out. keep_everything_bytes: peak of the step with this program as it was captured; keep_everything_seconds: of
    this program."""

    laid_out: LaidOut
    keep_everything_bytes: int
    keep_everything_seconds: float
    least_overhead_seconds: float | None


def choose(
    graph: Graph,
    persistent: Persistent,
    options: Options,
    device: Device,
    rest: Rest,
    limit: Callable[[int], int | None],
    finish: "Finish | None" = None,
) -> Chosen:
    """The fastest plan of one micro-batch's graph within the limit, else the leanest; without a limit the leanest of the method (of "auto"
    and "optimal" the fastest).

    limit: what the whole step may take, of what it takes when everything is kept. finish: what several ranks make of the graph of a candidate.
    """
    finish = finish or Finish(persistent, options, device)
    method = "optimal" if options.recompute == "auto" else options.recompute
    facts = _facts(graph, finish.counted, options, device)
    _check_marks(facts)
    plain = _measured(facts, order_of(facts, {}))
    more = finish.more(plain, rest)  # bytes that no candidate knows of
    everything = rest.peak(plain) + more
    unhurried = plain.seconds if finish.zero is None or options.sketch else finish.laid_out(plain, Gathering()).seconds
    allowed = limit(everything)
    room = None if allowed is None else allowed - rest.persistent_bytes - more
    if (
        method == "none"
        or (method == "optimal" and options.budget is None)
        or (method == "optimal" and allowed is not None and everything <= allowed)
    ):
        candidates = [plain]
    else:
        orders = METHODS[method](facts, room) or METHODS[method](facts, None) or [plain.order]  # none within the limit: what is the least
        candidates = [_measured(facts, order) for order in dict.fromkeys(orders)]
        fits = allowed is not None and any(rest.peak(c) + more <= allowed for c in candidates)
        if method == "optimal" and is_outside(facts) and not (fits and is_large(facts)):
            inside = _facts(into_arena(graph), finish.counted, options, device)
            candidates += [_measured(inside, order) for order in dict.fromkeys(METHODS[method](inside, room))]
            if is_large(facts):  # a plan of segments keeps little outside: it needs no copies
                candidates += [_measured(facts, order) for order in chen(facts)]
    candidates = _parked(candidates, plain, finish, room)
    if allowed is None:
        fastest = method in ("none", "optimal") and options.budget is None
        return Chosen(_leanest(candidates, finish, rest, Gathering(ahead=fastest and finish.gathers)), everything, unhurried, None)
    nearly, host = allowed if is_large(facts) else allowed * NEARLY, finish.host_bytes(plain)
    ranked = sorted((c for c in candidates if rest.peak(c) + more <= nearly), key=lambda c: (c.seconds, rest.peak(c)))

    def fitting(those: list[Candidate], most: int) -> list[LaidOut]:
        """The first ones whose layouts fit, while they promise to be faster than those before."""
        found: list[LaidOut] = []
        for candidate in those:
            if len(found) == most or (found and candidate.seconds > min(laid_out.seconds for laid_out in found)):
                break
            ways = finish.gatherings(allowed - rest.persistent_bytes)
            if rest.peak(finish.glance(candidate, ways[-1])) > allowed:  # the leanest way
                continue
            for gathering in ways:
                if rest.peak(finish.glance(candidate, gathering)) > allowed:
                    continue
                laid_out = finish.laid_out(candidate, gathering)
                if rest.peak(laid_out) <= allowed and laid_out.host_bytes <= host:
                    found.append(laid_out)
                    break
        return found

    waiting = any(c.residency.parked for c in candidates)
    found = fitting(ranked, LOOKED_AT if waiting or (finish.gathers and device.levels) else 1)
    if waiting:  # prices leave out what ZeRO sends: what recomputation or the links alone can do is looked at in any case
        found += fitting([c for c in ranked if not c.residency.parked], 1) + fitting([c for c in ranked if c.order == plain.order], 1)
    if found:
        best = min(found, key=lambda laid_out: (laid_out.seconds, rest.peak(laid_out)))
        most = allowed - rest.persistent_bytes + finish.persistent.floor  # before they are made, all lent gradients' memory is the arena's
        # what is computed again may hide behind what ZeRO sends, and more units may stay whole: a step takes as long as its computation at least
        least = plain.seconds + least_extra_seconds(facts, most, _elsewhere(host, plain.seconds, finish))
        return Chosen(best, everything, unhurried, least - unhurried)
    return Chosen(_leanest(candidates, finish, rest, Gathering()), everything, unhurried, None)


@dataclass(frozen=True)
class Finish:
    """The last step of a candidate: laid out, and before that made into what one rank of several runs. counted: where things persist as far as
    the methods of recomputation count."""

    persistent: Persistent
    options: Options
    device: Device
    zero: Zero | None = None
    name: str = "first"
    kept: dict[tuple, tuple[Graph, GraphPlan]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def counted(self) -> Persistent:
        if self.zero is None:
            return self.persistent
        known = {run.name for run in self.zero.persistent.runs}
        return Persistent((*self.zero.whole.runs, *(run for run in self.persistent.runs if run.name not in known)))  # none is lent

    def laid_out(self, candidate: Candidate, gathering: Gathering) -> LaidOut:
        """The plan of this rank, and what the ranks that decide for all need."""
        own = self._planned(candidate, gathering, None)
        return self._needing(own, [self._planned(candidate, gathering, judge) for judge in self.judges])

    def glance(self, candidate: Candidate, gathering: Gathering) -> LaidOut:
        """The same of the first rank that decides, alone: all of them need no less."""
        plan = self._planned(candidate, gathering, self.judges[0])
        return self._needing(plan, [plan])

    @property
    def judges(self) -> tuple[int | None, ...]:
        """dp ranks that decide for all (Partition.judges); None is this one, where it decides alone."""
        return (None,) if self.zero is None or self.zero.is_alone or self.options.sketch else self.zero.partition.judges

    def _needing(self, own: GraphPlan, plans: list[GraphPlan]) -> LaidOut:
        seconds = max(plan.seconds(self.device, self.options.mesh) for plan in plans)
        arena, external, host = (max(getattr(plan, key) for plan in plans) for key in ("arena_bytes", "external_bytes", "host_bytes"))
        return LaidOut(own, arena, external, seconds, host)

    def _planned(self, candidate: Candidate, gathering: Gathering, judge: int | None) -> GraphPlan:
        """As a dp rank plans it, or this one. Kept: a graph is often asked for twice."""
        if self.zero is not None and judge == self.zero.partition.rank:
            judge = None
        key = id(candidate.graph), candidate.residency, gathering, judge
        if key not in self.kept:
            one = self
            if self.zero is not None and judge is not None:
                one = replace(self, persistent=seen_by(self.persistent, judge), zero=self.zero.seen_by(judge))
            self.kept[key] = candidate.graph, one.planned(candidate.graph, candidate.residency, gathering)
        return self.kept[key][1]

    @property
    def gathers(self) -> bool:
        """Parameters are."""
        return self.zero is not None and self.zero.partition.shards_parameters

    def gatherings(self, room: int) -> list[Gathering]:
        """Ways to gather parameters of which the units that are whole take no more than `room` bytes; two units are tried in any case."""
        if self.zero is None or not self.gathers:
            return [Gathering()]
        of_units: dict[str, int] = defaultdict(int)
        for run in self.zero.persistent.runs:
            if run.kind == "parameters":
                of_units[self.zero.partition.units[run.layout.slots[0].target]] += run.layout.num_bytes
        sizes = sorted(of_units.values())
        return [way for way in self.zero.gatherings if way.units <= Gathering.units or sum(sizes[: way.units]) <= room]

    def planned(self, graph: Graph, residency: Residency, gathering: Gathering) -> GraphPlan:
        mesh, rank = self.options.mesh, self.options.rank
        seconds = seconds_by_result(graph, self.device, mesh) if residency.parked else {}
        if self.zero is not None:
            graph = self.zero.micro_batch(self.name, graph, self.options.num_micro_batches, gathering)
        graph = park(graph, residency, seconds, self.device, mesh.tp, mesh.tp_rank(rank))
        return plan_graph(graph, self.persistent, self.options)

    def terrain(self, candidate: Candidate) -> Terrain:
        """Of the graph of a candidate, on which parked values are priced."""
        return Terrain(candidate.graph, self.counted.places(), self.options.in_place, self.device, self.options.mesh)

    def host_bytes(self, plain: Candidate) -> int:
        """What saved values may take of the host: what its budget leaves beside optimizer states. plain: the candidate that keeps everything."""
        return max(0, host_budget_bytes(self.options.host_budget, saved_bytes(plain.graph)) - self.persistent.host_bytes)

    def more(self, plain: Candidate, rest: Rest) -> int:
        """Bytes by which the plan that keeps everything is larger than what is counted: what is gathered and what is on its way."""
        return 0 if self.zero is None or self.options.sketch else rest.peak(self.laid_out(plain, Gathering())) - rest.peak(plain)


def _elsewhere(host_bytes: int, seconds: float, finish: Finish) -> Elsewhere:
    """Where saved values may wait, for the lower bound. seconds: of the computation that keeps everything."""
    if finish.options.residency == "keep":
        return NOWHERE
    return Elsewhere(host_bytes, finish.device.host_link, finish.options.mesh.tp, seconds)


def _leanest(candidates: list[Candidate], finish: Finish, rest: Rest, gathering: Gathering) -> LaidOut:
    """What the layout says is the leanest, then the fastest; of a large graph, where a layout takes long, what the simulation says."""
    by_peak = sorted(candidates, key=lambda c: (rest.peak(c), c.seconds))
    least = rest.peak(by_peak[0])
    few = by_peak[:1] if is_large(by_peak[0].facts) else [c for c in by_peak[:LEANEST] if rest.peak(c) <= least * NEARLY]
    best: LaidOut | None = None
    for least, _, c in sorted(((rest.peak(finish.glance(c, gathering)), c.seconds, c) for c in few), key=lambda item: item[:2]):
        if best is not None and least > rest.peak(best):
            break
        laid_out = finish.laid_out(c, gathering)
        if best is None or rest.peak(laid_out) < rest.peak(best):
            best = laid_out
    assert best is not None
    return best


def _parked(candidates: list[Candidate], plain: Candidate, finish: Finish, room: int | None) -> list[Candidate]:
    """The candidates with saved values where `residency` says, or, if that is "auto", these and others whose values wait elsewhere."""
    options = finish.options
    host = finish.host_bytes(plain)
    if options.residency in ("shard", "offload"):
        by_seconds = sorted(candidates, key=lambda c: (c.seconds, c.peak))
        some = spread(by_seconds, LOOKS * ORDERS)
        return [_priced(c, terrain, by_hand(terrain, options.residency, host)) for c in some for terrain in (finish.terrain(c),)]
    fits = room is not None and plain.peak <= room
    if options.residency == "keep" or options.budget is None or fits or (options.mesh.tp == 1 and not host):
        return candidates
    limits = Limits(room, host)
    left, found = _promising(candidates, plain, finish, limits), list(candidates)
    for _ in range(1 if room is None else LOOKS):  # without a limit no look knows more than the first
        # parked values make nothing faster: an order has to be faster than the best so far
        fastest = min((c.seconds for c in found if room is not None and c.peak <= room), default=float("inf"))
        left = [c for c in left if c.seconds < fastest]
        # what slices bring is foretold well, what a link brings is not
        first = left[: ORDERS // 2 if room is not None and options.mesh.tp > 1 else 0]
        looked_at = list({id(c): c for c in (*first, *spread(left, ORDERS - len(first)))}.values())
        for candidate in looked_at:
            terrain = finish.terrain(candidate)
            found += [_priced(candidate, terrain, residency) for residency in unbeaten(proposals(terrain, limits, options.mesh))]
        left = [c for c in left if not any(c is other for other in looked_at)]
    return found


def _promising(candidates: list[Candidate], plain: Candidate, finish: Finish, limits: Limits) -> list[Candidate]:
    """Orders that may fit once values are parked, the fastest first: the candidates', and others that the method proposes when it knows of that."""
    options = finish.options
    terrain, tp = finish.terrain(plain), options.mesh.tp
    method = partial(optimal, thorough=False) if options.recompute in ("auto", "optimal") else METHODS[options.recompute]
    lighter = [discounted(plain.facts, residency, 1 / tp) for residency in likely(terrain, limits)]
    orders = dict.fromkeys(order for facts in lighter for order in method(facts, limits.nearly))
    by_seconds = sorted([plain, *candidates, *(_measured(plain.facts, order) for order in orders)], key=lambda c: (c.seconds, c.peak))
    found = list({(id(c.facts), c.order): c for c in by_seconds}.values())
    most = limits.nearly
    if most is None:
        return found
    sliced = terrain.everywhere(tp > 1, False, 2)
    # of other facts than the plain ones the values have other names, and nothing is foretold
    return [c for c in found if (tp > 1 and c.facts is not plain.facts) or foretold(c.facts, c.order, c.peak, sliced, tp, limits.host_bytes) <= most]


def _priced(candidate: Candidate, terrain: Terrain, residency: Residency) -> Candidate:
    """The candidate with these values parked. Its seconds are those of the timeline but for what ZeRO sends."""
    price = terrain.price(residency)
    found = replace(candidate, residency=residency, arena_bytes=price.arena_bytes, external_bytes=price.external_bytes, seconds=price.seconds)
    found.__dict__["graph"] = candidate.graph  # made once for all of them
    return found


def make_plan(
    graphs: dict[str, Graph],
    persistent: Persistent,
    options: Options,
    device: Device,
    job: Any = None,
    zero: Zero | None = None,
    around: Mapping[int, Mapping[str, Graph]] | None = None,
) -> Plan:
    """The plan of a step, judged against the budget.

    graphs: "first" and "update"; "next" if there are several micro-batches, "agree" if there are master weights, "norm" if the update
    needs it; of several ranks "loss", and "last" where gradients are reduced in the last micro-batch only. zero: what makes rank's programs of them;
    around: the programs besides the micro-batches of each rank that decides for all (Partition.judges).
    Raises BudgetError, with the least budget that works, what is alive at the peak and what would fit, if no plan of the method meets it.
    """
    programs = {name: plan_graph(graph, persistent, options) for name, graph in graphs.items() if name not in MICRO}
    if persistent.host_bytes:
        need = persistent.host_bytes + max(planned.host_bytes for planned in programs.values())
        saved = saved_bytes(next(graphs[name] for name in MICRO if name in graphs))
        check_host(need, persistent.host_bytes, host_budget_bytes(options.host_budget, saved))
    rest = Rest(persistent.num_bytes)
    for planned in programs.values() if around is None else _planned(around, persistent, options):
        rest = rest.along(planned)
    everything = 0
    seconds, bounds = sum(planned.seconds(device, options.mesh) for planned in programs.values()), []
    for name in MICRO:
        if name not in graphs:
            continue
        finish = Finish(persistent, options, device, zero, name)
        chosen = choose(graphs[name], persistent, options, device, rest, partial(_limit, options.budget, everything), finish)
        everything = max(everything, chosen.keep_everything_bytes)
        times = times_of(name, graphs, options)
        seconds += times * chosen.keep_everything_seconds
        bounds.append(None if chosen.least_overhead_seconds is None else times * chosen.least_overhead_seconds)
        programs[name] = chosen.laid_out.planned
        rest = rest.along(chosen.laid_out)
    bound = None if None in bounds else sum(b for b in bounds if b is not None)
    plan = Plan({name: programs[name] for name in graphs}, persistent, options, device, everything, seconds, bound, zero, job, rest)
    limit = budget_bytes(options.budget, everything)
    if limit is not None and plan.peak_bytes > limit:
        raise too_small(plan, limit, _optimal_within(limit, graphs, persistent, options, device, zero, around))
    return plan


def _planned(around: Mapping[int, Mapping[str, Graph]], persistent: Persistent, options: Options) -> Iterator[GraphPlan]:
    """Programs of other ranks, as they plan them."""
    for rank, graphs in around.items():
        for graph in graphs.values():
            yield plan_graph(graph, seen_by(persistent, rank), options)


def _limit(budget: int | str | None, known: int, everything: int) -> int | None:
    """Bytes of a budget, where a share is one of the larger keep-everything peak: of this program or of those before it."""
    return budget_bytes(budget, max(known, everything))


def _optimal_within(
    limit: int,
    graphs: dict[str, Graph],
    persistent: Persistent,
    options: Options,
    device: Device,
    zero: Zero | None,
    around: Mapping[int, Mapping[str, Graph]] | None,
) -> dict[str, int]:
    """What the optimal plan within the limit needs, by its name; nothing if there is none, or if it is what was asked for."""
    if options.recompute in ("auto", "optimal"):
        return {}
    try:
        optimal = replace(options, recompute="optimal", budget=limit)
        return {"optimal": make_plan(graphs, persistent, optimal, device, zero=zero, around=around).peak_bytes}
    except BudgetError:
        return {}


def _facts(graph: Graph, persistent: Persistent, options: Options, device: Device) -> Facts:
    return facts_of(graph, persistent.places(), node_seconds(graph, device, options.mesh), options.in_place)


def _measured(facts: Facts, order: Order) -> Candidate:
    alive = live_nodes(facts, order)
    found = bytes_of(facts, order, alive)
    return Candidate(facts, order, max(found.arena, default=0), max(found.external, default=0), seconds_of(facts, order, alive))


def _check_marks(facts: Facts) -> None:
    """Raises UserError for a mark that decides nothing."""
    for index in facts.marks:
        if index not in facts.saved:
            node = facts.graph.nodes[index]
            name = f" {node.mark_name!r}" if node.mark_name else ""
            raise UserError(
                f"ph.{node.mark}{name} in module {node.module or '(outermost)'!r} at "
                f"{node.source or 'an unknown line'} marks a value that the backward "
                f"pass does not read (the result of {node.op}), so there is nothing to keep or to drop; mark what its "
                f"consumer saves (its input or its "
                "output: packhorse explain CONFIG --stage plan lists what is saved), or take the mark away"
            )
