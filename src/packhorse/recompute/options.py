"""What one block can keep: a Pareto set of (bytes kept, peak inside, seconds to recompute), found at the level of operators.

The options of a block are choices of which of its nodes keep their results from its last forward run to its backward run; the others are
mirrored there.
Blocks with the same operators and sizes have the same options, which are sought once (Rockmate, Zhao et al. 2023, does the same with an
integer program).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from packhorse.recompute.cuts import Block
from packhorse.recompute.facts import Facts
from packhorse.recompute.mirror import order_of
from packhorse.recompute.simulate import bytes_of, live_nodes, seconds_of

EXHAUSTIVE = 6  # up to so many nodes, all choices are looked at; with more, one path of them from all to nothing
MOST = 24  # options of a block that a dynamic program weighs


@dataclass(frozen=True)
class Option:
    """counts: mirrors of each forward node of the block, by its place in it. All bytes are above what crosses the cut before the block.

    kept_bytes: alive from the forward run to the backward run, without what crosses the next cut. forward_bytes, backward_bytes: peaks of
    the two runs.
    extra_s: seconds that its mirrors take.
    """

    counts: tuple[int, ...]
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    extra_s: float


@dataclass(frozen=True)
class Choices:
    """Of one kind of block: its options, and a forward run that keeps nothing: peak bytes and seconds."""

    options: tuple[Option, ...]
    passing_bytes: int
    forward_s: float


def signature(facts: Facts, block: Block, leaving: frozenset[int]) -> tuple:
    """Equal for blocks with the same operators, sizes, costs and wiring, whose options are therefore the same."""
    number: dict[int, int] = {}

    def of(s: int) -> tuple[int, int, int]:
        return number.setdefault(s, len(number)), facts.sizes[s], facts.space[s]

    nodes = []
    for node in (*block.forward, *block.backward):
        marks = facts.marks.get(node, "")
        nodes.append(
            (
                facts.seconds[node],
                facts.scratch[node],
                facts.draws[node],
                marks,
                tuple(of(s) for s in facts.reads[node]),
                tuple(of(s) for s in facts.makes[node]),
                tuple(number.get(s, -1) for s in facts.takes[node]),
                tuple(s in facts.outputs for s in facts.makes[node]),
            )
        )
    edge = tuple(sorted(number[s] for s in block.crossing if s in number)), tuple(sorted(number[s] for s in leaving if s in number))
    return len(block.forward), tuple(nodes), edge


def choices_of(facts: Facts, block: Block, leaving: frozenset[int]) -> Choices:
    """The options of a block. leaving: storages that cross the cut after it."""
    within = tuple(sorted(block.forward)) + tuple(sorted(block.backward))
    junction = len(block.forward)
    inside = set(block.forward)
    out = frozenset(s for s in leaving if facts.maker[s] in inside)
    makers_out = {facts.maker[s] for s in out}
    base = seconds_of(facts, within, live_nodes(facts, within, out))

    def option(counts: tuple[int, ...]) -> Option:
        order = order_of(facts, dict(zip(block.forward, counts)), within)
        alive = live_nodes(facts, order, out)
        both = bytes_of(facts, order, alive, free=block.crossing)
        kept = _kept(facts, order, alive, junction, out)
        forward = bytes_of(facts, order[:junction], alive[:junction], held=(*kept, *out), free=block.crossing)
        return Option(
            counts,
            sum(facts.sizes[s] for s in kept) + _states(facts, order, junction),
            max((a + e for a, e in zip(forward.arena, forward.external)), default=0),
            max((a + e for a, e in zip(both.arena[junction:], both.external[junction:])), default=0),
            seconds_of(facts, order, alive) - base,
        )

    passing = block.forward
    alone = live_nodes(facts, passing, out)
    through = bytes_of(facts, passing, alone, held=out, free=block.crossing)
    found = [option(counts) for counts in _counts(facts, block, makers_out)]
    return Choices(
        tuple(_pareto(found)),
        max((a + e for a, e in zip(through.arena, through.external)), default=0),
        seconds_of(facts, passing, alone),
    )


def _kept(facts: Facts, order: tuple[int, ...], alive: list[bool], junction: int, out: frozenset[int]) -> list[int]:
    """Storages made before the junction whose first copy is read after it, without those that leave the block."""
    made = {s for position in range(junction) if alive[position] for s in facts.makes[order[position]]} - out
    kept = []
    for position in range(junction, len(order)):
        if alive[position]:
            kept += [s for s in facts.reads[order[position]] if s in made]
            made.difference_update(facts.reads[order[position]])
            made.difference_update(facts.makes[order[position]])
    return kept


def _states(facts: Facts, order: tuple[int, ...], junction: int) -> int:
    """Bytes of saved random states."""
    from packhorse.recompute.mirror import RANDOM_STATE_BYTES

    return RANDOM_STATE_BYTES * len({node for node in order[junction:] if facts.draws[node]})


def _counts(facts: Facts, block: Block, makers_out: set[int]) -> Iterator[tuple[int, ...]]:
    """Choices of mirror counts by place in the block. What leaves the block is made in any case and has none."""
    free = [k for k, node in enumerate(block.forward) if node not in makers_out and any(facts.sizes[s] for s in facts.makes[node])]
    start = [0 if node in makers_out else 1 for node in block.forward]
    if len(free) <= EXHAUSTIVE:
        for choice in product((0, 1, 2) if len(free) <= EXHAUSTIVE - 2 else (0, 1), repeat=len(free)):
            counts = list(start)
            for k, count in zip(free, choice):
                counts[k] = count
            yield tuple(counts)
        return
    saved = [k for k in free if block.forward[k] in facts.saved]
    kept = set(saved)
    yield tuple(0 if k in kept else count for k, count in enumerate(start))
    place = {node: k for k, node in enumerate(block.forward)}
    while kept:
        kept.discard(min(kept, key=lambda k: (_price(facts, block, place, kept, k), k)))
        yield tuple(0 if k in kept else count for k, count in enumerate(start))
    yield from _few_unsaved(free, saved, start)


def _few_unsaved(free: list[int], saved: list[int], start: list[int]) -> Iterator[tuple[int, ...]]:
    """One kept node each, saved or not: half-way values that shorten a recomputation."""
    for kept in free[:64]:
        yield tuple(0 if k == kept else count for k, count in enumerate(start))


def _price(facts: Facts, block: Block, place: dict[int, int], kept: set[int], k: int) -> float:
    """Seconds a byte of dropping one more: its node and those dropped before it that nobody recomputes yet."""
    node = block.forward[k]
    seconds, stack, seen = 0.0, [node], {node}
    while stack:
        v = stack.pop()
        seconds += facts.seconds[v]
        for s in facts.reads[v]:
            u = facts.maker[s]
            if u in place and u not in seen and place[u] not in kept and (u == node or u not in facts.saved):
                seen.add(u)
                stack.append(u)
    return seconds / max(1, sum(facts.sizes[s] for s in facts.makes[node]))


def _pareto(found: list[Option]) -> list[Option]:
    """Options that no other beats in kept bytes, backward peak, forward peak and seconds at once; the MOST spread ones if there are more."""
    best: list[Option] = []
    for option in sorted(found, key=lambda o: (o.extra_s, o.kept_bytes, o.backward_bytes, o.forward_bytes, o.counts)):
        if not any(
            b.kept_bytes <= option.kept_bytes and b.backward_bytes <= option.backward_bytes and b.forward_bytes <= option.forward_bytes for b in best
        ):
            best.append(option)
    if len(best) <= MOST:
        return best
    lowest = [min(best, key=key) for key in (lambda o: (o.kept_bytes, o.extra_s), lambda o: (o.backward_bytes, o.extra_s))]
    step = (len(best) - 1) / (MOST - 3)
    return list(dict.fromkeys([best[round(i * step)] for i in range(MOST - 2)] + lowest))
