"""Search for the lowest layout, for when the fast placements of greedy.py leave a gap above the lower bound.

    buffers -> boxes (sizes in their greatest common divisor) -> pieces (pieces.py) -> each piece lower and lower -> offsets

The height is that of the highest piece, so that one is worked on until it reaches the goal, is proven lowest, or time is up. For a
piece the question is always "is there a layout no higher than this target?", put to a fixed list of attempts with fixed seeds.
The first target is the goal itself, since the lower bound is nearly always met; after a failure the next is half way up to the
best height known. Effort comes in levels, each about twice the one before: beam searches (beam.py), quick even where they fail,
halve the distance again and again; then CP-SAT restarts (cpsat.py), slow but better without room to spare, try two targets.

Deterministic apart from the time limit: attempts end after counted work, and of attempts that run side by side the first in
the list wins, whichever ends first. So the number of workers changes the time, not the answer.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from packhorse.memory.beam import beam_search
from packhorse.memory.buffers import Buffer
from packhorse.memory.cpsat import Answer, Search, fit
from packhorse.memory.greedy import METHODS, first_fit
from packhorse.memory.pieces import Boxes, live_sets, split
from packhorse.units import align_up

# Above this many terms a CP-SAT model takes longer to load than it saves.
MAX_TERMS = 50_000
EASY_TERMS = 4_500  # up to here one is worth asking at once
# The tables of the beam search hold a number for each pair of a box and a live set, and of a box and a new partial layout;
# with more than this many they would take more memory than a planner should.
MAX_CELLS = 20_000_000


@dataclass
class _PieceState:
    """What is known of one piece while it is worked on; heights in units, counted from the piece's base."""

    boxes: Boxes
    members: NDArray[np.int64]
    base: int
    offsets: NDArray[np.int64]
    height: int  # of `offsets`
    proven: int  # no layout of this piece is lower
    level: int = 0  # of effort, for the next time it is worked on

    @property
    def top(self) -> int:
        return self.base + self.height


@dataclass(frozen=True)
class _Beam:
    width: int
    branching: int
    seed: int


@dataclass(frozen=True)
class _Constraint:
    search: Search
    max_conflicts: int
    seed: int


