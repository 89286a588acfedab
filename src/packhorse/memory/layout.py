"""Buffers -> one offset each, as low as can be found in the time given."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from packhorse.errors import UserError
from packhorse.memory.bounds import lower_bound
from packhorse.memory.buffers import Buffer, Layout
from packhorse.memory.greedy import METHODS, Fixed, best_fit, first_fit
from packhorse.memory.solver import solve
from packhorse.memory.wheel import squeaky_wheel
from packhorse.units import align_up


def lay_out(
    buffers: Sequence[Buffer],
    *,
    alignment: int = 64,
    time_limit_s: float = 5.0,
    capacity: int | None = None,
    num_workers: int = 1,
) -> Layout:
    """The lowest layout found: fast placements first, then the same with promotions, then a search, and each only while the height misses the goal.

    alignment      every offset is a multiple of it; sizes count rounded up to it
    time_limit_s   for all of it; the first fast placement is always made. 0 gives that one
    capacity       bytes that are good enough: the search ends when the height is at most this. Without it the goal is the lower
                   bound. A layout that stays above the capacity is returned all the same; the caller compares the heights
    num_workers    threads of the search

    Deterministic apart from the time limit: two runs that end before it give the same layout, whatever the number of workers.
    Nothing is verified here: check_layout does that.

    Raises UserError for two buffers of one name, an alignment below 1, a negative time limit or capacity, fewer than one worker.
    """
    _check_arguments(buffers, alignment, time_limit_s, capacity, num_workers)
    deadline = time.monotonic() + time_limit_s
    bound = lower_bound(buffers, alignment)
    goal = bound if capacity is None else max(bound, capacity)
    best = greedy_layout(buffers, alignment, goal=goal, deadline=deadline)
    if best.height > goal and time.monotonic() < deadline:
        turned = _layout(buffers, squeaky_wheel(buffers, alignment, goal, deadline), bound, alignment, "squeaky wheel")
        best = turned if turned.height < best.height else best
    left = deadline - time.monotonic()
    if best.height <= goal or left <= 0:
        return best
    start = [best.offsets[b.name] for b in buffers]
    offsets = solve(buffers, start, alignment=alignment, goal=goal, time_limit_s=left, num_workers=num_workers)
    searched = _layout(buffers, offsets, bound, alignment, "solver")
    return searched if searched.height < best.height else best


def greedy_layout(buffers: Sequence[Buffer], alignment: int = 64, *, goal: int | None = None, deadline: float = float("inf")) -> Layout:
    """The lowest of the fast placements in METHODS, or the first no higher than `goal` (default: the lower bound).

    `deadline` as of time.monotonic(); the first placement is made even after it.
    """
    bound = lower_bound(buffers, alignment)
    best: Layout | None = None
    for name, (place, order) in METHODS.items():
        found = _layout(buffers, place(buffers, order(buffers), alignment), bound, alignment, name)
        if best is None or found.height < best.height:
            best = found
        if best.height <= (bound if goal is None else goal) or time.monotonic() > deadline:
            break
    assert best is not None
    return best


def lay_out_around(fixed: Fixed, buffers: Sequence[Buffer], alignment: int = 64) -> Layout:
    """The lowest layout found by fast placements of buffers beside, below and above those that lie at given offsets already.

    Height and lower bound count both; offsets are those of `buffers`.
    """
    taken = [buffer for buffer, _ in fixed]
    end = max((offset + align_up(b.size, alignment) for b, offset in fixed), default=0)
    bound = max(end, lower_bound([*buffers, *taken], alignment))
    best: Layout | None = None
    for name, (place, order) in METHODS.items():
        if place in (first_fit, best_fit) and (best is None or best.height > bound):
            found = _layout(buffers, place(buffers, order(buffers), alignment, fixed), bound, alignment, f"{name}, around")
            found = replace(found, height=max(found.height, end))
            best = found if best is None or found.height < best.height else best
    assert best is not None
    if best.height <= max(bound, end + lower_bound(buffers, alignment)):  # above them it can be no lower
        return best
    above = lay_out(buffers, alignment=alignment, capacity=bound - end)
    return min(best, Layout({n: end + o for n, o in above.offsets.items()}, end + above.height, bound, alignment, "above"), key=lambda x: x.height)


def _layout(buffers: Sequence[Buffer], offsets: Sequence[int], bound: int, alignment: int, method: str) -> Layout:
    height = max((offset + align_up(b.size, alignment) for b, offset in zip(buffers, offsets, strict=True)), default=0)
    return Layout({b.name: offset for b, offset in zip(buffers, offsets, strict=True)}, height, bound, alignment, method)


def _check_arguments(buffers: Sequence[Buffer], alignment: int, time_limit_s: float, capacity: int | None, num_workers: int) -> None:
    repeated = [name for name, count in Counter(b.name for b in buffers).items() if count > 1]
    if repeated:
        raise UserError(f"lay_out: {len(repeated)} names are used by several buffers, {repeated[0]!r} among them; give each its own")
    if alignment < 1:
        raise UserError(f"lay_out(alignment={alignment}): expected 1 or more bytes, for example 64")
    if time_limit_s < 0:
        raise UserError(f"lay_out(time_limit_s={time_limit_s}): expected 0 or more seconds")
    if capacity is not None and capacity < 0:
        raise UserError(f"lay_out(capacity={capacity}): expected 0 or more bytes, or None for as low as possible")
    if num_workers < 1:
        raise UserError(f"lay_out(num_workers={num_workers}): expected 1 or more threads")
