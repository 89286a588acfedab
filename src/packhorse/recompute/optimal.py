"""The optimal plan: a dynamic program over the chain of blocks, each with a Pareto set of options found at the level of operators.

The program is solved for all numbers of bytes at once, in a few resolutions (fine steps matter where little memory is left), so that its answers
are a curve from "keep everything" to the least there is. Each distinct answer is a proposal; the planner judges them on the exact layout.
"""

import itertools
from collections.abc import Callable, Sequence
from math import ceil, log2, sqrt

import numpy as np

from packhorse.recompute.chain import KEEP, Chain, Link, Way
from packhorse.recompute.chen import chen
from packhorse.recompute.cuts import Block, blocks_of, crossings, cut_places
from packhorse.recompute.facts import Facts
from packhorse.recompute.improve import improve
from packhorse.recompute.mirror import Order, order_of
from packhorse.recompute.options import Choices, Option, choices_of, signature
from packhorse.recompute.recursive import recursive
from packhorse.recompute.rules import blocks as by_blocks
from packhorse.recompute.rules import cheap, sqrt_n
from packhorse.recompute.simulate import bytes_of

# Steps into which a range of bytes is divided: the keep-everything peak, half of it, a quarter, ... Where more is kept, more roundings add up.
SLOTS = (1024, 1024, 1024, 512, 256, 256)
# (halvings, slots) of the lean end, coarsely too: what rounding takes for less than it is finds plans that the layout then shows to be the leanest.
LEAN = ((3, 128), (4, 128), (5, 128))
PROPOSALS = 16  # of each range
POINTS = 48  # plans along the convex hull
LARGE = 2000  # with more nodes that compute, the curve is searched for the limit instead of laid open
WORK = 2.5e7  # table entries that may be looked at for one range: a longer chain is split at fewer places


# Of what the arena takes: where kernels' own results take more, the graph with those in the arena (graph/into_arena.py) is weighed too.
SHARE_OUTSIDE = 0.2


def is_large(facts: Facts) -> bool:
    """The curve is searched for the limit, not laid open."""
    return sum(facts.real) > LARGE


def is_outside(facts: Facts) -> bool:
    """Much of what waits for the backward pass lies in kernels' own memory, whose peak comes on top of the arena's."""
    found = bytes_of(facts, facts.plain_order())
    return max(found.external, default=0) > SHARE_OUTSIDE * max(found.arena, default=0)


