"""What a rank shares with its peers under one-sided transports: published weights, then places for gradients.

Where things lie must be the same on all ranks, and how much it is must be known before there is memory: the runtime
and a plan ask for it here.

Pure: no communication, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lamina.core.layout import SEGMENT_ALIGNMENT_BYTES, UnitLayout, round_up
from lamina.core.strategy import Factors

AUTO_SHARE = 0.02  # of a GPU's memory, that `transport="auto"` spends on speed
AUTO_HOST_SHARE = 0.25  # of what a host has left, for all ranks together
TURNS = 2  # outboxes of one segment number


@dataclass(frozen=True)
class Outbox:
    """Where in every rank's region what it offers to its peers lies: `TURNS` times a part for each."""

    start_bytes: int
    exchange_bytes: int  # of the largest exchange


def published_places(layouts: Sequence[UnitLayout], factors: Sequence[Factors]) -> tuple[list[list[int]], int]:
    """Offsets in bytes by unit and segment, the same in every rank's region, and its size in bytes."""
    places, end_bytes = [], 0
    for layout, split in zip(layouts, factors, strict=True):
        own: list[int] = []
        for segment in layout.segments if split.shards_parameters else ():
            own.append(end_bytes)
            part_bytes = segment.compute_bytes // split.params
            end_bytes = round_up(end_bytes + part_bytes, SEGMENT_ALIGNMENT_BYTES)
        places.append(own)
    return places, end_bytes


def inbox_bytes(layouts: Sequence[UnitLayout], wire: torch.dtype | None) -> list[int]:
    """The largest exchange of gradients, by number of the segment."""
    sizes: list[int] = []
    for layout in layouts:
        for number, segment in enumerate(layout.segments):
            itemsize = segment.compute.itemsize if wire is None else max(wire.itemsize, segment.compute.itemsize)
            sizes += [0] * (number + 1 - len(sizes))
            if segment.trainable:
                sizes[number] = max(sizes[number], segment.numel * itemsize)
    return sizes


def place_outboxes(exchange_bytes: Sequence[int], members: int, start_bytes: int) -> tuple[list[Outbox], int]:
    """One for each number of a segment, and where the last one ends."""
    outboxes = []
    for size_bytes in exchange_bytes:
        outboxes.append(Outbox(round_up(start_bytes, SEGMENT_ALIGNMENT_BYTES), size_bytes))
        start_bytes = outboxes[-1].start_bytes + TURNS * (size_bytes // members) * (members - 1)
    return outboxes, start_bytes
