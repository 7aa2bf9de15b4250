"""The caching allocator on paper: short sequences of which torch's rules leave one outcome."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from lamina.planner.caching_allocator import GRAIN_BYTES, MIB, Block, CachingAllocator, DeviceFull

LIMIT_BYTES = 150 * MIB


def reserved_mib(memory: CachingAllocator) -> float:
    return memory.reserved_bytes / MIB


@pytest.mark.parametrize(
    "size_bytes, allocated_bytes, reserved",
    [
        (1, 512, 2),
        (512, 512, 2),
        (513, 1024, 2),
        (MIB, MIB, 2),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20),
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (10 * MIB, 10 * MIB, 10),
        (11 * MIB, 12 * MIB, 12),  # 1 MiB would be left over and is not split off
        (11 * MIB - 512, 11 * MIB - 512, 12),  # more than 1 MiB is
    ],
)
def test_one_request(size_bytes: int, allocated_bytes: int, reserved: int) -> None:
    memory = CachingAllocator()
    memory.take(size_bytes)
    assert (memory.allocated_bytes, reserved_mib(memory)) == (allocated_bytes, reserved)


def test_small_requests_share_a_segment() -> None:
    memory = CachingAllocator()
    blocks = [memory.take(MIB // 2) for _ in range(4)]
    assert reserved_mib(memory) == 2
    other = memory.take(512)
    assert reserved_mib(memory) == 4
    memory.give(blocks[1])
    assert memory.take(512).address == blocks[0].address + MIB // 2  # the smaller of two free blocks
    assert memory.take(MIB // 2).address == other.address + 512  # too large for its rest


def test_the_smallest_that_is_large_enough() -> None:
    memory = CachingAllocator()
    large, small = memory.take(40 * MIB), memory.take(30 * MIB)
    memory.give(large)
    memory.give(small)
    assert memory.take(29 * MIB).address == small.address
    assert memory.take(30 * MIB).address == large.address
    assert reserved_mib(memory) == 70
    assert memory.take(10 * MIB).address == large.address + 30 * MIB  # the rest of the first
    memory.take(10 * MIB)
    assert reserved_mib(memory) == 80


def test_of_equals_the_one_that_was_reserved_last() -> None:
    """Segments lie from the top down, and the lowest address is taken."""
    memory = CachingAllocator()
    blocks = [memory.take(30 * MIB) for _ in range(3)]
    for block in blocks:
        memory.give(block)
    assert memory.take(30 * MIB).address == blocks[2].address == min(block.address for block in blocks)


def test_neighbours_are_joined_whatever_the_order() -> None:
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        memory = CachingAllocator()
        memory.give(memory.take(60 * MIB))
        blocks = [memory.take(20 * MIB) for _ in range(3)]
        for index in order:
            memory.give(blocks[index])
        memory.take(60 * MIB)
        assert reserved_mib(memory) == 60, order


def test_segments_are_not_joined() -> None:
    memory = CachingAllocator()
    for block in [memory.take(20 * MIB) for _ in range(3)]:
        memory.give(block)
    memory.take(60 * MIB)
    assert reserved_mib(memory) == 120


def test_pools_and_streams_keep_their_own() -> None:
    memory = CachingAllocator()
    memory.give(memory.take(20 * MIB))
    memory.take(20 * MIB, stream=1)
    assert reserved_mib(memory) == 40
    memory.take(512)  # large blocks serve no small request
    assert reserved_mib(memory) == 42
    memory.take(20 * MIB)
    assert reserved_mib(memory) == 42


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    memory = CachingAllocator()
    block = memory.take(20 * MIB)
    memory.note_use(block, 1)
    memory.note_use(block, 0)  # its own stream
    memory.give(block)
    assert memory.allocated_bytes == 0
    memory.take(20 * MIB)
    assert reserved_mib(memory) == 40
    memory.reach(0)
    memory.take(20 * MIB)
    assert reserved_mib(memory) == 60
    memory.reach(1)
    memory.take(20 * MIB)
    assert reserved_mib(memory) == 60


def test_a_full_device_gets_free_segments_back() -> None:
    memory = CachingAllocator(limit_bytes=100 * MIB)
    kept, free = memory.take(40 * MIB), memory.take(50 * MIB, stream=1)
    memory.give(free)
    memory.take(60 * MIB)
    assert (reserved_mib(memory), memory.retries) == (100, 1)
    memory.give(kept)
    memory.take(10 * MIB)  # a piece of a segment holds all of it
    with pytest.raises(DeviceFull):
        memory.take(40 * MIB)
    assert memory.peak_reserved_bytes == 100 * MIB


def test_segments_that_grow() -> None:
    memory = CachingAllocator(expandable=True)
    first = memory.take(30 * MIB)
    assert reserved_mib(memory) == 40  # pages of 20 MiB
    second = memory.take(30 * MIB)  # 10 of the second page, and one more
    assert reserved_mib(memory) == 60
    memory.give(first)
    memory.give(second)
    memory.take(60 * MIB)  # one block again
    assert reserved_mib(memory) == 60
    memory.take(512)
    assert reserved_mib(memory) == 62


def test_pages_go_back_and_come_again() -> None:
    memory = CachingAllocator(limit_bytes=100 * MIB, expandable=True)
    blocks = [memory.take(20 * MIB) for _ in range(5)]
    memory.give(blocks[1])
    memory.give(blocks[2])
    memory.take(20 * MIB, stream=1)  # 40 MiB go back, 20 are taken
    assert (reserved_mib(memory), memory.retries) == (80, 1)
    again = memory.take(15 * MIB)
    assert (again.address, reserved_mib(memory)) == (blocks[0].address + 20 * MIB, 100)  # the hole is filled first
    with pytest.raises(DeviceFull):
        memory.take(30 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_no_two_blocks_overlap(expandable: bool) -> None:
    """Thousands of takes and gives: blocks are apart, sums are right, and in the end all is free and joined."""
    chance = random.Random(7)
    memory, held = CachingAllocator(limit_bytes=LIMIT_BYTES, expandable=expandable), []
    for _ in range(3000):
        if held and chance.random() < 0.5:
            memory.give(held.pop(chance.randrange(len(held))))
            continue
        size = int(2 ** chance.uniform(3, 25))
        try:
            block = memory.take(size, stream=chance.randrange(2))
        except DeviceFull:
            continue
        assert block.size_bytes >= size
        held.append(block)
        check(memory, held)
    for block in held:
        memory.give(block)
    memory.give_back_segments()
    assert memory.reserved_bytes == memory.allocated_bytes == 0 and memory.retries > 0


def check(memory: CachingAllocator, held: list[Block]) -> None:
    assert sum(block.size_bytes for block in held) == memory.allocated_bytes
    ends = sorted((block.address, block.address + block.size_bytes) for block in held)
    assert all(one[1] <= other[0] for one, other in pairwise(ends))
    assert all(start % GRAIN_BYTES == 0 for start, _ in ends)
    assert memory.allocated_bytes <= memory.reserved_bytes <= LIMIT_BYTES