def optimal(facts: Facts, limit: int | None = None, thorough: bool = True) -> list[Order]:
    """The plans on the curve of the dynamic program, and those of the simpler methods, so that none of them is ever better.

    For a graph that is not large they are the same whatever the limit. Of a large one, the best that was found for the limit. thorough: with the
    local search over single counts.
    """
    plain = order_of(facts, {})
    curve = _Curve(facts, bytes_of(facts, plain).peak)
    if is_large(facts):
        return [plain, *curve.near(limit)]
    orders = [plain, *chen(facts), *recursive(facts), *cheap(facts), *by_blocks(facts), *sqrt_n(facts)]
    starts: list[dict[int, int]] = [{}, *(curve.on_the_hull(held) for held in _evenly(curve.hull_plans(), POINTS))]
    for halving, slots in [*enumerate(SLOTS), *LEAN]:
        chain = curve.chain(halving, slots)
        wanted = range(slots // 2 if halving < len(SLOTS) - 2 else 0, slots + 1)
        starts += [curve.counts(chain, m) for m in _evenly(_falls(chain.best(), wanted), PROPOSALS)]
    orders += [order_of(facts, counts) for counts in starts[1:]] + (improve(facts, starts) if thorough else [])
    return list(dict.fromkeys(orders))


class _Curve:
    """The blocks of a graph with their choices, and plans made of them."""

    def __init__(self, facts: Facts, peak: int):
        self.facts, self.peak = facts, peak
        self.blocks, self.choices, self.kinds = _blocks(facts)
        self.looked_at = _parts(self.kinds) * len(self.kinds) / 3
        self.crossing = {facts.maker[s] for block in self.blocks for s in block.crossing}
        self.hulls = {kind: _hull(choice) for kind, choice in zip(self.kinds, self.choices)}

    def chain(self, halving: int, slots: int) -> Chain:
        """The dynamic program over [0, peak / 2**halving]."""
        every = max(1, ceil(sqrt(self.looked_at * slots / WORK)))
        return chain_of(self.facts, self.blocks, self.choices, self.kinds, max(1.0, self.peak / 2**halving / slots), slots, every)

    def counts(self, chain: Chain, slots: int) -> dict[int, int]:
        return counts_of(self.facts, self.blocks, self.choices, chain, slots)

    def hull_plans(self) -> list[tuple[int, ...]]:
        """Plans that keep every cut, from "keep everything" on: the block whose next option frees bytes at the fewest seconds each changes next.

        Place of each block's option on the lower convex hull of its (kept bytes, seconds): the fractional optimum of the multiple-choice
        knapsack, exact
        but for one block. Of equal blocks the first goes first: its bytes are held the longest.
        """
        changes = []
        for k, kind in enumerate(self.kinds):
            hull = self.hulls[kind]
            changes += [(_slope(a, b), k, step) for step, (a, b) in enumerate(itertools.pairwise(hull))]
        held = [0] * len(self.blocks)
        found = []
        for _, k, step in sorted(changes):
            held[k] = step + 1
            found.append(tuple(held))
        return found

    def on_the_hull(self, held: tuple[int, ...]) -> dict[int, int]:
        """Mirror counts of one of those plans."""
        return {
            node: mirrors
            for block, kind, place in zip(self.blocks, self.kinds, held)
            for node, mirrors in zip(block.forward, self.hulls[kind][place].counts)
            if node not in self.crossing
        }

    def near(self, limit: int | None) -> list[Order]:
        """For a large graph: the fastest found within the limit, else the leanest there are; none where the graph with all in the arena is better."""
        if limit is None:
            if is_outside(self.facts):
                return []
            found = [*recursive(self.facts), *chen(self.facts)]
            for halving, slots in LEAN:
                chain = self.chain(halving, slots)
                found += [order_of(self.facts, self.counts(chain, m)) for m in _falls(chain.best(), range(slots + 1))[:3]]
            return found
        plans = self.hull_plans()
        place = self._first(range(len(plans)), lambda at: order_of(self.facts, self.on_the_hull(plans[at])), limit)
        if place is not None:
            return [order_of(self.facts, self.on_the_hull(plans[place]))]
        if is_outside(self.facts):
            return []
        halving = max(0, min(len(SLOTS) - 1, int(log2(max(1.0, self.peak / (1.2 * max(limit, 1)))))))
        chain = self.chain(halving, SLOTS[halving])
        falls = _falls(chain.best(), range(SLOTS[halving] + 1))[::-1]  # from fast to lean
        place = self._first(falls, lambda m: order_of(self.facts, self.counts(chain, m)), limit)
        found = [] if place is None else [order_of(self.facts, self.counts(chain, place))]
        return [*found, *(chen(self.facts) if limit < self.peak / 8 else [])] if found else self.near(None)

    def _first(self, places: Sequence[int], order: Callable[[int], Order], limit: int) -> int | None:
        """The first place whose plan fits, by halving: plans are taken to grow leaner from one to the next."""
        if not places or bytes_of(self.facts, order(places[-1])).peak > limit:
            return None
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high) // 2
            if bytes_of(self.facts, order(places[middle])).peak <= limit:
                high = middle
            else:
                low = middle + 1
        return places[low]


def _blocks(facts: Facts) -> tuple[list[Block], list[Choices], list[int]]:
    """Blocks, the choices of each, and the number of its kind."""
    at = crossings(facts)
    blocks = blocks_of(facts, at, cut_places(facts, at))
    known: dict[tuple, int] = {}
    kinds = [known.setdefault(signature(facts, b, _leaving(blocks, k)), len(known)) for k, b in enumerate(blocks)]
    solved: dict[int, Choices] = {}
    for k, (kind, block) in enumerate(zip(kinds, blocks)):
        if kind not in solved:
            solved[kind] = choices_of(facts, block, _leaving(blocks, k))
    return blocks, [solved[kind] for kind in kinds], kinds


