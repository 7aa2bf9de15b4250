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
from lamina.core.strategy import Factors

ADAM_MOMENTS = 2
FP32_BYTES = 4


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

    @property
    def lasting(self) -> int:
        """There at every moment of every step but the first."""
        return self.masters + self.optimizer + self.slots + self.published + self.reduction + self.accumulated


def state_of(
    units: Sequence[UnitShape], factors: Factors, slots: int = 3, accumulation: int = 1, on_gpu: bool = True
) -> State:
    """State of a rank under AdamW.

    Args:
        accumulation: micro-batches of a step.
        on_gpu: reductions of 32-bit gradients go without an inbox there.
    """
    layouts = [lay_out(unit.name, unit.params, factors.optimizer) for unit in units]
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
        for role, size_bytes in reduction_buffers(layout, factors, accumulation, slots > 1 and not on_gpu):
            buffers[role] = max(buffers.get(role, 0), size_bytes)
    return State(
        masters=sum(s.range_numel * s.master.itemsize for layout in layouts for s in layout.segments),
        optimizer=sum(map(_adam_bytes, layouts)),
        slots=packing.total_bytes,
        published=sum(_published_bytes(layout, factors) for layout in layouts),
        reduction=sum(buffers.values()),
        accumulated=sum(_accumulated_bytes(layout, factors) for layout in layouts) if accumulation > 1 else 0,
        gradients=tuple(
            sum(s.range_numel * wide_bytes(s.master) for s in layout.segments if s.trainable) for layout in layouts
        ),
        packing=packing,
        layouts=tuple(layouts),
    )


def wide_bytes(master: torch.dtype) -> int:
    """Of an element of a gradient (see runtime/unit_gradients.py): fp32, or the master's dtype if that is wider."""
    return max(FP32_BYTES, master.itemsize)


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
    layout: UnitLayout, factors: Factors, accumulation: int, use_inbox: bool
) -> Iterator[tuple[str, int]]:
    """(role, bytes) of what one unit's reduction needs; units share the buffers of a role."""
    sums_wait = accumulation > 1 and factors.grads == 1 and factors.world > 1  # whole, in fp32: they are what is sent
    for number, segment in enumerate(layout.segments):
        if not factors.shards_parameters:  # else gradients lie over the weights, in the slot
            yield f"staging {number}", segment.compute_bytes
        if segment.trainable:
            sent = wide_bytes(segment.master) if sums_wait else segment.compute.itemsize
            yield from _climb(number, segment, factors, sent, use_inbox)


def _climb(
    number: int, segment: Segment, factors: Factors, sent_bytes: int, use_inbox: bool
) -> Iterator[tuple[str, int]]:
    """The levels of sharding, innermost first, as runtime/reducing.py climbs them; `sent_bytes` of an element."""
    numel, summed = segment.numel, False
    wide = wide_bytes(segment.master)
    for index, level in enumerate(factors.levels):
        if level.size == 1:
            continue
        if not summed:
            if use_inbox or sent_bytes == 2:
                yield f"inbox {number}", numel * sent_bytes
        else:
            yield f"sum {index}", numel * wide
            if use_inbox:
                yield f"outer {index}", numel * wide
        numel, summed = numel // level.size, True
    if factors.replicas.size == 1:
        return
    if summed:
        yield "replicas", numel * wide
    elif sent_bytes != wide:
        yield f"sum {number}", numel * wide
