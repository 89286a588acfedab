"""Constraint programming (OR-tools CP-SAT): is there a layout no higher than a given capacity?

One integer offset per box and, for each maximal set of boxes alive together, the constraint that their byte ranges do not
overlap. These one-dimensional constraints propagate more than the equivalent rectangles, whose time never varies.

Three ways to search. Which one is quick differs by orders of magnitude from problem to problem and seed to seed, so the caller
restarts often:
    LIFESPAN   lowest possible offset next, at that offset; of equals the longest lifespan, shaken by the seed, first
    RANDOM     the same with equals in random order
    AUTOMATIC  CP-SAT's own search, the best on problems with few boxes alive at a time

Asking for a layout within a capacity, and restarting, did far better on the minimalloc instances than minimising the height: the
objective says nothing about where to search. Hints are not given: a layout that is too high is no start for one that fits.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from packhorse.memory.pieces import Boxes, live_sets


class Search(Enum):
    LIFESPAN = "lifespan"
    RANDOM = "random"
    AUTOMATIC = "automatic"


@dataclass(frozen=True)
class Answer:
    """`offsets` (n,) of a layout within the capacity or None; `impossible`: proven that there is none."""

    offsets: NDArray[np.int64] | None
    impossible: bool = False


def fit(boxes: Boxes, capacity: int, search: Search, *, seed: int, max_conflicts: int, time_limit_s: float, solver: cp_model.CpSolver) -> Answer:
    """Looks for a layout no higher than `capacity`, for at most `max_conflicts` conflicts and `time_limit_s` seconds, on one thread.

    `solver` is a fresh one; its `stop_search` may be called from another thread to give up early.
    Deterministic for a seed and `max_conflicts`, unless the time limit or `stop_search` comes first.
    """
    if len(boxes) and boxes.size.max() > capacity:
        return Answer(None, impossible=True)
    model = cp_model.CpModel()
    offsets = [model.new_int_var(0, capacity - int(size), "") for size in boxes.size]
    ranges = [model.new_fixed_size_interval_var(offset, int(size), "") for offset, size in zip(offsets, boxes.size, strict=True)]
    for members in live_sets(boxes):
        model.add_no_overlap([ranges[i] for i in members])
    if search is not Search.AUTOMATIC:
        order = _order(boxes, search, np.random.default_rng(seed))
        model.add_decision_strategy([offsets[i] for i in order], cp_model.CHOOSE_LOWEST_MIN, cp_model.SELECT_MIN_VALUE)
        solver.parameters.search_branching = cp_model.FIXED_SEARCH
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_number_of_conflicts = max_conflicts
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(np.array([solver.value(offset) for offset in offsets], np.int64))
    return Answer(None, impossible=status == cp_model.INFEASIBLE)


def _order(boxes: Boxes, search: Search, generator: np.random.Generator) -> NDArray[np.intp]:
    if search is Search.RANDOM:
        return generator.permutation(len(boxes))
    lifespan = (boxes.upper - boxes.lower) * np.exp(generator.normal(0, 0.5, len(boxes)))
    return np.argsort(-lifespan, kind="stable")
