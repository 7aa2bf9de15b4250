"""torch's caching allocator of GPU memory, on paper: what it would reserve for a list of takes and gives.

`torch.cuda.memory_reserved` is known after a run on a GPU, and simulators of it replay a snapshot that was recorded
there. Here its rules are followed without a device, so that a plan's own list of allocations tells what it reserves.

Note [Rules]
    Of c10/cuda/CUDACachingAllocator.cpp, read at commit 001074d2 of pytorch/pytorch (its functions in brackets), with
    the sizes of c10/core/AllocatorConfig.h of torch 2.13:
    1. a request is rounded up to 512 B; up to 1 MiB it is of the small pool [round_size, get_pool]
    2. it gets the smallest free block of its pool and stream that is large enough, of equals that of the lowest
       address [BlockComparatorSize, get_free_block]
    3. or else a segment from the device: 2 MiB in the small pool; 20 MiB below 10 MiB, else rounded up to 2 MiB
       [get_allocation_size]
    4. the rest of a block is split off if it is 512 B (small pool) or more than 1 MiB (large pool) [should_split]
    5. a block that comes back is joined with its free neighbours [free_block, try_merge_blocks]; one that another
       stream has used comes back when that stream has got there [recordStream, insert_events, process_events]
    6. when the device is full, segments that are free as a whole go back to it, once [malloc, release_cached_blocks]
    7. expandable segments: one a pool and stream that grows by pages of 2 or 20 MiB, split at 512 B; free pages go back
       one by one [map_block, try_allocate_expandable_block, unmap_block]
    8. a new segment lies below all others: addresses are handed out from the top down. That decides between equals (2)
       and so where long-lived blocks lie; from the bottom up, 5 of 20 measured runs come out a segment or two off
       (benchmarks/plan_memory/README.md)
    9. a captured graph has a pool of its own, which shares nothing with others: here a stream of its own
    Left out: options that are off by default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 1 << 20
GRAIN_BYTES = 512
SMALL_REQUEST_BYTES = 1 * MIB  # the largest of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB
SHARED_SEGMENT_BYTES = 20 * MIB  # for requests of the large pool below the next
OWN_SEGMENT_BYTES = 10 * MIB  # requests from here on get a segment of their size
SEGMENT_GRAIN_BYTES = 2 * MIB
GAP_BYTES = (1 << 26) * 20 * MIB  # between segments that grow; a number of pages
TOP_BYTES = GAP_BYTES << 10  # address below which the first segment lies


class DeviceFull(Exception):
    """The device has no memory for a request, and nothing is left to be given back to it."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment, in use, free, or (in a segment that grows) without memory behind it."""

    address: int
    size_bytes: int
    home: _Home
    in_use: bool = False
    is_mapped: bool = True
    before: Block | None = None  # neighbours in the segment
    after: Block | None = None
    used_on: set[int] = field(default_factory=set)  # further streams
    awaited: int = 0  # streams that have not got there

    @property
    def is_free(self) -> bool:
        return not self.in_use and self.awaited == 0 and self.is_mapped

    @property
    def is_whole(self) -> bool:
        """Alone in its segment."""
        return self.before is None and self.after is None


