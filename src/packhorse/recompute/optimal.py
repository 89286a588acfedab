"""The optimal plan: a dynamic program over the chain of blocks, each with a Pareto set of options found at the level of operators.

The program is solved for all numbers of bytes at once, in a few resolutions (fine steps matter where little memory is left), so that its answers
are a curve from "keep everything" to the least there is. Each distinct answer is a proposal; the planner judges them on the exact layout.
"""

from collections.abc import Iterator
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
COARSE = 128
PROPOSALS = 16  # of each range
POINTS = 48  # plans along the convex hull
LARGE = 2000  # with more nodes that compute, only what lies near the limit is proposed
WORK = 4e7  # table entries that may be looked at for one range: a longer chain is split at fewer places


def optimal(facts: Facts, limit: int | None = None) -> list[Order]:
    """The plans on the curve of the dynamic program, and those of the simpler methods, so that none of them is ever better.

    For a graph that is not large they are the same whatever the limit. For a large one they lie near it; without one, at the lean end.
    """
    plain = order_of(facts, {})
    peak = bytes_of(facts, plain).peak
    orders = [plain]
    large = sum(facts.real) > LARGE
    if not large or limit is None or limit < peak / 2:
        orders += [*chen(facts), *recursive(facts)]
    if not large:
        orders += [*cheap(facts), *by_blocks(facts), *sqrt_n(facts)]
    blocks, choices, kinds = _blocks(facts)
    looked_at = _parts(kinds) * len(kinds) / 3
    starts: list[dict[int, int]] = [{}, *along_the_hull(facts, blocks, choices, POINTS)]
    for halving, slots in _ranges(peak, limit if large else None, large):
        unit = max(1.0, peak / 2**halving / slots)
        chain = chain_of(facts, blocks, choices, kinds, unit, slots, max(1, ceil(sqrt(looked_at * slots / WORK))))
        wanted = range(slots // 2 if halving < len(SLOTS) - 2 else 0, slots + 1)
        if large and limit is not None:
            wanted = range(max(0, int(0.8 * limit / unit)), min(slots, int(1.1 * limit / unit) + 1) + 1)
        starts += [counts_of(facts, blocks, choices, chain, m) for m in _spread(chain.best(), wanted)]
    orders += [order_of(facts, counts) for counts in starts[1:]] + improve(facts, starts)
    return list(dict.fromkeys(orders))


def _ranges(peak: int, limit: int | None, large: bool) -> list[tuple[int, int]]:
    """(halvings of the peak, slots) to solve. Of a large graph the range that the limit lies well inside of; without a limit the lean end.

    The lean end is solved coarsely too: what rounding takes for less than it is finds plans there that the layout then shows to be the leanest.
    """
    lean = [(halving, COARSE) for halving in range(len(SLOTS) - 3, len(SLOTS))]
    if not large:
        return [*enumerate(SLOTS), *lean]
    if limit is None:
        return lean
    halving = max(0, min(len(SLOTS) - 1, int(log2(max(1.0, peak / (1.1 * max(limit, 1)))))))
    return [(halving, SLOTS[halving])]


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
    for i in range(n):
        for k in range(i + 1, n):
            weights[i, k] = count(sum(facts.sizes[s] for s in blocks[k].crossing - blocks[i].crossing))
    gradients = [count(sum(facts.sizes[s] for s in b.crossing)) for b in blocks] + [0]
    links = []
    for kind, choice in zip(kinds, choices):
        ways = tuple(Way(count(o.kept_bytes), count(o.forward_bytes), count(o.backward_bytes), o.extra_s) for o in choice.options)
        links.append(Link(kind, choice.forward_s, count(choice.passing_bytes), ways))
    return Chain(links, weights, gradients, slots, every)


def _spread(best: np.ndarray, wanted: range) -> Iterator[int]:
    """Numbers of slots at which the curve falls; PROPOSALS of them if there are more."""
    falls = [m for m in wanted if np.isfinite(best[m]) and (m == 0 or best[m] < best[m - 1])]
    if len(falls) > PROPOSALS:
        step = (len(falls) - 1) / (PROPOSALS - 1)
        falls = sorted({falls[round(i * step)] for i in range(PROPOSALS)})
    yield from falls


def along_the_hull(facts: Facts, blocks: list[Block], choices: list[Choices], points: int) -> list[dict[int, int]]:
    """Mirror counts of plans that keep every cut: from "keep everything", the block and option that frees bytes at the fewest seconds each goes next.

    On the lower convex hull of each block's (kept bytes, seconds) this is the fractional optimum of the multiple-choice knapsack, exact but for one block.
    Of equal blocks the first goes first: its bytes are held the longest.
    """
    changes = []
    for k, choice in enumerate(choices):
        hull = _hull(choice)
        changes += [
            ((b.extra_s - a.extra_s) / (a.kept_bytes - b.kept_bytes), k, step, a.kept_bytes - b.kept_bytes) for step, (a, b) in enumerate(zip(hull, hull[1:]))
        ]
    changes.sort(key=lambda change: change[:3])
    total = sum(change[3] for change in changes)
    held = [0] * len(blocks)
    found, freed = [], 0
    for _, k, step, num_bytes in changes:
        held[k] = step + 1
        before, freed = freed, freed + num_bytes
        if freed * points // max(total, 1) > before * points // max(total, 1):
            found.append(list(held))
    hulls = [_hull(choice) for choice in choices]
    crossing = {facts.maker[s] for block in blocks for s in block.crossing}
    return [
        {
            node: mirrors
            for block, hull, position in zip(blocks, hulls, plan)
            for node, mirrors in zip(block.forward, hull[position].counts)
            if node not in crossing
        }
        for plan in found
    ]


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