def solve(buffers: Sequence[Buffer], start: Sequence[int], *, alignment: int, goal: int, time_limit_s: float, num_workers: int) -> list[int]:
    """Offsets (n,), multiples of `alignment`, of the lowest layout found; never higher than `start`.

    start   offsets (n,) of a valid layout
    goal    bytes: the search ends when the height is at most this
    Ends at the goal, when the height is proven lowest, after about `time_limit_s` seconds, or at once where the highest piece is too
    large to search (MAX_TERMS, MAX_CELLS).
    """
    deadline = time.monotonic() + time_limit_s
    sizes = np.array([align_up(b.size, alignment) for b in buffers], np.int64)
    members = np.flatnonzero(sizes)
    if len(members) == 0:
        return [0] * len(buffers)
    # Any layout can be pushed down until each offset is a sum of sizes, so their common divisor may be the unit.
    unit = gcd(*sizes[members].tolist())
    boxes = Boxes(
        np.array([b.lower for b in buffers], np.int64)[members],
        np.array([b.upper for b in buffers], np.int64)[members],
        sizes[members] // unit,
    )
    settled, parts = split(boxes)
    found = np.zeros(len(boxes), np.int64)
    found[list(settled)] = list(settled.values())
    before = np.array(start, np.int64)[members]
    states = [_first_state(boxes.take(part.members), part.members, part.base, before[part.members], deadline) for part in parts]
    while states and time.monotonic() < deadline:
        highest = max(states, key=lambda state: state.top)
        if highest.top * unit <= goal or highest.height == highest.proven or _is_too_large(highest.boxes):
            break
        _work(highest, goal // unit - highest.base, deadline, num_workers)
    for state in states:
        found[state.members] = state.base + state.offsets
    offsets = np.zeros(len(buffers), np.int64)
    offsets[members] = found * unit
    if (found + boxes.size).max() * unit >= (before + sizes[members]).max():
        return list(start)
    return offsets.tolist()


def _first_state(boxes: Boxes, members: NDArray[np.int64], base: int, before: NDArray[np.int64], deadline: float) -> _PieceState:
    """The piece laid out by the best of the fast methods, as far as time allows."""
    buffers = [Buffer(str(i), int(boxes.lower[i]), int(boxes.upper[i]), int(boxes.size[i])) for i in range(len(boxes))]
    load = max(int(boxes.size[(boxes.lower <= t) & (boxes.upper > t)].sum()) for t in np.unique(boxes.lower))
    best = np.array(first_fit(buffers, np.argsort(before, kind="stable").tolist()), np.int64)
    for place, order in METHODS.values():
        if (best + boxes.size).max() == load or time.monotonic() > deadline:
            break
        offsets = np.array(place(buffers, order(buffers), 1), np.int64)
        if (offsets + boxes.size).max() < (best + boxes.size).max():
            best = offsets
    return _PieceState(boxes, members, base, best, int((best + boxes.size).max()), proven=load)


def _is_too_large(boxes: Boxes) -> bool:
    sets = live_sets(boxes)
    return len(boxes) * len(sets) > MAX_CELLS and sum(len(members) for members in sets) > MAX_TERMS


def _work(state: _PieceState, goal: int, deadline: float, num_workers: int) -> None:
    """One level of effort: lowers `height`, raises `proven`, or neither."""
    beams, constraints = _beams(state.boxes, state.level), _constraints(state.boxes, state.level)
    state.level += 1
    # Beams halve the distance until it is small against the height, constraints once.
    for attempts, most_targets in ((beams, state.height.bit_length()), (constraints, 2)):
        low = target = max(goal, state.proven)
        for k in range(most_targets if attempts else 0):
            is_close = state.height - low < state.height // 64
            if low >= state.height or (k and is_close and attempts is beams) or time.monotonic() > deadline:
                break
            low = _ask(state, target, attempts, low, deadline, num_workers)
            target = (low + state.height) // 2


def _ask(state: _PieceState, target: int, attempts: Sequence[_Beam | _Constraint], low: int, deadline: float, num_workers: int) -> int:
    """Looks for a layout of the piece no higher than `target` -> the lowest target worth asking for next, if `low` was that before."""
    answer = _try(state.boxes, target, attempts, deadline, num_workers)
    if answer.offsets is not None:
        state.offsets = answer.offsets
        state.height = int((answer.offsets + state.boxes.size).max())
        return low
    if answer.impossible:
        state.proven = target + 1
    return target + 1


def _try(boxes: Boxes, capacity: int, attempts: Sequence[_Beam | _Constraint], deadline: float, num_workers: int) -> Answer:
    """The answer of the first attempt in the list that has one; `num_workers` run at a time."""
    settled = threading.Event()
    solvers: list[cp_model.CpSolver] = []

    def run(index: int) -> Answer:
        left = deadline - time.monotonic()
        if settled.is_set() or left <= 0:
            return Answer(None)
        attempt = attempts[index]
        if isinstance(attempt, _Beam):
            return Answer(
                beam_search(
                    boxes,
                    capacity,
                    width=attempt.width,
                    branching=attempt.branching,
                    seed=attempt.seed,
                    stop=lambda: settled.is_set() or time.monotonic() > deadline,
                )
            )
        solver = cp_model.CpSolver()
        solvers.append(solver)
        if settled.is_set():  # since it was last looked at, in which case nobody stops this solver
            return Answer(None)
        return fit(boxes, capacity, attempt.search, seed=attempt.seed, max_conflicts=attempt.max_conflicts, time_limit_s=left, solver=solver)

    with ThreadPoolExecutor(num_workers) as pool:
        # In the order of the list: an attempt is cut short only when one before it has settled the question.
        for answer in pool.map(run, range(len(attempts))):
            if answer.offsets is not None or answer.impossible:
                settled.set()
                for solver in solvers:
                    solver.stop_search()
                return answer
    return Answer(None)


def _beams(boxes: Boxes, level: int) -> list[_Beam]:
    """One quick one at level 0, then three that get wider; none where their tables would be too large."""
    if len(boxes) * len(live_sets(boxes)) > MAX_CELLS:
        return []
    widest = max(1, MAX_CELLS // (12 * len(boxes)))
    shapes = ((64, 5), (128, 5), (64, 12)) if level else ((16, 5),)
    return [_Beam(min(width << max(level - 1, 0), widest), branching, seed=max(level - 1, 0)) for width, branching in shapes]


def _constraints(boxes: Boxes, level: int) -> list[_Constraint]:
    """Short ones at level 0, twice as long at each next one; none yet, or none at all, for a large model."""
    terms = sum(len(members) for members in live_sets(boxes))
    if terms > min(EASY_TERMS << level, MAX_TERMS):
        return []
    # A conflict costs more in a larger model; the attempts of a level are to take about equally long.
    conflicts = max(25, 250 * 1500 // max(terms, 1500)) << level
    return [
        _Constraint(Search.LIFESPAN, conflicts, seed=2 * level),
        _Constraint(Search.AUTOMATIC, 2 * conflicts, seed=2 * level),
        _Constraint(Search.RANDOM, conflicts, seed=2 * level),
        _Constraint(Search.LIFESPAN, conflicts, seed=2 * level + 1),
        _Constraint(Search.AUTOMATIC, 10 * conflicts, seed=2 * level + 1),
        _Constraint(Search.RANDOM, conflicts, seed=2 * level + 1),
    ]
