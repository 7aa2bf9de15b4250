"""Packing: units that live together never share bytes; all others may."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.arena import Demand, Packing, pack
from lamina.core.layout import SEGMENT_ALIGNMENT_BYTES, ParamSpec, lay_out, round_up
from lamina.core.slots import Slot

DEMANDS = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from((False, False, False, True))), max_size=14).map(
    lambda items: [Demand(f"u{i}", size, resident) for i, (size, resident) in enumerate(items)]
)
SLOTS = st.integers(1, 6)


def gathered(sizes_bytes: list[int]) -> list[Demand]:
    return [Demand(f"u{i}", size, resident=False) for i, size in enumerate(sizes_bytes)]


def windows(demands: list[Demand], slots: int) -> list[list[int]]:
    """Sets of units that live at one moment: any `slots` neighbours among the gathered, and all residents."""
    resident = [u for u, d in enumerate(demands) if d.resident]
    others = [u for u, d in enumerate(demands) if not d.resident]
    return [resident + others[i : i + slots] for i in range(max(len(others) - slots + 1, 1))]


@given(DEMANDS, SLOTS)
@settings(max_examples=150, deadline=None)
def test_no_two_units_that_live_together_share_a_byte(demands: list[Demand], slots: int) -> None:
    packing = pack(demands, slots)
    packing.check()
    for window in windows(demands, slots):
        spans = sorted(
            (packing.offsets_bytes[u], packing.offsets_bytes[u] + demands[u].size_bytes)
            for u in window
            if demands[u].size_bytes
        )
        for (_, end), (begin, _) in pairwise(spans):
            assert end <= begin


@given(DEMANDS, SLOTS)
@settings(max_examples=150, deadline=None)
def test_apart_no_two_units_share_a_byte(demands: list[Demand], slots: int) -> None:
    packing = pack(demands, slots).apart()
    packing.check()
    spans = [(start, start + d.size_bytes) for start, d in zip(packing.offsets_bytes, demands, strict=True)]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(end <= packing.total_bytes for _, end in spans)


@given(DEMANDS, SLOTS)
@settings(max_examples=100, deadline=None)
def test_total_is_between_the_largest_window_and_the_sum(demands: list[Demand], slots: int) -> None:
    packing = pack(demands, slots)
    largest = max(sum(demands[u].size_bytes for u in window) for window in windows(demands, slots))
    assert packing.total_bytes >= largest
    assert packing.total_bytes <= sum(round_up(d.size_bytes, SEGMENT_ALIGNMENT_BYTES) for d in demands)
    assert all(offset % SEGMENT_ALIGNMENT_BYTES == 0 for offset in packing.offsets_bytes)


@given(DEMANDS, SLOTS)
@settings(max_examples=60, deadline=None)
def test_conflicts_are_mutual_and_never_of_a_resident(demands: list[Demand], slots: int) -> None:
    packing = pack(demands, slots)
    for unit, demand in enumerate(demands):
        others = packing.conflicts(unit)
        assert unit not in others
        assert all(unit in packing.conflicts(other) for other in others)
        assert not (demand.resident and others)


@given(st.integers(1, 20), SLOTS, st.integers(1, 4000))
@settings(max_examples=60, deadline=None)
def test_equal_blocks_form_a_ring(count: int, slots: int, size_bytes: int) -> None:
    packing = pack(gathered([size_bytes] * count), slots)
    step_bytes = round_up(size_bytes, SEGMENT_ALIGNMENT_BYTES)
    assert list(packing.offsets_bytes) == [unit % slots * step_bytes for unit in range(count)]
    assert packing.total_bytes == (min(count, slots) - 1) * step_bytes + size_bytes


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_one_slot_is_as_large_as_the_largest_unit(sizes_bytes: list[int]) -> None:
    assert pack(gathered(sizes_bytes), 1).total_bytes == max(sizes_bytes)


def test_embedding_and_head_get_the_same_bytes() -> None:
    packing = pack(gathered([4096, *[1024] * 6, 4096]), 3)
    assert packing.offsets_bytes[0] == packing.offsets_bytes[7]
    assert packing.total_bytes == 4096 + 2 * 1024  # the window of a large unit and two blocks, nothing more


def test_a_resident_unit_between_two_others_does_not_part_them() -> None:
    demands = [Demand("a", 256, False), Demand("r", 256, True), Demand("b", 256, False), Demand("c", 256, False)]
    packing = pack(demands, 2)
    assert packing.conflicts(0) == (3,)
    assert packing.conflicts(2) == ()


def test_check_refuses_broken_packings() -> None:
    packing = pack(gathered([512, 512, 512]), 2)
    for offsets, total_bytes, words in (
        ((0, 0, 512), 1024, "u0 and u1 live together"),
        ((0, 256, 1024), 1536, "u0 and u1 live together"),
        ((0, 512, 1024), 1024, "leaves the arena"),
        ((0, 512, 1025), 2048, "unaligned"),
    ):
        wrong = dataclasses.replace(packing, offsets_bytes=offsets, total_bytes=total_bytes)
        with pytest.raises(AssertionError, match=words):
            wrong.check()
    with pytest.raises(AssertionError, match="0 slots"):
        pack(gathered([512]), 0)


def test_nothing_to_pack() -> None:
    assert pack([], 3) == Packing((), (), 0, 3)


def test_text() -> None:
    assert pack([Demand("", 300, True), Demand("a", 700, False), Demand("b", 700, False)], 1).text() == (
        "arena of 1068 bytes, 1 slots\n  [768:1068) root (resident)\n  [0:700) a (gathered)\n  [0:700) b (gathered)"
    )


def test_memory_that_an_overflow_slot_has_is_left_alone() -> None:
    """A storage that is made as large as it is, is moved: on a GPU on another lane than the gather that writes it."""
    layout = lay_out("unit", [ParamSpec("weight", (3, 5), torch.float32, torch.float32, True)], 2)
    slot = Slot(layout, torch.empty(layout.buffer_bytes, dtype=torch.uint8), home=False)
    before = slot.buffer.data_ptr()
    slot.take_memory()
    assert slot.buffer.data_ptr() == slot.views[0].data_ptr() == before
    slot.drop_memory()
    assert slot.buffer.untyped_storage().nbytes() == 0
    slot.take_memory()
    assert slot.buffer.untyped_storage().nbytes() == layout.buffer_bytes
