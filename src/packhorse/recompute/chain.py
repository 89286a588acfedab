"""The optimal plan for a chain of blocks under a number of bytes: a dynamic program with nesting. No graph here: bytes and seconds in, decisions out.

Rotor (Beaumont et al. 2019, arXiv:1911.13214): going forward, a block either keeps what its backward run needs (in one of several ways: Rockmate,
Zhao et al. 2023, arXiv:2307.01236), and the rest of the chain is solved with what is left; or the chain runs forward from block i to some
k keeping nothing in
between, keeps what crosses the cut before k, solves k .. j, and then solves i .. k anew. With unit costs, one slot a cut and no
options but one this is the binomial checkpointing of Griewank and Walther (2000, Algorithm 799).

    T[i, j](m)  least seconds of blocks i .. j-1, forward and backward, from the cut before i with m slots for all else
    T[i, j](m) = min( min over options o: u_i + r_o + T[i+1, j](m - kept_o - w(i, i+1))       where its peaks fit,
                      min over k: u_i + .. + u_(k-1) + T[k, j](m - w(i, k)) + T[i, k](m) )    where the run to k fits

w(i, k): what the cut before k adds to the one before i. A row of the table is all m at once; parts of the chain that look the same share a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

KEEP, SPLIT = "keep", "split"


@dataclass(frozen=True)
class Way:
    """One way for a block to run forward for the last time. In slots, and seconds of recomputation."""

    kept: int
    forward: int
    backward: int
    extra_s: float


@dataclass(frozen=True)
class Link:
    """One block: seconds and peak of a forward run that keeps nothing, and its ways. kind: equal for equal blocks."""

    kind: int
    forward_s: float
    passing: int
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class _Ways:
    """The ways of one kind of block as columns."""

    kept: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    extra_s: np.ndarray


@dataclass(frozen=True)
class Step:
    """One decision. KEEP: block `first` runs in way `choice`. SPLIT: blocks first .. choice-1 pass, and are solved after the rest. level: how often
    these blocks have been run forward before."""

    what: str
    first: int
    last: int
    choice: int
    level: int


class Chain:
    """Links, weights[i, k]: slots that the cut before k adds to the one before i; gradients[j]: slots of the gradients at the cut before j.

    every: the chain may be split before each so-manieth block only, which divides the work by the square of it. Any block may keep what it
    likes all the
    same.
    """

    def __init__(self, links: Sequence[Link], weights: np.ndarray, gradients: Sequence[int], slots: int, every: int = 1):
        self.splits = np.arange(every, len(links), every)
        self.links, self.weights, self.gradients, self.slots = links, weights, gradients, slots
        self.ways = {link.kind: _columns(link.ways) for link in links}
        self.passing = np.array([link.passing for link in links])
        self.seconds = np.concatenate([[0.0], np.cumsum([link.forward_s for link in links])])
        self.row = np.full((len(links) + 1, len(links) + 1), -1)  # (i, j) -> row of the table
        self.table = np.empty((64, slots + 1))
        self.num_rows = 0
        self._fill()

    def best(self) -> np.ndarray:
        """Least seconds of the whole chain for each number of slots, 0 .. slots; inf where there is no way."""
        return self.table[self.row[0, len(self.links)]]

    def _fill(self) -> None:
        n = len(self.links)
        known: dict[tuple, int] = {}
        before = 0
        for j in [*self.splits.tolist(), n]:  # (i, k) come from earlier j; (i+1, j) and (k, j) from the i after this one
            for i in range(j - 1, -1, -1):
                new = range(max(i, before), j)
                links = (self.links[i].kind, *(self.links[l].kind for l in new))
                key = (links, self.weights[i, new.start : j].tobytes(), self.gradients[j], int(self.row[i, before]), int(self.row[i + 1, j]))
                number = known.get(key)
                if number is None:
                    number = known[key] = self.num_rows
                    if number == len(self.table):
                        self.table = np.concatenate([self.table, np.empty_like(self.table)])
                    self.table[number] = np.minimum.accumulate(self._solve(i, j))
                    self.num_rows += 1
                self.row[i, j] = number
            before = j

    def _solve(self, i: int, j: int) -> np.ndarray:
        """Seconds by slots."""
        every = np.arange(self.slots + 1)
        best = self._keeps(i, j, every).min(axis=0)
        ks = self._ks(i, j)
        return np.minimum(best, self._split(i, j, ks, every).min(axis=0)) if len(ks) else best

    def _ks(self, i: int, j: int) -> np.ndarray:
        """Where blocks i .. j-1 may be split."""
        return self.splits[np.searchsorted(self.splits, i, "right") : np.searchsorted(self.splits, j, "left")]

    def _keeps(self, i: int, j: int, slots: np.ndarray) -> np.ndarray:
        """Seconds for each way of block i (rows) and number of slots (columns)."""
        ways = self.ways[self.links[i].kind]
        fits = slots >= np.maximum(ways.backward, ways.forward + self.gradients[j])
        seconds = self.links[i].forward_s + ways.extra_s
        if j == i + 1:
            return np.where(fits, seconds, np.inf)
        left = slots - ways.kept - self.weights[i, i + 1]
        return np.where(fits & (left >= 0), seconds + self.table[self.row[i + 1, j]][np.maximum(left, 0)], np.inf)

    def _split(self, i: int, j: int, ks: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Seconds for each k (rows) and number of slots (columns)."""
        # the run to k passes blocks i .. k-1, the input of each beside the cut before i
        passing = np.maximum.accumulate(self.passing[i : j - 1] + self.weights[i, i : j - 1])[ks - 1 - i, None] + self.gradients[j]
        left = slots - self.weights[i, ks, None]
        tails = self.table[self.row[ks, j, None], np.maximum(left, 0)]
        heads = self.table[self.row[i, ks, None], slots]
        run = (self.seconds[ks] - self.seconds[i])[:, None]
        return np.where((left >= 0) & (slots >= passing), run + tails + heads, np.inf)

    def steps(self, slots: int) -> list[Step]:
        """The decisions of the whole chain with so many slots, in the order in which they are met."""
        found: list[Step] = []
        stack = [(0, len(self.links), slots, 0)]
        while stack:
            i, j, m, level = stack.pop()
            row = self.table[self.row[i, j]]
            while m and row[m - 1] == row[m]:  # the fewest slots that do as well
                m -= 1
            here = np.array([m])
            ways = self._keeps(i, j, here)[:, 0]
            choice = int(ways.argmin())
            ks = self._ks(i, j)
            if len(ks):
                splits = self._split(i, j, ks, here)[:, 0]
                if splits.min() < ways[choice]:
                    k = int(ks[splits.argmin()])
                    found.append(Step(SPLIT, i, j, k, level))
                    stack.append((i, k, m, level + 1))
                    stack.append((k, j, m - int(self.weights[i, k]), level))
                    continue
            found.append(Step(KEEP, i, j, choice, level))
            if j > i + 1:
                stack.append((i + 1, j, m - self.links[i].ways[choice].kept - int(self.weights[i, i + 1]), level))
        return found


def _columns(ways: Sequence[Way]) -> _Ways:
    return _Ways(*(np.array([getattr(way, field.name) for way in ways])[:, None] for field in fields(Way)))
