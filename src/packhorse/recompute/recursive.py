"""Recursion with mirror counts above 1: k kept values a level, g(n) = k + g(n / (k + 1)). Chen et al. 2016, section 4.4.

k = 1 keeps log2(n) values at once and runs the forward pass about log2(n) times.
"""

import itertools
from math import ceil

from packhorse.recompute.cuts import Crossings, crossings, cut_places
from packhorse.recompute.facts import Facts
from packhorse.recompute.mirror import Order, order_of

KEPT = (1, 2, 3, 5, 8)  # values of k that are tried


def recursive(facts: Facts, limit: int | None = None) -> list[Order]:
    """One plan for each k."""
    at = crossings(facts)
    places = cut_places(facts, at)
    return list(dict.fromkeys(order_of(facts, recursive_counts(facts, at, places, k)) for k in KEPT))


def recursive_counts(facts: Facts, at: Crossings, places: list[int], kept: int) -> dict[int, int]:
    """Mirror counts of the recursion over the blocks between `places`: what crosses a cut of level l has l mirrors, the inside of a block
    one more."""
    edges = [*places, len(at.forward)]
    counts: dict[int, int] = {}
    held: set[int] = set()

    def divide(first: int, last: int, level: int) -> None:
        n = last - first
        if last == len(places) and n == 1:
            return  # the backward pass begins with it
        if n == 1:
            for node in at.forward[edges[first] : edges[last]]:
                if node not in held:
                    counts[node] = max(level, 1)
            return
        pieces = min(kept + 1, n)
        bounds = [first + ceil(i * n / pieces) for i in range(pieces + 1)]
        for b in bounds[1:-1]:
            for s in at.crossing[edges[b]]:
                if facts.maker[s] not in held:
                    held.add(facts.maker[s])
                    counts[facts.maker[s]] = level
        for a, b in itertools.pairwise(bounds):
            divide(a, b, level + 1)

    divide(0, len(places), 0)
    return counts
