"""A lower bound on recomputation: no plan within a budget takes fewer extra seconds.

When the backward pass begins, each value of the forward pass that it still reads either is in memory or is computed again later, at the cost of
its node at least. So the dropped nodes free what the kept ones exceed the limit by, and the cheapest way to do that, nodes divisible, is a fractional
knapsack. The same holds at the start of any later node of the backward pass; the bound is the highest of a few such instants.
"""

from packhorse.recompute.facts import Facts

INSTANTS = 16


def least_extra_seconds(facts: Facts, limit: int) -> float:
    """limit: bytes that arena and external tensors may take together."""
    backward = [n for n in range(facts.num_nodes) if facts.real[n] and not facts.forward[n]]
    chosen = backward[:: max(1, len(backward) // INSTANTS)]
    last: dict[int, int] = {}
    for n in backward:
        last.update((s, n) for s in facts.reads[n] if facts.forward[facts.maker[s]])
    best = 0.0
    for instant in chosen:
        needed: dict[int, int] = {}  # node -> bytes of its values that are read from here on
        for s, n in last.items():
            if n >= instant:
                needed[facts.maker[s]] = needed.get(facts.maker[s], 0) + facts.sizes[s]
        over = sum(needed.values()) - limit
        seconds = 0.0
        for node in sorted(needed, key=lambda node: facts.seconds[node] / max(needed[node], 1)):
            if over <= 0:
                break
            share = min(1.0, over / needed[node]) if needed[node] else 0.0
            seconds += share * facts.seconds[node]
            over -= needed[node]
        best = max(best, seconds)
    return best
