"""What one tp rank holds of a tensor that is cut: which elements of the whole, and where they lie in its own memory. No torch.

In the order of memory a dense tensor is (outer, lines, inner), `lines` being the dim that is cut. A part is (outer, width, inner) in the same order:
its lines of the whole tensor, one range after another, then padding. Where elements are counted, padding does not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from packhorse.parallel.split import Split

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """The part of the `rank`-th. shape, strides: of the whole tensor, dense. dim: the one that is cut; ranges: [start, end) of it that each rank has,
    in the order in which it holds them. width: of the dim as this rank holds it, padding included."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dim: int
    ranges: tuple[Ranges, ...]
    rank: int
    width: int

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dims, from the one with the largest stride on."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: (-self.strides[dim], dim)))

    @property
    def place(self) -> int:
        """Where the dim that is cut stands in this order."""
        return self.order.index(self.dim)

    @property
    def outer(self) -> int:
        return prod(self.shape[dim] for dim in self.order[: self.place])

    @property
    def inner(self) -> int:
        return prod(self.shape[dim] for dim in self.order[self.place + 1 :])

    @property
    def row(self) -> int:
        """Elements of the whole tensor in one of `outer` rows."""
        return self.shape[self.dim] * self.inner

    @property
    def lines(self) -> int:
        """How many of the dim this rank has, without padding."""
        return self._lines(self.rank)

    @property
    def count(self) -> int:
        """Elements of the whole tensor that are in the part."""
        return self.outer * self.lines * self.inner

    @property
    def padding(self) -> int:
        """Elements of the part that are in no tensor."""
        return self.outer * (self.width - self.lines) * self.inner

    @property
    def first(self) -> int:
        """Elements in the parts of the ranks before."""
        return self.outer * self.inner * sum(self._lines(rank) for rank in range(self.rank))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the part in memory."""
        return (*self.shape[: self.dim], self.width, *self.shape[self.dim + 1 :])

    @property
    def local_strides(self) -> tuple[int, ...]:
        """Of the part in memory: dense, the dims in the order of the whole tensor."""
        strides, step = [0] * len(self.shape), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= max(1, self.local_shape[dim])
        return tuple(strides)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(start, end, at): elements [start, end) of a row of the whole tensor are elements at, at + 1, ... of a row of the part."""
        found, at = [], 0
        for start, end in self.ranges[self.rank]:
            found.append((start * self.inner, end * self.inner, at * self.inner))
            at += end - start
        return found

    def before(self, index: int) -> int:
        """Elements without padding among the first `index` of the part's memory."""
        rows, rest = divmod(index, max(1, self.width * self.inner))
        return rows * self.lines * self.inner + min(rest, self.lines * self.inner)

    def _lines(self, rank: int) -> int:
        return sum(end - start for start, end in self.ranges[rank])


def part_of(shape: tuple[int, ...], strides: tuple[int, ...], split: Split, degree: int, rank: int) -> Part:
    """What the `rank`-th of `degree` tp ranks has of a dense tensor."""
    ranges = tuple(tuple((start, end) for start, end in split.held(r, degree) if start < end) for r in range(degree))
    return Part(shape, strides, split.dim, ranges, rank, split.size // degree)


def blocks(first: int, end: int, row: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements [first, end) of a matrix with rows of `row` elements, as at most three blocks (top, bottom, low, high): [low, high) of each of the
    rows [top, bottom)."""
    while first < end:
        top, low = divmod(first, row)
        bottom = end // row if low == 0 and end - first >= row else top + 1
        high = row if low == 0 and end - first >= row else min(row, low + end - first)
        yield top, bottom, low, high
        first = (bottom - 1) * row + high


def gaps(ranges: tuple[Ranges, ...], size: int) -> str:
    """What is wrong with ranges that are to hold each of `size` lines once, in words; "" if nothing is."""
    at = 0
    for start, end in sorted(pair for those in ranges for pair in those):
        if start != at or end <= start:
            return f"[{start}, {end}) {'overlaps' if start < at else 'leaves a gap after' if start > at else 'is empty, after'} [0, {at})"
        at = end
    return "" if at == size else f"they end at {at} of {size}"
