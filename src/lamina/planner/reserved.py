"""What the caching allocator would reserve for a run: its first steps, allocation by allocation.

*Reserved* is not *allocated* and a factor: it depends on what was there before the first step, on the order in which
activations and gradients come and go, and on which stream they are taken. Here a run is written down as the runtime
would make it: shards of one unit after another, the arena, then steps of which forward and backward are the list of
allocations that measuring the model has left behind (measure.py), with what the runtime adds in between (gradients that
come and go, staging, inboxes, moments, the norm). caching_allocator.py says what that list reserves.

Note [Order]
    Where each line is from: shards and arena runtime/assemble.py, halves runtime/halved.py; buffers of a reduction, and
    when a gradient may go, runtime/reducing.py and gradients.py; memory of gradients runtime/unit_gradients.py (given
    back when a forward begins that finds none); moments optim/moments.py, at the first step. torch: a workspace of a
    matrix library for each thread and stream that calls it (aten/src/ATen/cuda/CublasHandlePool.cpp); backward has a
    thread of its own; a graph's pool, and the cache that goes back before a recording (torch/cuda/graphs.py). What
    lamina.capture does with memory: Note [Memory of a graph] in optim/capture.py.

Pure: no communication, no device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from lamina.core import room
from lamina.core.halves import PIECE_NUMEL
from lamina.core.layout import UnitLayout
from lamina.core.strategy import Factors
from lamina.planner.caching_allocator import Block, CachingAllocator, DeviceFull
from lamina.planner.measure_data import Happens, Measured
from lamina.planner.state import (
    ADAM_MOMENTS,
    FP32_BYTES,
    REMAINDER_BYTES,
    State,
    may_be_halved,
    reduction_buffers,
    wide_bytes,
)

COMPUTE, REDUCE_LANE, GATHER_LANE = 0, 1, 2
CAPTURE, GRAPH_POOL = 3, 4  # the stream of a step that `lamina.capture` will record, and what its graph takes
WORKSPACE_BYTES = 32 << 20  # that torch gives a matrix library on Hopper
NORM_CHUNK_NUMEL = 1 << 16  # elements for which torch's norm of lists writes one partial sum
CHECK_CHUNK_BYTES = 1 << 20  # of weights that are compared at a time, as numbers of 8 bytes
MOST_MICRO_BATCHES = 4  # of a step that are followed, the last among them: those between are alike
MOST_STEPS = 6  # that are followed; after the second, hardly any adds anything
EAGER_CALLS = 3  # of a step before it is recorded


@dataclass(frozen=True)
class Reserved:
    """Peaks of the allocator over the first steps, in bytes."""

    allocated_bytes: int
    reserved_bytes: int
    retries: int  # times that the allocator gave memory back to a device that was full; each waits for the device


def reserve(
    measured: Measured,
    state: State,
    factors: Factors,
    accumulation: int = 1,
    *,
    given: bool = False,
    gives_back: bool = True,
    room_part: float = room.KEPT,
    limit_bytes: int | None = None,
    expandable: bool = False,
    captured: bool = False,
) -> Reserved | None:
    """Follow a run until a step reserves no more than the one before; None: the device is full.

    Args:
        state: of the same factors and accumulation.
        given: the whole model lies on the device before it is sharded; else it is made unit by unit.
        gives_back: the device then gets back what the model lay in, as far as nothing new has come to lie there. False:
            the runtime that rows of before were measured with.
        room_part: of the gradients, for which room is made (core/room.py); 0: by runtimes before they made any.
        limit_bytes: what the allocator may reserve; None: more than any device has.
        expandable: torch's setting `expandable_segments:True`.
        captured: `lamina.capture` records the step as a graph. No room is made before then.
    """
    run = _Run(measured, state, factors, accumulation, CachingAllocator(limit_bytes, expandable))
    try:
        run.shard(given, gives_back)
        if captured:
            run.record()
            return Reserved(run.memory.peak_allocated_bytes, run.memory.peak_reserved_bytes, run.memory.retries)
        run.make_room(room_part)
        before = -1
        for _ in range(MOST_STEPS):
            run.step()
            if run.memory.peak_reserved_bytes == before:
                break
            before = run.memory.peak_reserved_bytes
    except DeviceFull:
        return None
    memory = run.memory
    return Reserved(memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.retries)


class _Run:
    """The allocations of one rank."""

    def __init__(
        self, measured: Measured, state: State, factors: Factors, accumulation: int, memory: CachingAllocator
    ) -> None:
        self.measured, self.state, self.factors, self.memory = measured, state, factors, memory
        self.accumulation = accumulation
        self.stream = COMPUTE
        self.alone = factors.world == 1 and not state.packing.total_bytes  # torch's own autograd: nothing is reduced
        self.buffers: dict[str, tuple[Block, int]] = {}  # of reductions, by role, with what was asked for
        self.workspaces: set[int] = set()
        self.gradients: dict[int, list[Block]] = {}  # by unit
        self.inputs: list[Block] = []
        self.whole: list[Block] = []  # masters that the first forward halves
        self.has_moments = self.has_tried_kernel = False
        self.has_sums: set[int] = set()  # units whose micro-batches are being summed

    # ---- before the first step ---------------------------------------------------------------------------------

    def shard(self, given: bool, gives_back: bool) -> None:
        whole = [self._whole(layout) for layout in self.state.layouts] if given else []
        if given and self.factors.world > 1:
            self._compare()
        for index, layout in enumerate(self.state.layouts):
            values = whole[index] if given else self._whole(layout)
            for segment in layout.segments:
                master = self._take([segment.range_numel * segment.master.itemsize])
                self.whole += master if self.state.halved and may_be_halved(segment) else []
            self._give(values)
            if self.state.published and not self.state.is_one_sided:
                self._take(s.numel // self.factors.params * s.compute.itemsize for s in layout.segments)
        if given and gives_back:
            self.memory.give_back_segments()
        self._take([self.state.packing.total_bytes])
        if self.state.halved:
            self._take(numel * REMAINDER_BYTES for numel in self._halved_numels())

    def _halved_numels(self) -> list[int]:
        segments = (segment for layout in self.state.layouts for segment in layout.segments)
        return [segment.range_numel for segment in segments if may_be_halved(segment)]

    def _halve(self) -> None:
        """Masters are published and cut, on either lane, a piece at a time; the memory of the whole ones goes."""
        piece = min(PIECE_NUMEL["cuda"], max(self._halved_numels(), default=0))
        for lane in (GATHER_LANE, REDUCE_LANE):
            self._give([self.memory.take(piece * size, lane) for size in (1, FP32_BYTES, FP32_BYTES) if piece])
        self._give(self.whole)
        self.whole = []

    def _whole(self, layout: UnitLayout) -> list[Block]:
        return self._take(spec.numel * spec.master.itemsize for spec in layout.params)

    def _compare(self) -> None:
        """A checksum of each parameter, in pieces, each as whole numbers beside as many factors."""
        for layout in self.state.layouts:
            for spec in layout.params:
                piece = 8 * min(CHECK_CHUNK_BYTES, spec.numel * spec.master.itemsize)
                self._give(self._take([piece, piece, piece]))

    def make_room(self, part: float) -> None:
        """Before the first forward, as far as the device has memory; see core/room.py."""
        layouts = self.state.layouts
        if self.alone:
            sizes = [sum(p.numel * p.master.itemsize for p in layout.params if p.trainable) for layout in layouts]
        else:
            sizes = [s.range_numel * wide_bytes(s.master) for layout in layouts for s in layout.segments if s.trainable]
        with contextlib.suppress(DeviceFull):
            self._give(self._take([room.room_bytes(part, sizes)]))

    # ---- a step ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        complete = self.factors.grads == self.factors.world
        if self.whole:
            self._halve()
        followed = min(self.accumulation, MOST_MICRO_BATCHES)
        for micro_batch in range(followed):
            before, self.inputs = self.inputs, self._take([self.measured.input_bytes])
            self._give(before)
            if micro_batch == 0 or not complete:  # in between, gradients that are complete stay
                self._give_back_gradients()
            self._forward_and_backward(micro_batch == followed - 1)
        self.has_sums.clear()
        self._norm()
        if not self.has_moments:
            self.has_moments = True
            if self.stream == CAPTURE:
                self.memory.give_back_segments()
            for layout in self.state.layouts:
                for segment in layout.segments:
                    if segment.trainable:
                        self._take([segment.range_numel * segment.master.itemsize] * ADAM_MOMENTS)

    def record(self) -> None:
        """A step that becomes a graph, from the first that runs eagerly on."""
        self.stream = CAPTURE
        for _ in range(EAGER_CALLS):
            self.step()
        self._give_back_gradients()
        self.memory.give_back_segments()
        self.stream = GRAPH_POOL
        self.make_room(1.0)
        self.step()

    def _give_back_gradients(self) -> None:
        self._give(itertools.chain.from_iterable(self.gradients.values()))
        self.gradients.clear()

    def _forward_and_backward(self, last: bool) -> None:
        alive: dict[int, Block] = {}
        kept: set[int] = set()  # gradients that nobody copies
        memory = self.memory
        for what, number, size_bytes in self.measured.events:
            if what is Happens.TAKE:
                if size_bytes:
                    alive[number] = memory.take(size_bytes, self.stream)
            elif what is Happens.GIVE:
                if number in alive and number not in kept:
                    memory.give(alive.pop(number))
            elif what is Happens.PRODUCT:
                if number not in self.workspaces:
                    self.workspaces.add(number)
                    memory.take(WORKSPACE_BYTES, self.stream)
            elif what is Happens.REDUCE:
                if not self.alone:
                    self._reduce(number, last)
            elif self.alone:
                kept.add(number)
        self._give(block for number, block in alive.items() if number not in kept)
        if kept:
            self.gradients.setdefault(-1, []).extend(alive[number] for number in kept if number in alive)

    def _reduce(self, index: int, last: bool) -> None:
        layout = self.state.layouts[index]
        if index not in self.gradients:
            sizes = (s.range_numel * wide_bytes(s.master) for s in layout.segments if s.trainable)
            self.gradients[index] = self._take(sizes)
        if not self.has_tried_kernel:  # the kernel that sums is tried on a few numbers, on the lane that will call it
            self.has_tried_kernel = True
            self._give([self.memory.take(FP32_BYTES, REDUCE_LANE) for _ in range(3)])
        peers = self.state.is_one_sided
        wire = self.state.wire
        for role, size_bytes in reduction_buffers(layout, self.factors, self.accumulation, False, peers, wire):
            self._buffer(role, size_bytes)
        if not last and self.factors.grads != self.factors.world and index not in self.has_sums:
            self.has_sums.add(index)
            self._buffer(f"sums of {index}", self._sums_bytes(layout))

    def _sums_bytes(self, layout: UnitLayout) -> int:
        return sum(s.numel // self.factors.grads * wide_bytes(s.master) for s in layout.segments if s.trainable)

    def _buffer(self, role: str, size_bytes: int) -> None:
        """A buffer that units share grows: the new one is there before the old one goes."""
        held = self.buffers.get(role)
        if not size_bytes or (held is not None and held[1] >= size_bytes):
            return
        self.buffers[role] = self.memory.take(size_bytes, REDUCE_LANE), size_bytes
        if held is not None:
            self.memory.give(held[0])

    def _norm(self) -> None:
        """Partial sums of the gradients' norm, and one result a range."""
        ranges = [s.range_numel for layout in self.state.layouts for s in layout.segments if s.trainable]
        if ranges:
            most = -(-max(ranges) // NORM_CHUNK_NUMEL)
            self._give(self._take([len(ranges) * most * FP32_BYTES, *(FP32_BYTES for _ in ranges)]))

    # ---- blocks ------------------------------------------------------------------------------------------------

    def _take(self, sizes_bytes: Iterable[int]) -> list[Block]:
        return [self.memory.take(size_bytes, self.stream) for size_bytes in sizes_bytes if size_bytes]

    def _give(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.memory.give(block)
