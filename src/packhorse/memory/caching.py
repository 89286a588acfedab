"""A caching allocator like PyTorch's on CUDA, simulated: what it asks of the device for a sequence of allocations, and where it gives up. No torch.

It takes segments from the device, cuts blocks from them and keeps what is freed:

  request      sizes are rounded up to 512 bytes
  pools        requests of at most 1 MiB live in small segments of 2 MiB; others in segments of 20 MiB, and from 10 MiB on in one made for the
               request, rounded up to 2 MiB. Blocks of one pool never serve the other
  best fit     the smallest free block of the pool that is large enough; of several the one at the lowest address
  split        the rest of a block stays free if it is at least 512 bytes in the small pool, more than 1 MiB in the large one; else it goes along
  merge        a freed block joins free neighbours of its segment
  no room      where the device has no room for a new segment, every segment that is wholly free goes back to it; then the request fails

The defaults of PyTorch (`max_split_size_mb`, `expandable_segments` and the like unset), one stream. Blocks never move, so memory that is free but in
pieces, or in the wrong pool, cannot be used. Source: PyTorch's notes on CUDA memory management.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packhorse.errors import UserError
from packhorse.units import align_up

MIB = 2**20
ROUND = 512
SMALL_REQUEST, SMALL_SEGMENT = MIB, 2 * MIB
LARGE_REQUEST, LARGE_SEGMENT = 10 * MIB, 20 * MIB
SEGMENT_ROUND = 2 * MIB
LEAST_REST = MIB  # of a large block, the rest that is too small to be split off


@dataclass(frozen=True, slots=True)
class Request:
    """At `time` (any clock that does not run backwards, for people to read), `name` is allocated with `num_bytes`, or is freed."""

    time: int
    frees: bool
    name: str
    num_bytes: int


@dataclass(frozen=True)
class Failure:
    """Out of memory: a request that found no block, nor room for a segment of `segment_bytes`.

    All in bytes, after wholly free segments went back. free = cached + unsegmented: what is not allocated; cached: of that, in free blocks of
    segments; unsegmented: what the device has left. largest_cached: the largest of those blocks that the request could have had (of its pool).
    """

    request: Request
    segment_bytes: int
    free_bytes: int
    cached_bytes: int
    unsegmented_bytes: int
    largest_cached_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What became of a sequence of requests. peak_allocated: bytes of blocks in use, peak_reserved: bytes of segments, each at its own highest.
    failure: where it ended, None if it got through."""

    peak_allocated: int
    peak_reserved: int
    failure: Failure | None


@dataclass(slots=True, eq=False)
class Block:
    """`size` bytes at `address`. before, after: its neighbours in the same segment."""

    address: int
    size: int
    is_small: bool
    is_free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def key(self) -> tuple[int, int]:
        """Order of best fit."""
        return self.size, self.address


