"""Which offsets are taken while a lifespan lasts: a segment tree over time, for problems of very many buffers.

time      0 . . . . . . . 8          A node stands for a span of time that halves from one level to the next. `throughout` are the offsets of
node 1    [--------------)           buffers that take all of its span, noted at the fewest nodes that make up their lifespan; `sometime` those of
nodes 2,3 [------)[------)           all buffers in its span. What a lifespan meets is `sometime` of the nodes that make it up and `throughout` of the
...                                  nodes above them: a handful of sets, each of few intervals where buffers lie gapless.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from packhorse.memory.buffers import Buffer

# A set of offsets: begin, end, begin, end, ... in ascending order, without touching intervals.
Intervals = list[int]


class Occupied:
    """Begins empty. Times are those at which one of `buffers` begins: two lifespans meet where one of them begins."""

    def __init__(self, buffers: Sequence[Buffer]):
        self.begins = sorted({b.lower for b in buffers})
        self.num_leaves = 1 << max(len(self.begins) - 1, 0).bit_length()
        self.throughout: list[Intervals | None] = [None] * (2 * self.num_leaves)
        self.sometime: list[Intervals | None] = [None] * (2 * self.num_leaves)

    def beside(self, buffer: Buffer) -> Intervals:
        """Offsets taken at some instant of the buffer's lifespan."""
        low, high = self._leaves(buffer)
        found = [taken for node in _cover(low, high) if (taken := self.sometime[node])]
        found += [taken for node in _above(low, high - 1) if (taken := self.throughout[node])]
        if not found:
            return []
        found.sort(key=len)
        union = list(found.pop())
        for taken in found:
            for k in range(0, len(taken), 2):
                _add(union, taken[k], taken[k + 1])
        return union

    def add(self, buffer: Buffer, begin: int, end: int) -> None:
        """The buffer lies at offsets [begin, end)."""
        low, high = self._leaves(buffer)
        for node in _cover(low, high):
            self._note(self.throughout, node, begin, end)
            self._note(self.sometime, node, begin, end)
        for node in _above(low, high - 1):
            self._note(self.sometime, node, begin, end)

    def _leaves(self, buffer: Buffer) -> tuple[int, int]:
        return self.num_leaves + bisect_left(self.begins, buffer.lower), self.num_leaves + bisect_left(self.begins, buffer.upper)

    def _note(self, table: list[Intervals | None], node: int, begin: int, end: int) -> None:
        taken = table[node]
        if taken is None:
            table[node] = [begin, end]
        else:
            _add(taken, begin, end)


def _cover(low: int, high: int) -> Iterator[int]:
    """The fewest nodes that make up leaves [low, high)."""
    while low < high:
        if low & 1:
            yield low
            low += 1
        if high & 1:
            high -= 1
            yield high
        low >>= 1
        high >>= 1


def _above(first: int, last: int) -> Iterator[int]:
    """The nodes above leaf `first` or leaf `last`, each once."""
    first >>= 1
    last >>= 1
    while first:
        yield first
        if last != first:
            yield last
        first >>= 1
        last >>= 1


def _add(taken: Intervals, begin: int, end: int) -> None:
    """The union with [begin, end), in place."""
    i, j = bisect_left(taken, begin), bisect_right(taken, end)
    taken[i:j] = [begin] * (i % 2 == 0) + [end] * (j % 2 == 0)
