"""Bytes between ranks: the collectives of packhorse over torch.distributed's sends and receives, counted.

One algorithm for each collective (docs/design.md): every rank sends each other rank what that one owns, and sums go in the order of the ranks,
whatever the backend. On gloo this is also two to three times as fast as its own reduce-scatter and all-gather, which are made of other collectives.

Collectives run one after another in a thread of their own, in the order in which they are started, beside the computation.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import PeerError
from packhorse.parallel.pieces import chunk_elements, own_pieces
from packhorse.runtime.beside import Beside


class Transport(Beside):
    """The ranks of one axis of the mesh, and their collectives beside the computation. group: a process group of them, this process is its `rank`-th.

    sent_bytes: handed to it so far. members: what errors call the ranks, by default 0, 1, ...
    """

    def __init__(self, group: Any, num_ranks: int, rank: int, look_around: Callable[[], None] = lambda: None, members: Sequence[int] | None = None):
        super().__init__("collectives", look_around)
        self.group, self.num_ranks, self.rank = group, num_ranks, rank
        self.members = members or range(num_ranks)
        self.others = [r for r in range(num_ranks) if r != rank]
        self.sent_bytes = 0

    # -- collectives ------------------------------------------------------------------------------------------------------------------

    def all_gather(self, own: Tensor, whole: Tensor) -> None:
        """own (n,) or () of every rank -> whole (ranks * n,), in the order of the ranks."""
        own = own.view(-1)
        parts = whole.view(self.num_ranks, own.numel())
        works = self._exchange([own] * len(self.others), [parts[r] for r in self.others])
        parts[self.rank].copy_(own)
        _finish(works)

    def all_gather_others(self, own: Tensor, before: Tensor, after: Tensor) -> None:
        """own (n,) of every other rank -> those of lower ranks, those of higher ranks, each in order."""
        n = own.numel()
        parts = [before[r * n : (r + 1) * n] if r < self.rank else after[(r - self.rank - 1) * n : (r - self.rank) * n] for r in self.others]
        _finish(self._exchange([own] * len(self.others), parts))

    def reduce(
        self, tensors: Sequence[Tensor], outs: Sequence[Tensor], bucket: Tensor, offsets: Sequence[int], shard: int, whole: bool, everywhere: bool
    ) -> None:
        """Sums over ranks of tensors that lie at element `offsets` in a run cut into shards of `shard` elements.

        outs: for each of own_pieces its sum, flat; with `whole` tensors like the given ones, in which the sums go to where the pieces lie. They may
        be the given ones. everywhere: the sums of all ranks' pieces, in whole outs. bucket: memory for what is sent and received, as
        parallel/pieces.py says how much.
        """
        sizes = [tensor.numel() for tensor in tensors]
        pieces = [own_pieces(offsets, sizes, shard, r) for r in range(self.num_ranks)]
        lengths = [sum(n for _, _, n in those) for those in pieces]
        flat, targets = [memory_order(tensor) for tensor in tensors], [memory_order(out) for out in outs]
        outgoing = [_Stream([flat[i][a : a + n] for i, a, n in those]) for those in pieces]
        wanted = [_Stream([targets[i][a : a + n] for i, a, n in those]) for those in pieces] if whole else []
        own, result = outgoing[self.rank], wanted[self.rank] if whole else _Stream(targets)
        dtype = flat[0].dtype
        step = chunk_elements(offsets, sizes, shard, self.num_ranks, dtype.itemsize)
        space = bucket.view(dtype).view(-1, step)
        for start in range(0, max(lengths), step):
            sent = [outgoing[r].chunk(start, step, space[k]) for k, r in enumerate(self.others)]
            # a rank that gets less than the others still writes the bucket's last byte, which the plan has counted
            got = [space[len(self.others) + k][step - max(0, min(step, own.length - start)) :] for k in range(len(self.others))]
            _finish(self._exchange(sent, got))
            for mine, total, part in result.beside(own, start, step):
                self._sum(mine, total, [theirs[part] for theirs in got])
        if not everywhere:
            return
        for start in range(0, max(lengths), step):
            out = result.chunk(start, step, space[0])
            got = [space[1 + k][: max(0, min(step, lengths[r] - start))] for k, r in enumerate(self.others)]
            _finish(self._exchange([out] * len(self.others), got))
            for r, theirs in zip(self.others, got):
                wanted[r].fill(start, theirs)

    def summing(self, x: Tensor, out: Tensor, bucket: Tensor, shard: int, everywhere: bool) -> Callable[[], None]:
        """The collective that sums up one dense tensor over ranks, cut in the order of its memory into `shard` elements for each rank, the last ones
        fewer. It can run any number of times: what is done in Python is done here, since it takes longer than sending.

        out: this rank's sums; with `everywhere` those of all, like x, which it may be. bucket as for `reduce`: while a chunk is summed up, the next
        one comes into its other half. Sums go to where they belong without a copy.
        """
        parts = self._cut(x, shard)
        sums = self._cut(out, shard) if everywhere else [memory_order(out)] * self.num_ranks
        mine, total = parts[self.rank], sums[self.rank]
        step = chunk_elements((0,), (x.numel(),), shard, self.num_ranks, x.element_size())
        halves = bucket.view(x.dtype).view(2, len(self.others), step)
        chunks = []
        for start in range(0, shard, step):
            those = slice(start, start + step)
            got = [row[: mine[those].numel()] for row in halves[start // step % 2]]
            chunks.append((self._exchange_of([parts[r][those] for r in self.others], got), mine[those], total[those], got))
        last = self._exchange_of([total] * len(self.others), [sums[r] for r in self.others] if everywhere else [])
        end = bucket[-1:]

        def run() -> None:
            end.zero_()  # the arena's canary sees how far the bucket reaches, also where this rank receives less than others
            ahead = self._begin(chunks[0][0]) if chunks else []
            for number, (_, own, target, theirs) in enumerate(chunks, 1):
                works = ahead
                if number < len(chunks):
                    ahead = self._begin(chunks[number][0])
                _finish(works)
                self._sum(own, target, theirs)
            if everywhere:
                _finish(self._begin(last))

        return run

    def _cut(self, tensor: Tensor, shard: int) -> list[Tensor]:
        flat = memory_order(tensor)
        return [flat[r * shard : (r + 1) * shard] for r in range(self.num_ranks)]

    def _sum(self, mine: Tensor, total: Tensor, theirs: list[Tensor]) -> None:
        """total = the sum of all ranks' contributions, in the order of the ranks. total may be `mine`."""
        if not self.rank:
            torch.add(mine, theirs[0], out=total)
            rest = theirs[1:]
        else:
            first = theirs[0]  # memory of the bucket: free to add up in
            for other in theirs[1 : self.rank]:
                first.add_(other)
            torch.add(first, mine, out=total)
            rest = theirs[self.rank :]
        for other in rest:
            total.add_(other)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[tuple[int, Any]]:
        """Starts one send to, and one receive from, each other rank; what is empty is left out. Both sides know the sizes. Returns (the rank at the
        other end, as errors call it; what is under way)."""
        return self._begin(self._exchange_of(sent, received))

    def _exchange_of(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> "_Exchange":
        # the group's own methods: those of torch.distributed ask each time which ranks it has
        receives = [(self.members[r], partial(self.group.recv, [tensor], r, 0)) for r, tensor in zip(self.others, received) if tensor.numel()]
        sends = [(self.members[r], partial(self.group.send, [tensor], r, 0)) for r, tensor in zip(self.others, sent) if tensor.numel()]
        return _Exchange(receives + sends, sum(tensor.numel() * tensor.element_size() for tensor in sent))

    def _begin(self, exchange: "_Exchange") -> list[tuple[int, Any]]:
        self.sent_bytes += exchange.sent_bytes
        return [(member, _told(member, call)) for member, call in exchange.calls]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """calls: (the rank at the other end, starts a send or a receive). sent_bytes: of all sends."""

    calls: Sequence[tuple[int, Callable[[], Any]]]
    sent_bytes: int


class _Stream:
    """Flat pieces one after another, as if they were one tensor."""

    def __init__(self, pieces: list[Tensor]):
        self.pieces = pieces
        self.length = sum(piece.numel() for piece in pieces)

    def parts(self, start: int, count: int) -> list[tuple[Tensor, int]]:
        """(part of a piece, its place in the chunk) of the chunk [start, start + count)."""
        found, at = [], 0
        for piece in self.pieces:
            low, high = max(start, at), min(start + count, at + piece.numel())
            if low < high:
                found.append((piece[low - at : high - at], low - start))
            at += piece.numel()
        return found

    def chunk(self, start: int, count: int, space: Tensor) -> Tensor:
        """The chunk as one tensor: a part of a piece where it lies in one, else copied together into `space`."""
        parts = self.parts(start, count)
        if len(parts) == 1:
            return parts[0][0]
        for part, at in parts:
            space[at : at + part.numel()].copy_(part)
        return space[: sum(part.numel() for part, _ in parts)]

    def fill(self, start: int, source: Tensor) -> None:
        """Writes a chunk."""
        for part, at in self.parts(start, source.numel()):
            part.copy_(source[at : at + part.numel()])

    def beside(self, other: "_Stream", start: int, count: int) -> list[tuple[Tensor, Tensor, slice]]:
        """(part of the other stream, the same part of this one, its place in the chunk). Both are cut alike."""
        pairs = zip(other.parts(start, count), self.parts(start, count), strict=True)
        return [(mine, total, slice(at, at + mine.numel())) for (mine, at), (total, _) in pairs]


def memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as a flat view, in the order in which its elements lie."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _finish(works: list[tuple[int, Any]]) -> None:
    for r, work in works:
        _told(r, work.wait)


def _told(rank: int, call: Callable[[], Any]) -> Any:
    """What a send or receive returns; its failure with the rank at the other end."""
    try:
        return call()
    except RuntimeError as error:
        raise PeerError(rank, _plain(error)) from error


def _plain(error: Exception) -> str:
    """What a transport says, without the place in its own source and its advice."""
    said = str(error).strip().splitlines()[0]
    return re.sub(r"^\[[^\]]*\] ", "", said).partition(". This is")[0]
