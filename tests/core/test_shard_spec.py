"""The plain data of a cut: boxes, identity, copies."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.shard_spec import DirtyFlag, GlobalSpec, ShardSpec, flat_boxes
from lamina.errors import StateError


def make(shape=(4, 3), ranges=((0, 5), (5, 12)), index=1, **more) -> ShardSpec:
    return ShardSpec("block.weight", torch.Size(shape), ranges, index, None, **more)


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 4), max_size=4).map(tuple), data=st.data())
def test_boxes_tile_the_range_in_flat_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    boxes = flat_boxes(shape, start, stop)
    found: list[int] = []
    for box in boxes:
        view = numbers
        for dim, (offset, size) in enumerate(zip(box.offset, box.sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        found += view.reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_derived_shares_geometry_and_drops_the_flag():
    spec = make(dirty=DirtyFlag())
    derived = spec.derived
    assert derived.dirty is None and derived is spec.derived and derived.derived is derived
    assert derived.geometry is spec.geometry and derived.same(spec) and derived == spec and hash(derived) == hash(spec)
    assert not spec.same(make(index=0)) and spec != make(ranges=((0, 6), (6, 12)))


def test_sizes_and_strides():
    spec = make()
    assert (spec.start, spec.stop, spec.local_numel, spec.numel, spec.strides) == (5, 12, 7, 12, (3, 1))
    assert make(shape=(), ranges=((0, 1), (1, 1))).strides == ()
    assert spec.reshaped(torch.Size((12,))).ranges == spec.ranges
    assert spec.stretched(torch.Size((4, 3, 2)), 2, 1).ranges == ((0, 10), (10, 24))


def test_copies():
    spec = make(global_spec=GlobalSpec(torch.Size((4, 6)), 1, 3))
    assert copy.deepcopy(spec) is spec
    loaded = pickle.loads(pickle.dumps(spec))
    assert loaded == spec and loaded.global_spec == spec.global_spec and loaded.detached
    assert spec.total_numel == 24
    with pytest.raises(StateError, match=r"block\.weight.*copy"):
        _ = loaded.groups
