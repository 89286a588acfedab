"""Cuts a layout problem into smaller ones whose best layouts add up to a best layout of the whole.

offset                                   1. A buffer alive at the same time as all others may lie at the bottom of a best
  ^  |     | piece |  |  piece   |          layout: it parts the others into those above and those below, and nothing is
  |  |piece+-------+  |          |          lost when the ones below move up by its size and it drops under them.
  |  |     |   c   |  |          |       2. Where no buffer is alive at two neighbouring instants, the two sides do not
  |  +-----+-------+--+----------+          meet and may use the same bytes.
  |  |      a      |  |    b     |       Both again in what is left, until neither applies.
  +-----------------------------------> time
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Boxes:
    """n buffers as arrays: lower, upper, size, each (n,) int64; sizes > 0, in any unit."""

    lower: NDArray[np.int64]
    upper: NDArray[np.int64]
    size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.size)

    def take(self, members: NDArray[np.int64]) -> "Boxes":
        return Boxes(self.lower[members], self.upper[members], self.size[members])


@dataclass(frozen=True)
class Piece:
    """Boxes `members` (m,) of a problem, to be laid out among themselves and then moved up by `base`."""

    members: NDArray[np.int64]
    base: int


def split(boxes: Boxes) -> tuple[dict[int, int], list[Piece]]:
    """-> (offset of each box that is settled at once, the pieces left over)."""
    settled: dict[int, int] = {}
    pieces: list[Piece] = []
    todo = [Piece(np.arange(len(boxes)), 0)] if len(boxes) else []
    while todo:
        piece = todo.pop()
        for members in _apart_in_time(boxes, piece.members):
            base = piece.base
            everywhere = _alive_with_all(boxes, members)
            for i in members[everywhere]:
                settled[int(i)] = base
                base += int(boxes.size[i])
            rest = Piece(members[~everywhere], base)
            if len(rest.members):
                (todo if everywhere.any() else pieces).append(rest)
    return settled, sorted(pieces, key=lambda piece: int(piece.members[0]))


def live_sets(boxes: Boxes) -> list[NDArray[np.int64]]:
    """The sets of boxes alive together that are part of no larger such set, in order of time; each a sorted array of indices.

    A set is complete when a box ends after one has begun, and every maximal set is met this way.
    """
    sets: list[NDArray[np.int64]] = []
    begins = np.unique(boxes.lower)
    for k, time in enumerate(begins):
        alive = (boxes.lower <= time) & (boxes.upper > time)
        following = begins[k + 1] if k + 1 < len(begins) else None
        if following is None or (boxes.upper[alive] <= following).any():
            sets.append(np.flatnonzero(alive))
    return sets


def _apart_in_time(boxes: Boxes, members: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Groups of `members` that share no instant, in order of time; members of a group in ascending order."""
    by_start = members[np.argsort(boxes.lower[members], kind="stable")]
    ends = np.maximum.accumulate(boxes.upper[by_start])
    cuts = np.flatnonzero(boxes.lower[by_start][1:] >= ends[:-1]) + 1
    return [np.sort(group) for group in np.split(by_start, cuts)]


def _alive_with_all(boxes: Boxes, members: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(m,): which of `members` overlap all the others in time."""
    last_start = boxes.lower[members].max()
    first_end = boxes.upper[members].min()
    return (boxes.upper[members] > last_start) & (boxes.lower[members] < first_end)
