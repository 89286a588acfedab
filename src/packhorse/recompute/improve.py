"""Local search over mirror counts, for graphs that are small enough to look at many plans: a graph that is no chain has few cuts or none.

Keeps an archive of plans that no other beats in bytes and seconds at once, and tries for each of them every change of one node's count by one
(Pareto local search, Paquete et al. 2004). It does not look at the budget, so that what it finds is the same for all of them.
"""

from packhorse.recompute.facts import Facts
from packhorse.recompute.mirror import Order, order_of
from packhorse.recompute.simulate import bytes_of, live_nodes, seconds_of

NODES_LOOKED_AT = 120_000  # nodes of all plans that are tried
DEEPEST = 3

Counts = tuple[int, ...]


def improve(facts: Facts, starts: list[dict[int, int]]) -> list[Order]:
    """Orders that the search finds from `starts`, mirror counts by node; nothing where one plan is already too much to look at often."""
    nodes = [n for n in range(facts.num_nodes) if facts.forward[n] and facts.real[n] and any(facts.sizes[s] for s in facts.makes[n])]
    size = sum(facts.real)
    if size * len(nodes) > NODES_LOOKED_AT:
        return []
    archive: dict[Counts, tuple[int, float, Order]] = {}
    tried: set[Counts] = set()
    orders: set[Order] = set()
    waiting: list[Counts] = []
    looked_at = 0

    def look(counts: Counts) -> None:
        nonlocal looked_at
        if counts in tried:
            return
        tried.add(counts)
        order = order_of(facts, dict(zip(nodes, counts)))
        looked_at += len(order)
        if order in orders:  # that one was kept or beaten, and so is this
            return
        orders.add(order)
        alive = live_nodes(facts, order)
        peak, seconds = bytes_of(facts, order, alive).peak, seconds_of(facts, order, alive)
        if any(p <= peak and s <= seconds for p, s, _ in archive.values()):
            return
        for worse in [c for c, (p, s, _) in archive.items() if peak <= p and seconds <= s]:
            del archive[worse]
        archive[counts] = peak, seconds, order
        waiting.append(counts)

    for start in starts:
        look(tuple(min(start.get(n, 0), DEEPEST) for n in nodes))
    while waiting and looked_at < NODES_LOOKED_AT:
        base = waiting.pop(0)
        if base not in archive:
            continue
        for k in range(len(nodes)):
            for change in (-1, 1):
                if 0 <= base[k] + change <= DEEPEST:
                    look((*base[:k], base[k] + change, *base[k + 1 :]))
    return [order for _, _, order in archive.values()]