@dataclass(eq=False, slots=True)
class _Home:
    """Blocks of one pool and one stream."""

    stream: int
    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # (size, address), sorted
    blocks: dict[int, Block] = field(default_factory=dict)  # free ones by address
    tail: Block | None = None  # the end without memory of the segment that grows

    def add(self, block: Block) -> None:
        insort(self.free, (block.size_bytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        del self.blocks[block.address]

    def best(self, size_bytes: int) -> Iterator[Block]:
        """Free blocks that are large enough, the smallest first."""
        for at in range(bisect_left(self.free, (size_bytes, 0)), len(self.free)):
            yield self.blocks[self.free[at][1]]


class CachingAllocator:
    """Takes and gives in order; `reserved_bytes` and `allocated_bytes` now, and their peaks."""

    def __init__(self, limit_bytes: int | None = None, expandable: bool = False) -> None:
        self.limit_bytes, self.expandable = limit_bytes, expandable
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0  # requests for which free segments went back to the device
        self._homes: dict[tuple[int, bool], _Home] = {}
        self._lowest = TOP_BYTES
        self._waiting: dict[int, deque[Block]] = {}  # by stream: given, and used there
        self._reached: dict[int, int] = {}  # how many of them the stream is past

    def take(self, size_bytes: int, stream: int = 0) -> Block:
        """A block for a request, which is not empty.

        Raises `DeviceFull`.
        """
        self._process_events()
        size = max(GRAIN_BYTES, _up(size_bytes, GRAIN_BYTES))
        home = self._home(stream, size <= SMALL_REQUEST_BYTES)
        block = self._find(home, size) or self._grow(home, size)
        if block is None:
            self.retries += 1
            self.give_back_segments()
            block = self._grow(home, size)
        if block is None:
            raise DeviceFull(f"{size_bytes} bytes, with {self.reserved_bytes} of {self.limit_bytes} reserved")
        self._split(block, size)
        block.in_use = True
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def give(self, block: Block) -> None:
        """Its tensor is gone."""
        assert block.in_use
        block.in_use = False
        self.allocated_bytes -= block.size_bytes
        for stream in sorted(block.used_on):
            self._waiting.setdefault(stream, deque()).append(block)
        block.awaited, block.used_on = len(block.used_on), set()
        if not block.awaited:
            self._free(block)

    def note_use(self, block: Block, stream: int) -> None:
        """torch's `record_stream`: another stream reads or writes it."""
        if stream != block.home.stream:
            block.used_on.add(stream)

    def reach(self, stream: int) -> None:
        """All that was queued on a stream so far is done."""
        self._reached[stream] = len(self._waiting.get(stream, ()))

    def give_back_segments(self) -> None:
        """What `torch.cuda.empty_cache` does: the device gets what is free as a whole. Waits for all streams."""
        for stream in list(self._waiting):
            self.reach(stream)
        self._process_events()
        for home in self._homes.values():
            for block in list(home.blocks.values()):
                if self.expandable:
                    self._unmap(block)
                elif block.is_whole:
                    home.remove(block)
                    self.reserved_bytes -= block.size_bytes

    # ---- blocks ------------------------------------------------------------------------------------------------

    def _home(self, stream: int, is_small: bool) -> _Home:
        home = self._homes.get((stream, is_small))
        if home is None:
            home = self._homes[stream, is_small] = _Home(stream, is_small)
        return home

    def _find(self, home: _Home, size: int) -> Block | None:
        found = next(home.best(size), None)
        if self.expandable and found is not None and found.after is home.tail:
            # what can grow counts as large as it can become: anything else that is large enough is better
            found = next((other for other in home.best(size) if other.after is not home.tail), found)
        if found is not None:
            home.remove(found)
        return found

    def _split(self, block: Block, size: int) -> None:
        home, left = block.home, block.size_bytes - size
        if left < GRAIN_BYTES or (left <= SMALL_REQUEST_BYTES and not home.is_small and not self.expandable):
            return
        rest = Block(block.address + size, left, home, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size_bytes = rest, size
        home.add(rest)

    def _free(self, block: Block) -> None:
        home = block.home
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                home.remove(other)
                _join(block, other)
        home.add(block)

    def _process_events(self) -> None:
        for stream, reached in self._reached.items():
            queue = self._waiting.get(stream)
            while queue and reached:
                block, reached = queue.popleft(), reached - 1
                block.awaited -= 1
                if not block.awaited:
                    self._free(block)
        self._reached.clear()

    # ---- segments ----------------------------------------------------------------------------------------------

    def _reserve(self, size: int) -> bool:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _place(self, size_bytes: int) -> int:
        """The address of a new segment."""
        self._lowest -= size_bytes
        return self._lowest

    def _grow(self, home: _Home, size: int) -> Block | None:
        """A block of at least `size` from the device, not among the free ones; None: the device is full."""
        if self.expandable:
            return self._map(home, size)
        segment = segment_bytes(size)
        if not self._reserve(segment):
            return None
        return Block(self._place(segment), segment, home)

    def _map(self, home: _Home, size: int) -> Block | None:
        """More pages at the first place of the growing segment where what is free and what has no memory suffice."""
        if home.tail is None:
            home.tail = Block(self._place(GAP_BYTES), GAP_BYTES, home, is_mapped=False)
        page = SMALL_SEGMENT_BYTES if home.is_small else SHARED_SEGMENT_BYTES
        hole = self._hole(home, size)
        lead = hole.before if hole.before is not None and hole.before.is_free else None
        wanted = min(hole.size_bytes, _up(size - (lead.size_bytes if lead else 0), page))
        if not self._reserve(wanted):
            return None
        block = Block(hole.address, wanted, home, before=hole.before, after=hole)
        if hole.before is not None:
            hole.before.after = block
        hole.before = block
        hole.address, hole.size_bytes = hole.address + wanted, hole.size_bytes - wanted
        if hole.size_bytes == 0:
            _join(block, hole)
        self._free(block)
        home.remove(block)
        return block

    def _hole(self, home: _Home, size: int) -> Block:
        """The first stretch without memory that has room, with what is free before it."""
        assert home.tail is not None
        first, found = home.tail, home.tail
        while first.before is not None:
            first = first.before
            free = first.before.size_bytes if first.before is not None and first.before.is_free else 0
            if not first.is_mapped and free + first.size_bytes >= size:
                found = first
        return found

    def _unmap(self, block: Block) -> None:
        """Give whole pages of a free block back."""
        home = block.home
        page = SMALL_SEGMENT_BYTES if home.is_small else SHARED_SEGMENT_BYTES
        assert home.tail is not None
        start, stop = _up(block.address, page), (block.address + block.size_bytes) // page * page
        if start >= stop:
            return
        home.remove(block)
        self.reserved_bytes -= stop - start
        rest = Block(stop, block.address + block.size_bytes - stop, home, before=block, after=block.after)
        if rest.size_bytes:
            assert rest.after is not None
            rest.after.before, block.after = rest, rest
            home.add(rest)
        hole = block
        if start > block.address:
            hole = Block(start, stop - start, home, before=block, after=block.after)
            if hole.after is not None:
                hole.after.before = hole
            block.after, block.size_bytes = hole, start - block.address
            home.add(block)
        hole.size_bytes, hole.is_mapped = stop - start, False
        for other in (hole.before, hole.after):
            if other is not None and not other.is_mapped:
                _join(hole, other)
                if other is home.tail:
                    home.tail = hole


def segment_bytes(size_bytes: int) -> int:
    """What the device is asked for when a rounded request finds no block."""
    if size_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return SHARED_SEGMENT_BYTES
    return _up(size_bytes, SEGMENT_GRAIN_BYTES)


def _join(block: Block, other: Block) -> None:
    """Make a neighbour a part of `block`."""
    if other is block.before:
        block.address, block.before = other.address, other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block
    block.size_bytes += other.size_bytes


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
