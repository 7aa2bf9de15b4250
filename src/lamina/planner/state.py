"""Bytes of what one rank holds from step to step, and for its reductions, as `lamina.shard` would allocate them.

Rules of thumb (16 bytes a parameter over the factor) miss padding, resident units, staging and inboxes. Here layouts,
arena and factors are the runtime's own functions, and the buffers of a reduction follow the levels it climbs; a test
compares each kind with what a real step allocates.

Pure: no communication, no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lamina.core.arena import Demand, Packing, pack
from lamina.core.layout import ParamSpec, Segment, UnitLayout, lay_out
from lamina.core.peer_memory import inbox_bytes, place_outboxes, published_places
from lamina.core.strategy import Factors

ADAM_MOMENTS = 2
FP32_BYTES = 4
REMAINDER_BYTES = 2  # of a master that is halved: the other half is the published weight (core/halves.py)


@dataclass(frozen=True)
class UnitShape:
    """A unit as the runtime would lay it out."""

    name: str
    params: tuple[ParamSpec, ...]
    encloses: bool


@dataclass(frozen=True)
class State:
    """What one rank holds, in bytes."""

    masters: int
    optimizer: int
    slots: int  # the arena
    published: int
    reduction: int  # staging, inboxes, intermediate sums
    accumulated: int  # sums of earlier micro-batches
    gradients: tuple[int, ...]  # of each unit, made when it first reduces
    packing: Packing
    layouts: tuple[UnitLayout, ...]
    shared: int = 0  # of the above, what peers read or write: on GPUs memory that is not the caching allocator's
    halved: bool = False  # masters are published weights and remainders
    wire: torch.dtype | None = None  # in which gradients travel; None: as they are computed

    @property
    def is_one_sided(self) -> bool:
        return self.shared > 0

    @property
    def lasting(self) -> int:
        """There at every moment of every step but the first."""
        return self.masters + self.optimizer + self.slots + self.published + self.reduction + self.accumulated


def state_of(
    units: Sequence[UnitShape],
    factors: Factors,
    slots: int = 3,
    accumulation: int = 1,
    on_gpu: bool = True,
    *,
    peers: bool = False,
    halved: bool = False,
    wire: torch.dtype | None = None,
) -> State:
    """State of a rank under AdamW.

    Args:
        accumulation: micro-batches of a step.
        on_gpu: reductions of 32-bit gradients go without an inbox there, but for those of peers.
        peers: weights are published, and gradients exchanged, in memory that peers read; where parameters are split.
        halved: masters lie in halves, as they do from the first forward on under an optimizer of lamina's that clips.
    """
    layouts = [lay_out(unit.name, unit.params, factors.optimizer) for unit in units]
    peers = peers and factors.shards_parameters
    halved = halved and peers
    plain = [not factors.uses_shards and all(s.compute is s.master for s in layout.params) for layout in layouts]
    demands = [
        Demand(unit.name, layout.buffer_bytes, resident=unit.encloses or not factors.shards_parameters)
        for unit, layout, is_plain in zip(units, layouts, plain, strict=True)
        if not is_plain
    ]
    packing = pack(demands, slots)
    alone = factors.world == 1 and all(plain)  # torch's own autograd: nothing is reduced
    buffers: dict[str, int] = {}
    for layout in () if alone else layouts:
        for role, size_bytes in reduction_buffers(layout, factors, accumulation, slots > 1 and not on_gpu, peers, wire):
            buffers[role] = max(buffers.get(role, 0), size_bytes)
    published = sum(_published_bytes(layout, factors) for layout in layouts)
    exchanged = 0
    if peers:
        published = published_places(layouts, [factors] * len(layouts))[1]
        exchanged = _exchanged_bytes(layouts, factors, published, on_gpu, wire)
    return State(
        masters=sum(s.range_numel * _master_bytes(s, halved) for layout in layouts for s in layout.segments),
        optimizer=sum(map(_adam_bytes, layouts)),
        slots=packing.total_bytes,
        published=published,
        reduction=sum(buffers.values()) + exchanged,
        accumulated=sum(_accumulated_bytes(layout, factors) for layout in layouts) if accumulation > 1 else 0,
        gradients=tuple(
            sum(s.range_numel * wide_bytes(s.master) for s in layout.segments if s.trainable) for layout in layouts
        ),
        packing=packing,
        layouts=tuple(layouts),
        shared=published + exchanged if peers else 0,
        halved=halved,
        wire=wire,
    )


def wide_bytes(master: torch.dtype) -> int:
    """Of an element of a gradient (see runtime/unit_gradients.py): fp32, or the master's dtype if that is wider."""
    return max(FP32_BYTES, master.itemsize)


