"""The plan with a budget of Chen et al. 2016 (arXiv:1604.06174): Algorithm 3 and its search (appendix A).

The paper's errata: Algorithm 3 as printed forgets the last stage in y and returns x = y = 0 where no stage outgrows the budget; here the last stage
counts. Its authors' code searches a slightly different grid; this is the text's.
"""

from math import sqrt

from packhorse.recompute.cuts import Crossings, crossings, cut_places
from packhorse.recompute.facts import Facts
from packhorse.recompute.mirror import Order, order_of
from packhorse.recompute.rules import segments

GRID = 6  # plans tried on [B / sqrt(2), sqrt(2) B]


def split(facts: Facts, at: Crossings, candidates: list[int], budget: float) -> tuple[int, int, list[int]]:
    """Algorithm 3: (x, y, places of the cuts). x: bytes kept between stages; y: bytes of the largest stage.

    Walks the forward pass, adds up the bytes of what it makes, and cuts at the first candidate place after they exceed the budget.
    """
    chosen, allowed = [0], set(candidates)
    stage = x = y = 0
    for p, node in enumerate(at.forward):
        if p in allowed and p and stage > budget:
            x += at.size[p]
            y = max(y, stage)
            stage = 0
            chosen.append(p)
        stage += sum(facts.sizes[s] for s in facts.makes[node])
    return x, max(y, stage), chosen


def chen(facts: Facts, limit: int | None = None) -> list[Order]:
    """The plans of the search: B = 0, B = sqrt(x y), and a grid around it. The planner's exact layout judges them."""
    at = crossings(facts)
    candidates = cut_places(facts, at)
    x, y, every = split(facts, at, candidates, 0)
    guess = sqrt(x * y)
    budgets = [guess] + [guess / sqrt(2) * 2 ** (i / (GRID - 1)) for i in range(GRID)]
    cuts = [every] + [split(facts, at, candidates, b)[2] for b in budgets]
    return [order_of(facts, segments(facts, at, list(chosen))) for chosen in dict.fromkeys(tuple(c) for c in cuts)]
