"""The optimal plan: a dynamic program over the chain of blocks, each with a Pareto set of options found at the level of operators.

The program is solved for all numbers of bytes at once, in a few resolutions (fine steps matter where little memory is left), so that its answers
are a curve from "keep everything" to the least there is. Each distinct answer is a proposal; the planner judges them on the exact layout.
"""

from collections.abc import Iterator
from math import ceil, sqrt

import numpy as np

from packhorse.recompute.chain import KEEP, Chain, Link, Way
from packhorse.recompute.chen import chen
from packhorse.recompute.cuts import Block, blocks_of, crossings, cut_places
from packhorse.recompute.facts import Facts
from packhorse.recompute.improve import improve
from packhorse.recompute.mirror import Order, order_of
from packhorse.recompute.options import Choices, choices_of, signature
from packhorse.recompute.recursive import recursive
from packhorse.recompute.rules import blocks as by_blocks
from packhorse.recompute.rules import cheap, sqrt_n
from packhorse.recompute.simulate import bytes_of

SLOTS = 160  # steps into which a range of bytes is divided
SHARES = (1.0, 0.25, 0.08)  # of the keep-everything peak: the ranges
PROPOSALS = 28  # of each range at most
WORK = 6e7  # table entries that may be looked at: a longer chain is split at fewer places


def optimal(facts: Facts, limit: int | None = None) -> list[Order]:
    """The plans on the curve of the dynamic program, and those of the simpler methods, so that none of them is ever better."""
    plain = order_of(facts, {})
    found = bytes_of(facts, plain)
    blocks, choices, kinds = _blocks(facts)
    every = _spacing(kinds)
    orders = [plain, *cheap(facts), *by_blocks(facts), *sqrt_n(facts), *chen(facts), *recursive(facts)]
    starts: list[dict[int, int]] = [{}]
    for share in SHARES:
        unit = max(1, int(found.peak * share) // SLOTS)
        chain = chain_of(facts, blocks, choices, kinds, unit, every)
        for slots in _spread(chain.best()):
            starts.append(counts_of(facts, blocks, choices, chain, slots))
    orders += [order_of(facts, counts) for counts in starts[1:]] + improve(facts, starts)
    return list(dict.fromkeys(orders))


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


def _spacing(kinds: list[int]) -> int:
    """Blocks from one place where the chain may be split to the next: as few as WORK allows."""
    return max(1, ceil(sqrt(_parts(kinds) * len(kinds) / 3 * SLOTS / WORK)))


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


def chain_of(facts: Facts, blocks: list[Block], choices: list[Choices], kinds: list[int], unit: int, every: int) -> Chain:
    """The chain in slots of `unit` bytes, rounded to the nearest: what is a little over or under is judged later."""

    def slots(num_bytes: int) -> int:
        return round(num_bytes / unit)

    n = len(blocks)
    weights = np.zeros((n + 1, n + 1), dtype=np.int64)
    for i in range(n):
        for k in range(i + 1, n):
            weights[i, k] = slots(sum(facts.sizes[s] for s in blocks[k].crossing - blocks[i].crossing))
    gradients = [slots(sum(facts.sizes[s] for s in b.crossing)) for b in blocks] + [0]
    links = []
    for kind, choice in zip(kinds, choices):
        ways = tuple(Way(slots(o.kept_bytes), slots(o.forward_bytes), slots(o.backward_bytes), o.extra_s) for o in choice.options)
        links.append(Link(kind, choice.forward_s, slots(choice.passing_bytes), ways))
    return Chain(links, weights, gradients, SLOTS, every)


def _spread(best: np.ndarray) -> Iterator[int]:
    """Numbers of slots at which the curve falls; PROPOSALS of them if there are more."""
    falls = [m for m in range(len(best)) if np.isfinite(best[m]) and (m == 0 or best[m] < best[m - 1])]
    if len(falls) > PROPOSALS:
        step = (len(falls) - 1) / (PROPOSALS - 1)
        falls = sorted({falls[round(i * step)] for i in range(PROPOSALS)})
    yield from falls


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