def _parts(kinds: list[int]) -> int:
    """How many parts of a long chain look different: about as many as the table has rows."""
    known: dict[tuple[int, int], int] = {}
    previous = [-1] * (len(kinds) + 1)
    for j in range(1, len(kinds) + 1):
        row = [-1] * (len(kinds) + 1)
        for i in range(j - 1, -1, -1):
            row[i] = known.setdefault((previous[i], row[i + 1] if i + 1 < j else -1 - kinds[i]), len(known))
        previous = row
    return len(known)


def _leaving(blocks: list[Block], k: int) -> frozenset[int]:
    return blocks[k + 1].crossing if k + 1 < len(blocks) else frozenset()


def chain_of(facts: Facts, blocks: list[Block], choices: list[Choices], kinds: list[int], unit: float, slots: int, every: int) -> Chain:
    """The chain in slots of `unit` bytes, rounded to the nearest: what is a little over or under is judged later."""

    def count(num_bytes: int) -> int:
        return round(num_bytes / unit)

    n = len(blocks)
    weights = np.zeros((n + 1, n + 1), dtype=np.int64)
    first: dict[int, int] = {}  # storage -> the first cut that it crosses
    for k in range(1, n):
        by_first = np.zeros(n + 1)
        for s in blocks[k].crossing:
            by_first[first.setdefault(s, k)] += facts.sizes[s]
        # the cut before k adds to the one before i what crosses no cut up to i
        weights[:k, k] = np.rint(by_first[::-1].cumsum()[::-1][1 : k + 1] / unit)
    gradients = [count(sum(facts.sizes[s] for s in b.crossing)) for b in blocks] + [0]
    links = []
    for kind, choice in zip(kinds, choices):
        ways = tuple(Way(count(o.kept_bytes), count(o.forward_bytes), count(o.backward_bytes), o.extra_s) for o in choice.options)
        links.append(Link(kind, choice.forward_s, count(choice.passing_bytes), ways))
    return Chain(links, weights, gradients, slots, every)


def _falls(best: np.ndarray, wanted: range) -> list[int]:
    """Numbers of slots at which the curve falls."""
    return [m for m in wanted if np.isfinite(best[m]) and (m == 0 or best[m] < best[m - 1])]


def _evenly(items: list, most: int) -> list:
    """`most` of the items, the first and the last among them; all if there are no more."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _hull(choice: Choices) -> list[Option]:
    """Options on the lower convex hull of (kept bytes, seconds), from the most bytes to the fewest."""
    hull: list[Option] = []
    for option in sorted(choice.options, key=lambda o: (-o.kept_bytes, o.extra_s)):
        if hull and option.kept_bytes == hull[-1].kept_bytes:
            continue
        if hull and option.extra_s <= hull[-1].extra_s:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    return (b.extra_s - a.extra_s) / (a.kept_bytes - b.kept_bytes)


def counts_of(facts: Facts, blocks: list[Block], choices: list[Choices], chain: Chain, slots: int) -> dict[int, int]:
    """Mirror counts of the chain's plan: what is kept at a level has as many mirrors, what is dropped one more, or as its option says."""
    counts: dict[int, int] = {}
    crossing: set[int] = set()  # nodes whose values are kept at a cut

    def keep_crossing(k: int, level: int) -> None:
        for s in blocks[k].crossing:
            if facts.maker[s] not in crossing:
                crossing.add(facts.maker[s])
                counts[facts.maker[s]] = level

    for step in chain.steps(slots):
        if step.what == KEEP:
            if step.last > step.first + 1:
                keep_crossing(step.first + 1, step.level)
            option = choices[step.first].options[step.choice]
            for node, mirrors in zip(blocks[step.first].forward, option.counts):
                if node not in crossing:
                    counts[node] = step.level + mirrors
        else:
            keep_crossing(step.choice, step.level)
    return counts