class CachingAllocator:
    """Begins with no segment, on a device of `capacity` bytes. Addresses are those of a device that hands out room anywhere: segments are never
    next to each other, and its own memory does not fragment."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.allocated = 0  # bytes of blocks in use
        self.reserved = 0  # bytes of segments
        self.used: dict[int, Block] = {}  # address -> block
        self.free_keys: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # is_small -> in order of best fit
        self.free_blocks: dict[int, Block] = {}
        self.next_address = 0

    def allocate(self, num_bytes: int) -> int | None:
        """Address of a new block, None if there is no room. num_bytes > 0."""
        size = align_up(num_bytes, ROUND)
        small = size <= SMALL_REQUEST
        block = self._best_fit(size, small) or self._new_segment(size, small)
        if block is None:
            return None
        rest = block.size - size
        if rest >= ROUND if small else rest > LEAST_REST:
            other = Block(block.address + size, rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._add_free(other)
        block.is_free = False
        self.used[block.address] = block
        self.allocated += block.size
        return block.address

    def free(self, address: int) -> None:
        """Gives back the block at `address`."""
        block = self.used.pop(address)
        self.allocated -= block.size
        block.is_free = True
        if block.after is not None and block.after.is_free:
            self._join(block, self._take_free(block.after))
        if block.before is not None and block.before.is_free:
            block = self._join(self._take_free(block.before), block)
        self._add_free(block)

    def empty_cache(self) -> None:
        """Every segment that is one free block goes back to the device."""
        for block in [b for b in self.free_blocks.values() if b.before is None and b.after is None]:
            self.reserved -= self._take_free(block).size

    def largest_cached(self, small: bool) -> int:
        """Bytes of the largest free block of a pool."""
        return self.free_keys[small][-1][0] if self.free_keys[small] else 0

    def _best_fit(self, size: int, small: bool) -> Block | None:
        keys = self.free_keys[small]
        at = bisect_left(keys, (size, -1))
        return self._take_free(self.free_blocks[keys[at][1]]) if at < len(keys) else None

    def _new_segment(self, size: int, small: bool) -> Block | None:
        wanted = segment_bytes(size)
        if self.reserved + wanted > self.capacity:
            self.empty_cache()
        if self.reserved + wanted > self.capacity:
            return None
        block = Block(self.next_address, wanted, small)
        self.next_address += wanted
        self.reserved += wanted
        return block

    def _join(self, left: Block, right: Block) -> Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _add_free(self, block: Block) -> None:
        insort(self.free_keys[block.is_small], block.key)
        self.free_blocks[block.address] = block

    def _take_free(self, block: Block) -> Block:
        keys = self.free_keys[block.is_small]
        del keys[bisect_left(keys, block.key)]
        return self.free_blocks.pop(block.address)


def segment_bytes(num_bytes: int) -> int:
    """Of the segment that is taken from the device for a request of so many bytes."""
    size = align_up(num_bytes, ROUND)
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else align_up(size, SEGMENT_ROUND)


def simulate(requests: Iterable[Request], capacity: int) -> Outcome:
    """Serves the requests one after another on a device of `capacity` bytes, up to the first that fails. Requests of no bytes need no memory.

    Raises UserError for a name that is allocated twice, and for one that is freed and was not allocated.
    """
    device = CachingAllocator(capacity)
    homes: dict[str, int | None] = {}
    peak_allocated = peak_reserved = 0
    for request in requests:
        if request.frees != (request.name in homes):
            seen = "freed, and is not allocated" if request.frees else "allocated, and is allocated already"
            raise UserError(f"caching allocator: at time {request.time} {request.name!r} is {seen}; expected allocations and frees of a name in turn")
        if request.frees:
            address = homes.pop(request.name)
            if address is not None:
                device.free(address)
            continue
        address = device.allocate(request.num_bytes) if request.num_bytes else None
        if address is None and request.num_bytes:
            return Outcome(peak_allocated, peak_reserved, _failure(device, request))
        homes[request.name] = address
        peak_allocated, peak_reserved = max(peak_allocated, device.allocated), max(peak_reserved, device.reserved)
    return Outcome(peak_allocated, peak_reserved, None)


def _failure(device: CachingAllocator, request: Request) -> Failure:
    small = align_up(request.num_bytes, ROUND) <= SMALL_REQUEST
    return Failure(
        request,
        segment_bytes(request.num_bytes),
        device.capacity - device.allocated,
        device.reserved - device.allocated,
        device.capacity - device.reserved,
        device.largest_cached(small),
    )


def sufficient_capacity(requests: Sequence[Request]) -> int:
    """A capacity, in whole 2 MiB, with which the requests get through, while with 2 MiB less they do not. Found by bisection: an allocator that must
    give segments back now and then takes another course, so among larger capacities there may be some that do not suffice."""
    enough, short = simulate(requests, 2**62).peak_reserved, 0
    while enough - short > SEGMENT_ROUND:
        middle = align_up((enough + short) // 2, SEGMENT_ROUND)
        if simulate(requests, middle).failure is None:
            enough = middle
        else:
            short = middle
    return enough
