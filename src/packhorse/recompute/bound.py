"""A lower bound on what a budget costs: no plan within it takes fewer extra seconds.

When the backward pass begins, each value of the forward pass that it still reads is in memory, or it is computed again later, at the cost of its
node at least, or it waits elsewhere. So the dropped nodes free what the kept ones exceed the limit by, and the cheapest way to do that, nodes
divisible, is a fractional knapsack. The same holds at the start of any later node of the backward pass; the bound is the highest of a few such
instants.

What may wait elsewhere makes the limit wider, and what all tensor parallel ranks have takes a slice. A link carries no more than its rate in the
seconds that the whole step takes, which are those of the computation that keeps everything and the extra ones: the bound is the least number of
seconds that pays for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from packhorse.device.links import Link
from packhorse.recompute.facts import Facts

INSTANTS = 16
HALVINGS = 40


@dataclass(frozen=True)
class Elsewhere:
    """Where values may wait besides. host_bytes: of the host, link: the way there (None: it takes no time). tp: ranks that may have slices of what
    all of them have. seconds: of the computation of a step that keeps everything."""

    host_bytes: int = 0
    link: Link | None = None
    tp: int = 1
    seconds: float = 0.0

    def bytes_within(self, extra_seconds: float) -> int:
        """What can have left for the host in a step that takes so much longer."""
        if self.link is None:
            return self.host_bytes
        return min(self.host_bytes, int(self.link.bytes_per_s * (self.seconds + extra_seconds)))


NOWHERE = Elsewhere()


def least_extra_seconds(facts: Facts, limit: int, elsewhere: Elsewhere = NOWHERE) -> float:
    """limit: bytes that arena and external tensors may take together."""
    instants = _instants(facts, elsewhere.tp)
    low, high = 0.0, _cheapest(instants, limit + elsewhere.bytes_within(0.0))
    if elsewhere.link is None or not high:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _cheapest(instants, limit + elsewhere.bytes_within(middle)) <= middle:
            high = middle
        else:
            low = middle
    return low


def _instants(facts: Facts, tp: int) -> list[list[tuple[int, float]]]:
    """(bytes, seconds) of the nodes whose values are read from some node of the backward pass on, the cheapest bytes first, for a few such nodes."""
    backward = [n for n in range(facts.num_nodes) if facts.real[n] and not facts.forward[n]]
    chosen = backward[:: max(1, len(backward) // INSTANTS)]
    last: dict[int, int] = {}
    for n in backward:
        last.update((s, n) for s in facts.reads[n] if facts.forward[facts.maker[s]])
    found = []
    for instant in chosen:
        needed: dict[int, int] = {}  # node -> bytes of its values that are read from here on
        for s, n in last.items():
            if n >= instant:
                maker = facts.maker[s]
                if facts.marks.get(maker) == "drop":  # it is computed again in any case
                    continue
                ranks = tp if facts.graph.nodes[maker].replicated else 1
                needed[maker] = needed.get(maker, 0) + facts.sizes[s] // ranks
        cheap = sorted(needed, key=lambda node: facts.seconds[node] / max(needed[node], 1))
        found.append([(needed[node], facts.seconds[node]) for node in cheap])
    return found


def _cheapest(instants: Sequence[Sequence[tuple[int, float]]], limit: int) -> float:
    """Seconds that it takes at least, at the worst of the instants, to free what is above the limit."""
    best = 0.0
    for values in instants:
        over, seconds = sum(size for size, _ in values) - limit, 0.0
        for size, takes in values:
            if over <= 0:
                break
            seconds += takes * (min(1.0, over / size) if size else 0.0)
            over -= size
        best = max(best, seconds)
    return best
