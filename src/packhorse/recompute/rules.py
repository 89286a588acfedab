"""Rules that need no search: keep everything, drop what is cheap, k = sqrt(n) segments, every block."""

import re
from math import ceil, sqrt

from packhorse.recompute.cuts import Crossings, crossings, cut_places
from packhorse.recompute.facts import Facts
from packhorse.recompute.mirror import Order, order_of

# Kept by `cheap`: products, convolutions, attention. Chen et al. 2016, section 4.2: "keep conv outputs, drop batch norm, activation and pooling".
# And what other ranks send.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_slow_conv2d_forward", "_scaled_dot_product", "embedding", "grouped_mm", "_grouped_mm")
_NUMBERED = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")  # the outermost numbered module of a path
DEAR = (*_PRODUCTS, "tensor_", "part_embedding", "vocab_stats")


def none(facts: Facts, limit: int | None = None) -> list[Order]:
    """Keep everything."""
    return [order_of(facts, {})]


def is_dear(op: str) -> bool:
    """A product, a convolution, attention, or what comes from other ranks."""
    return op.split(".")[1].startswith(DEAR)


def cheap(facts: Facts, limit: int | None = None) -> list[Order]:
    """Drop what costs no product: norms, activations, pooling, dropout, sums. Chen et al. 2016, section 4.2."""
    nodes = facts.graph.nodes
    return [order_of(facts, {n: 1 for n in range(facts.num_nodes) if facts.forward[n] and facts.real[n] and not is_dear(nodes[n].op)})]


def blocks(facts: Facts, limit: int | None = None) -> list[Order]:
    """Keep what crosses the cuts, drop all else: what people do by hand, block by block. Where modules are numbered (the blocks of a transformer), no
    more than one cut for each."""
    at = crossings(facts)
    return [order_of(facts, segments(facts, at, one_a_module(facts, at, cut_places(facts, at))))]


def one_a_module(facts: Facts, at: Crossings, places: list[int]) -> list[int]:
    """Of the places in one numbered module ("blocks.3") the first; all that are in none."""
    nodes = facts.graph.nodes
    found: dict[str | int, int] = {}
    for p in places:
        numbered = _NUMBERED.match(nodes[at.forward[p]].module)
        found.setdefault(numbered[0] if numbered else p, p)
    return sorted(found.values())


def sqrt_n(facts: Facts, limit: int | None = None) -> list[Order]:
    """n blocks in about sqrt(n) segments of equal length; what crosses between two is kept. Chen et al. 2016, section 4.1."""
    at = crossings(facts)
    places = cut_places(facts, at)
    return [order_of(facts, segments(facts, at, evenly(places, ceil(sqrt(len(places))))))]


def evenly(places: list[int], num_segments: int) -> list[int]:
    """`num_segments` of the places, so that the segments differ by one block at most (nine layers in five segments: 2 2 2 2 1)."""
    n, k = len(places), min(num_segments, len(places))
    return [places[ceil(i * n / k)] for i in range(k)]


def segments(facts: Facts, at: Crossings, places: list[int]) -> dict[int, int]:
    """Mirror counts: everything once but what crosses the cuts, and the last segment, which the backward pass begins with."""
    kept = {facts.maker[s] for p in places for s in at.crossing[p]}
    last = at.forward[places[-1] :] if len(places) > 1 else ()
    return dict.fromkeys(set(at.forward) - kept - set(last), 1)