def may_be_halved(segment: Segment | ParamSpec) -> bool:
    """As runtime/halved.py has it."""
    return segment.trainable and segment.compute is torch.bfloat16 and segment.master is torch.float32


def _master_bytes(segment: Segment, halved: bool) -> int:
    """Of an element, beside what is published."""
    return REMAINDER_BYTES if halved and may_be_halved(segment) else segment.master.itemsize


def _exchanged_bytes(
    layouts: Sequence[UnitLayout], factors: Factors, published: int, on_gpu: bool, wire: torch.dtype | None
) -> int:
    """Where peers' gradients arrive (GPUs), or where this rank's lie for them (CPU)."""
    sizes = inbox_bytes(layouts, wire)
    return sum(sizes) if on_gpu else place_outboxes(sizes, factors.params, published)[1] - published


def _adam_bytes(layout: UnitLayout) -> int:
    """Moments in the master's dtype, and a step count a parameter."""
    trainable = [segment for segment in layout.segments if segment.trainable]
    moments = sum(ADAM_MOMENTS * s.range_numel * s.master.itemsize for s in trainable)
    return moments + sum(FP32_BYTES * len(s.params) for s in trainable)


def _published_bytes(layout: UnitLayout, factors: Factors) -> int:
    if not factors.shards_parameters or factors.optimizer == factors.params:
        return 0
    return sum(s.numel // factors.params * s.compute.itemsize for s in layout.segments)


def _accumulated_bytes(layout: UnitLayout, factors: Factors) -> int:
    """Sums that wait for the last micro-batch (Note [Reduction] 4); none where gradients are split over all."""
    if factors.grads == factors.world:
        return 0
    return sum(s.numel // factors.grads * wide_bytes(s.master) for s in layout.segments if s.trainable)


def reduction_buffers(
    layout: UnitLayout,
    factors: Factors,
    accumulation: int,
    use_inbox: bool,
    peers: bool = False,
    wire: torch.dtype | None = None,
) -> Iterator[tuple[str, int]]:
    """(role, bytes) of what one unit's reduction needs of its own; units share the buffers of a role."""
    sums_wait = accumulation > 1 and factors.grads == 1 and factors.world > 1  # whole, in fp32: they are what is sent
    for number, segment in enumerate(layout.segments):
        travels = wire if wire is not None and segment.compute.is_floating_point else segment.compute
        if wire is not None or not factors.shards_parameters:  # else gradients lie over the weights, in the slot
            yield f"staging {number}", segment.numel * travels.itemsize
        if segment.trainable:
            sent = wide_bytes(segment.master) if sums_wait else travels.itemsize
            yield from _climb(number, segment, factors, sent, use_inbox, peers)


def _climb(
    number: int, segment: Segment, factors: Factors, sent_bytes: int, use_inbox: bool, peers: bool
) -> Iterator[tuple[str, int]]:
    """The levels of sharding, innermost first, as runtime/reducing.py climbs them; `sent_bytes` of an element."""
    numel, summed = segment.numel, False
    wide = wide_bytes(segment.master)
    for index, level in enumerate(factors.levels):
        if level.size == 1:
            continue
        if not summed:
            if not peers and (use_inbox or sent_bytes == 2):
                yield f"inbox {number}", numel * sent_bytes
        else:
            yield f"sum {index}", numel * wide
            if use_inbox or peers:
                yield f"outer {index}", numel * wide
        numel, summed = numel // level.size, True
    if factors.replicas.size == 1:
        return
    if summed:
        yield "replicas", numel * wide
    elif sent_bytes != wide:
        yield f"sum {number}", numel * wide
