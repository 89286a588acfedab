"""The simulated caching allocator: sequences worked out by hand, and what holds for every sequence."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import UserError
from packhorse.memory.caching import CachingAllocator, Failure, Request, segment_bytes, simulate, sufficient_capacity

pytestmark = pytest.mark.pure
MIB = 2**20
PLENTY = 2**40


def allocated(capacity, *sizes):
    """An allocator that has served the sizes, and their addresses."""
    device = CachingAllocator(capacity)
    return device, [device.allocate(size) for size in sizes]


def test_sizes_are_rounded_and_segments_depend_on_them():
    for size, block, segment in (
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # leaves 2 MiB - 512
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # would leave less than 1 MiB: goes along
        (11 * MIB, 12 * MIB, 12 * MIB),  # would leave exactly 1 MiB: goes along
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # leaves 512 bytes more
    ):
        device, _ = allocated(PLENTY, size)
        assert (device.allocated, device.reserved, segment_bytes(size)) == (block, segment, segment), size


def test_a_small_block_is_split_down_to_512_bytes():
    device, (first, second, third) = allocated(PLENTY, MIB, MIB - 512, 512)
    assert (first, second, third) == (0, MIB, 2 * MIB - 512) and device.reserved == device.allocated == 2 * MIB


def test_pools_do_not_serve_each_other():
    device, (_, large) = allocated(PLENTY, 512, 2 * MIB)
    device.free(large)
    assert device.reserved == 22 * MIB
    device.allocate(MIB)  # of the 2 MiB segment, though 20 MiB are free in the other
    device.allocate(MIB)  # one that does not fit there any more: a second small segment
    assert device.reserved == 24 * MIB


def test_the_smallest_hole_that_fits_then_the_lowest_address():
    device, (four, _, three, _, other, _) = allocated(PLENTY, 4 * MIB, 2 * MIB, 3 * MIB, 2 * MIB, 3 * MIB, 6 * MIB)
    assert device.reserved == 20 * MIB  # full
    for address in (four, other, three):
        device.free(address)
    assert device.allocate(3 * MIB) == three == 6 * MIB
    assert device.allocate(3 * MIB) == other == 11 * MIB
    assert device.allocate(3 * MIB) == four == 0  # its last MiB goes along
    assert device.allocated == device.reserved


def test_freed_blocks_join_their_neighbours():
    device, (a, b, c) = allocated(20 * MIB, 6 * MIB, 6 * MIB, 6 * MIB)  # 2 MiB are left at the end
    device.free(a)
    device.free(c)
    assert device.largest_cached(small=False) == 8 * MIB and device.allocate(9 * MIB) is None
    device.free(b)
    assert device.largest_cached(small=False) == 20 * MIB
    assert device.allocate(20 * MIB) == 0 and device.reserved == 20 * MIB


def test_free_segments_go_back_when_the_device_is_full():
    device, (a, b, _) = allocated(32 * MIB, 12 * MIB, 14 * MIB, 512)
    assert device.reserved == 28 * MIB
    device.free(a)
    assert device.allocate(20 * MIB) is None and device.reserved == 16 * MIB  # 12 MiB went back, in vain
    device.free(b)
    assert device.allocate(20 * MIB) is not None and device.reserved == 22 * MIB


def make(*names_and_sizes):
    return [Request(0, False, name, size) for name, size in names_and_sizes]


def drop(*names):
    return [Request(1, True, name, 0) for name in names]


def test_out_of_memory_with_memory_free():
    """Six blocks fill 18 of 20 MiB; every second goes. 11 MiB are free in holes of 3, 3, 3 and 2, and 6 MiB cannot be had."""
    wanted = Request(2, False, "wanted", 6 * MIB)
    requests = [*make(*((f"x{k}", 3 * MIB) for k in range(6))), *drop("x0", "x2", "x4"), wanted]
    outcome = simulate(requests, 21 * MIB)
    assert outcome.failure == Failure(wanted, 20 * MIB, 12 * MIB, 11 * MIB, MIB, 3 * MIB)
    assert (outcome.peak_allocated, outcome.peak_reserved) == (18 * MIB, 20 * MIB)
    assert simulate(requests, 40 * MIB).failure is None and simulate(requests, 40 * MIB).peak_reserved == 40 * MIB
    assert sufficient_capacity(requests) == 40 * MIB


def test_capacity_that_suffices_counts_segments_that_go_back():
    requests = [*make(("a", 12 * MIB)), *drop("a"), *make(("b", 14 * MIB))]
    assert simulate(requests, PLENTY).peak_reserved == 26 * MIB
    assert sufficient_capacity(requests) == 14 * MIB


def test_requests_of_no_bytes_need_none():
    requests = [*make(("empty", 0)), *drop("empty"), *make(("empty", 0))]
    assert simulate(requests, 0).failure is None and simulate(requests, 0).peak_reserved == 0


@pytest.mark.parametrize("requests, said", [(drop("a"), "is not allocated"), (make(("a", 1), ("a", 1)), "is allocated already")])
def test_names_are_allocated_and_freed_in_turn(requests, said):
    with pytest.raises(UserError, match=said):
        simulate(requests, PLENTY)


# sizes around every limit; whether something is freed, and which
STEPS = st.lists(
    st.tuples(st.one_of(st.integers(1, 4096), st.integers(1, 30).map(lambda n: n * MIB // 2)), st.booleans(), st.integers(0, 99)), max_size=60
)


@given(STEPS, st.integers(0, 120).map(lambda n: n * MIB))
def test_blocks_never_overlap_and_nothing_gets_lost(steps, capacity):
    device, living = CachingAllocator(capacity), {}
    for size, frees, which in steps:
        if frees and living:
            address = sorted(living)[which % len(living)]
            device.free(address)
            del living[address]
        elif (address := device.allocate(size)) is not None:
            assert address not in living and address % 512 == 0
            living[address] = size
        blocks = sorted([*device.used.values(), *device.free_blocks.values()], key=lambda block: block.address)
        assert all(block.address + block.size <= after.address for block, after in pairwise(blocks))
        assert all(device.used[address].size >= size for address, size in living.items()) and device.used.keys() == living.keys()
        # what is free is joined, and in use and free together are the segments
        assert not any(block.is_free and block.after is not None and block.after.is_free for block in blocks)
        assert sum(block.size for block in device.used.values()) == device.allocated
        assert sum(block.size for block in blocks) == device.reserved <= capacity
        assert sorted(key for keys in device.free_keys.values() for key in keys) == sorted(block.key for block in device.free_blocks.values())
    for address in living:
        device.free(address)
    device.empty_cache()
    assert device.allocated == device.reserved == 0 and not device.used and not device.free_blocks
