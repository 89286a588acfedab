"""Beam search: builds layouts from the bottom up, keeping the most promising partial layouts of each length.

A partial layout knows for each unplaced box its floor: the top of all placed boxes alive at the same time. Boxes are placed in
order of non-decreasing offset, each on its floor. For a set L of boxes alive together, of which some are unplaced,

    slack(L) = capacity - (lowest floor of the unplaced) - (sizes of the unplaced)

is the room that may still be wasted there. A partial layout with a negative slack is dropped; of the others those with the
least sum over L of 1 / (slack + softness) are kept: room left where it is scarce counts most.

A box whose floor lies at or above the top that another box could have is not next: placing the other first loses nothing.
The slack of a live set and this rule are those of Moffitt 2023, "MiniMalloc: A Lightweight Memory Allocator for
Hardware-Accelerated Machine Learning", which searches depth first.

Falls short: it proves nothing, since dropped partial layouts are lost, and where capacity equals the lower bound at many
instants it often ends without a layout (cpsat.py is better there).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from packhorse.memory.pieces import Boxes, live_sets


def beam_search(boxes: Boxes, capacity: int, *, width: int, branching: int, seed: int, stop: Callable[[], bool]) -> NDArray[np.int64] | None:
    """Offsets (n,) of a layout no higher than `capacity`, or None where the search found none or `stop()` came true.

    width      partial layouts kept at each length
    branching  boxes tried next in each: those of the lowest floors, the longest lifespans first among equals
    seed       0: lifespans as they are; else each multiplied by a random factor, for another try
    Deterministic for a seed, apart from `stop`.
    """
    n = len(boxes)
    if n and boxes.size.max() > capacity:
        return None
    sets = live_sets(boxes)
    overlaps = (boxes.lower[:, None] < boxes.upper) & (boxes.lower < boxes.upper[:, None])  # (n, n)
    load = np.zeros((n, len(sets)), np.int64)  # size of a box where it is alive
    for k, members in enumerate(sets):
        load[members, k] = boxes.size[members]
    generator = np.random.default_rng(seed)
    tie = _tie_break(boxes, generator if seed else None)
    tags = generator.integers(1, 1 << 62, (2, n))  # a partial layout's sum of tags tells equal ones
    softness = max(1.0, capacity / 256)
    placed = np.int64(capacity + 1)  # no unplaced box keeps a floor as high as this mark

    floors = np.zeros((1, n), np.int64)  # one row per partial layout, P of them
    unplaced_load = load.sum(0, keepdims=True)  # (P, sets)
    offsets = np.zeros((1, n), np.int64)
    tag = np.zeros(1, np.int64)
    for _ in range(n):
        if stop():
            return None
        parent, box = _next_boxes(floors, boxes.size, tie, branching)
        offset = floors[parent, box]
        child_floors = np.where(overlaps[box], np.maximum(floors[parent], (offset + boxes.size[box])[:, None]), floors[parent])
        child_floors[np.arange(len(box)), box] = placed
        child_load = unplaced_load[parent] - load[box]
        slack = capacity - child_load - _lowest_floors(child_floors, sets)
        open_sets = child_load > 0
        child_tag = tag[parent] + tags[0, box] + offset * tags[1, box]  # wraps around; only equality counts
        reaches = (child_floors + boxes.size <= capacity) | (child_floors == placed)
        alive = np.flatnonzero(reaches.all(1) & ((slack >= 0) | ~open_sets).all(1))
        if len(alive) == 0:
            return None
        score = np.where(open_sets[alive], 1 / (np.maximum(slack[alive], 0) + softness), 0).sum(1)
        best_first = alive[np.argsort(score, kind="stable")]
        _, first_of_equals = np.unique(child_tag[best_first], return_index=True)
        kept = best_first[np.sort(first_of_equals)[:width]]
        offsets = offsets[parent[kept]]
        offsets[np.arange(len(kept)), box[kept]] = offset[kept]
        floors, unplaced_load, tag = child_floors[kept], child_load[kept], child_tag[kept]
    return offsets[0]


def _tie_break(boxes: Boxes, generator: np.random.Generator | None) -> NDArray[np.float64]:
    """(n,) in [0, 1): smaller for the longer lifespan."""
    lifespan = (boxes.upper - boxes.lower).astype(np.float64)
    if generator is not None:
        lifespan *= np.exp(generator.normal(0, 0.5, len(boxes)))
    return np.argsort(np.argsort(-lifespan, kind="stable")) / len(boxes)


def _next_boxes(
    floors: NDArray[np.int64], size: NDArray[np.int64], tie: NDArray[np.float64], branching: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """floors (P, n) -> (partial layout (C,), box to place next (C,)) of C children."""
    num_partial, n = floors.shape
    # A placed box never has the lowest top: every unplaced one ends at or below the capacity, and the mark lies above it.
    lowest_top = (floors + size).min(1, keepdims=True)
    key = np.where(floors < lowest_top, floors + tie, np.inf)
    if n > branching:
        box = np.argpartition(key, branching, axis=1)[:, :branching]
    else:
        box = np.broadcast_to(np.arange(n), (num_partial, n))
    parent = np.repeat(np.arange(num_partial), box.shape[1])
    box = box.ravel()
    allowed = np.isfinite(key[parent, box])
    return parent[allowed], box[allowed]


def _lowest_floors(floors: NDArray[np.int64], sets: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """floors (C, n) -> (C, sets): the lowest floor in each live set."""
    by_box = np.ascontiguousarray(floors.T)  # so that picking the boxes of a set copies whole rows
    lowest = np.empty((len(sets), len(floors)), np.int64)
    for k, members in enumerate(sets):
        by_box[members].min(0, out=lowest[k])
    return lowest.T
