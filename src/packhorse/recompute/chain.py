"""The optimal plan for a chain of blocks under a number of bytes: a dynamic program with nesting. No graph here: bytes and seconds in, decisions out.

Rotor (Beaumont et al. 2019, arXiv:1911.13214): going forward, a block either keeps what its backward run needs (in one of several ways: Rockmate,
Zhao et al. 2023, arXiv:2307.01236), and the rest of the chain is solved with what is left; or the chain runs forward from block i to some k keeping nothing in
between, keeps what crosses the cut before k, solves k .. j, and then solves i .. k anew. With unit costs, one slot a cut and no
options but one this is the binomial checkpointing of Griewank and Walther (2000, Algorithm 799).

    T[i, j](m)  least seconds of blocks i .. j-1, forward and backward, from the cut before i with m slots for all else
    T[i, j](m) = min( min over options o: u_i + r_o + T[i+1, j](m - kept_o - w(i, i+1))       where its peaks fit,
                      min over k: u_i + .. + u_(k-1) + T[k, j](m - w(i, k)) + T[i, k](m) )    where the run to k fits

w(i, k): what the cut before k adds to the one before i. A row of the table is all m at once; parts of the chain that look the same share a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
class Step:
    """One decision. KEEP: block `first` runs in way `choice`. SPLIT: blocks first .. choice-1 pass, and are solved after the rest. level: how often
    these blocks have been run forward before."""

    what: str
    first: int
    last: int
    choice: int
    level: int


class Chain:
    """Links, weight(i, k): slots that the cut before k adds to the one before i; gradient(j): slots of the gradients at the cut before j."""

    def __init__(self, links: Sequence[Link], weights: np.ndarray, gradients: Sequence[int], slots: int):
        self.links, self.weights, self.gradients, self.slots = links, weights, gradients, slots
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
        for j in range(1, n + 1):  # (i, k) come from earlier j; (i+1, j) and (k, j) from the i after this one
            for i in range(j - 1, -1, -1):
                links = self.links[i].kind, self.links[j - 1].kind
                key = (*links, int(self.weights[i, j - 1]), self.gradients[j], int(self.row[i, j - 1]), int(self.row[i + 1, j]))
                number = known.get(key)
                if number is None:
                    number = known[key] = self.num_rows
                    if number == len(self.table):
                        self.table = np.concatenate([self.table, np.empty_like(self.table)])
                    self.table[number] = np.minimum.accumulate(self._solve(i, j))
                    self.num_rows += 1
                self.row[i, j] = number

    def _solve(self, i: int, j: int) -> np.ndarray:
        """Seconds by slots."""
        every = np.arange(self.slots + 1)
        best = np.full(self.slots + 1, np.inf)
        for choice in range(len(self.links[i].ways)):
            np.minimum(best, self._keep(i, j, choice, every), out=best)
        if j - i > 1:
            np.minimum(best, self._splits(i, j, every).min(axis=0), out=best)
        return best

    def _keep(self, i: int, j: int, choice: int, slots: np.ndarray) -> np.ndarray:
        """Seconds for each number of slots when block i keeps what that way says."""
        link, way = self.links[i], self.links[i].ways[choice]
        fits = slots >= max(way.backward, way.forward + self.gradients[j])
        if j == i + 1:
            return np.where(fits, link.forward_s + way.extra_s, np.inf)
        left = slots - way.kept - self.weights[i, i + 1]
        rest = self.table[self.row[i + 1, j], np.maximum(left, 0)]
        return np.where(fits & (left >= 0), link.forward_s + way.extra_s + rest, np.inf)

    def _splits(self, i: int, j: int, slots: np.ndarray) -> np.ndarray:
        """Seconds for each k = i+1 .. j-1 (rows) and number of slots (columns)."""
        weights = self.weights[i, i + 1 : j, None]
        # the run to k passes blocks i .. k-1, the input of each beside the cut before i
        passing = np.maximum.accumulate(self.passing[i : j - 1] + self.weights[i, i : j - 1])[:, None] + self.gradients[j]
        left = slots - weights
        tails = self.table[self.row[i + 1 : j, j][:, None], np.maximum(left, 0)]
        heads = self.table[self.row[i, i + 1 : j][:, None], slots]
        run = (self.seconds[i + 1 : j] - self.seconds[i])[:, None]
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
            ways = [float(self._keep(i, j, choice, here)[0]) for choice in range(len(self.links[i].ways))]
            choice = min(range(len(ways)), key=ways.__getitem__)
            if j - i > 1:
                splits = self._splits(i, j, here)[:, 0]
                if splits.min() < ways[choice]:
                    k = i + 1 + int(splits.argmin())
                    found.append(Step(SPLIT, i, j, k, level))
                    stack.append((i, k, m, level + 1))
                    stack.append((k, j, m - int(self.weights[i, k]), level))
                    continue
            found.append(Step(KEEP, i, j, choice, level))
            if j > i + 1:
                stack.append((i + 1, j, m - self.links[i].ways[choice].kept - int(self.weights[i, i + 1]), level))
        return found
