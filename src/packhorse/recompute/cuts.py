"""Where a forward pass can be cut: a graph as a chain of blocks.

A cut lies before a forward node. What crosses it, made before and read at or after it in the forward pass, is all that the rest of the forward pass
needs: kept, it lets everything between two cuts be computed again. In a chain one value crosses. In a graph that is none (long skips, states of
several layers) several do, and the planner counts what each cut adds to the one before it.
"""

import itertools
from dataclasses import dataclass

from packhorse.recompute.facts import Facts


@dataclass(frozen=True)
class Block:
    """Consecutive forward nodes, and the nodes of the backward pass that work on their gradients. crossing: storages that cross the cut before it."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    crossing: frozenset[int]


@dataclass(frozen=True)
class Crossings:
    """forward: the real forward nodes in order. crossing[p]: storages that cross the cut before forward[p]; size[p] their bytes."""

    forward: tuple[int, ...]
    crossing: tuple[frozenset[int], ...]
    size: tuple[int, ...]


def crossings(facts: Facts) -> Crossings:
    """What crosses each place of the forward pass. Storages of no bytes, and those that live in persistent memory, do not count."""
    forward = tuple(i for i in range(facts.num_nodes) if facts.forward[i] and facts.real[i])
    place = {node: p for p, node in enumerate(forward)}
    last: dict[int, int] = {}
    for p, node in enumerate(forward):
        for s in facts.reads[node]:
            if facts.maker[s] in place:
                last[s] = p
    alive: set[int] = set()
    found, sizes, size = [], [], 0
    dying: dict[int, list[int]] = {}
    for s, p in last.items():
        dying.setdefault(p, []).append(s)
    for p, node in enumerate(forward):
        found.append(frozenset(alive))
        sizes.append(size)
        for s in facts.makes[node]:
            if s in last and last[s] > p and facts.sizes[s]:
                alive.add(s)
                size += facts.sizes[s]
        for s in dying.get(p, ()):
            if s in alive:
                alive.discard(s)
                size -= facts.sizes[s]
    return Crossings(forward, tuple(found), tuple(sizes))


def cut_places(facts: Facts, at: Crossings) -> list[int]:
    """Places p in ascending order: where one value crosses and no fewer bytes do just before or after, or where less crosses than there.
    Begins with 0.

    Of neighbouring places with little work between them (under a third of the mean block's seconds) the one with the fewest bytes stays,
    the later one of
    equals: behind an activation rather than before it.
    """
    n = len(at.forward)
    chosen = []
    for p in range(1, n):
        before, here, after = at.size[p - 1] if p > 1 else at.size[p], at.size[p], at.size[p + 1] if p + 1 < n else 0
        if here and here <= before and (here < after or (here == after and len(at.crossing[p]) == 1)):
            chosen.append(p)
    if not chosen:
        return [0]
    work = [0.0]
    for node in at.forward:
        work.append(work[-1] + facts.seconds[node])
    small = work[-1] / (len(chosen) + 1) / 3
    kept: list[int] = []
    for p in chosen:
        if kept and work[p] - work[kept[-1]] < small:
            if at.size[p] <= at.size[kept[-1]]:
                kept[-1] = p
            continue
        kept.append(p)
    if kept and work[kept[0]] < small:  # little before the first cut: the inputs come again for next to nothing
        kept = kept[1:] if len(kept) > 1 else kept
    return [0, *kept]


def blocks_of(facts: Facts, at: Crossings, places: list[int]) -> list[Block]:
    """The blocks between the places.

    A node of the backward pass belongs to the last block, not after the one that the pass has reached, which holds a forward node that
    reads or makes what
    it reads; one that reads gradients alone to the one reached.
    """
    edges = [*places, len(at.forward)]
    block_of: dict[int, int] = {}
    for b, (start, end) in enumerate(itertools.pairwise(edges)):
        block_of.update((node, b) for node in at.forward[start:end])
    using: dict[int, set[int]] = {}
    for node, b in block_of.items():
        for s in (*facts.reads[node], *facts.makes[node]):
            using.setdefault(s, set()).add(b)
    backward: list[list[int]] = [[] for _ in places]
    reached = len(places) - 1
    for node in range(facts.num_nodes):
        if facts.forward[node] or not facts.real[node]:
            continue
        for s in facts.reads[node]:
            if facts.forward[facts.maker[s]]:
                behind = [b for b in using.get(s, ()) if b <= reached]
                if behind:
                    reached = min(reached, max(behind))
        backward[reached].append(node)
    return [Block(at.forward[a:b], tuple(backward[k]), at.crossing[a] if a else frozenset()) for k, (a, b) in enumerate(itertools.pairwise(edges))]
