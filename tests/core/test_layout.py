"""Layouts: every element has one owner, nothing overlaps, and padding stays within its bound."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.laying_out import count_pieces
from lamina.core.layout import (
    MATRIX_ALIGNMENT_NUMEL,
    RANGE_ALIGNMENT_NUMEL,
    SEGMENT_ALIGNMENT_BYTES,
    VECTOR_ALIGNMENT_NUMEL,
    ParamSpec,
    UnitLayout,
    lay_out,
    padding_bound_numel,
    round_up,
    short_dtype,
)
from lamina.runtime.direct import pieces_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def units(draw: st.DrawFn) -> tuple[list[ParamSpec], int]:
    count = draw(st.integers(0, 12))
    kinds = st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES[2:4]), st.booleans())
    specs = [ParamSpec(f"p{i}", draw(SHAPES), *draw(kinds)) for i in range(count)]
    return specs, draw(st.integers(1, 17))


def padding_module() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "padding" / "run.py"
    spec = importlib.util.spec_from_file_location("lamina_benchmarks_padding", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@given(units())
@settings(max_examples=60, deadline=None)
def test_every_element_is_owned_once(unit: tuple[list[ParamSpec], int]) -> None:
    specs, factor = unit
    layout = lay_out("u", specs, factor)
    layout.check()
    assert sorted(p.name for p in layout.params) == sorted(p.name for p in specs)
    assert layout.numel == sum(p.numel for p in specs)
    for segment in layout.segments:
        for number, (start, spec) in enumerate(zip(segment.starts, segment.params, strict=True)):
            owner = torch.zeros(spec.numel, dtype=torch.int64)
            for index in range(factor):
                begin, end = segment.owned(number, index)
                owner[begin:end] += 1
                if begin < end:  # the same elements, seen from the range: where they lie in the segment
                    inside = segment.offset_in_range(number, index)
                    assert index * segment.range_numel + inside == start + begin
                    assert inside + end - begin <= segment.range_numel
            assert torch.all(owner == 1)


@given(units(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_pieces_are_counted_as_they_are_cut(unit: tuple[list[ParamSpec], int], groups: int) -> None:
    specs, members = unit
    for segment in lay_out("u", specs, members * groups).segments:
        cut = [len(pieces_of(segment, 0, place, members)[0]) for place in range(members)]
        assert count_pieces(segment, members) == sum(cut)


@given(units())
@settings(max_examples=60, deadline=None)
def test_a_filled_buffer_is_the_concatenation_of_the_ranges(unit: tuple[list[ParamSpec], int]) -> None:
    """What the gather relies on: ranges one after the other are the segment, and parameters are views of it."""
    specs, factor = unit
    for segment in lay_out("u", specs, factor).segments:
        values = [torch.arange(1, spec.numel + 1) + 10**6 * i for i, spec in enumerate(segment.params)]
        shards = []
        for index in range(factor):
            shard = torch.zeros(segment.range_numel, dtype=torch.int64)
            for number, value in enumerate(values):
                begin, end = segment.owned(number, index)
                if begin < end:
                    offset = segment.offset_in_range(number, index)
                    shard[offset : offset + end - begin] = value[begin:end]
            shards.append(shard)
        buffer = torch.cat(shards)
        assert buffer.numel() == segment.numel
        for start, spec, value in zip(segment.starts, segment.params, values, strict=True):
            assert torch.equal(buffer[start : start + spec.numel], value)
        assert torch.count_nonzero(buffer) == segment.numel - segment.padding_numel


@given(units())
@settings(max_examples=60, deadline=None)
def test_segments_are_of_one_kind_aligned_and_within_the_padding_bound(unit: tuple[list[ParamSpec], int]) -> None:
    specs, factor = unit
    layout = lay_out("u", specs, factor)
    kinds = [(s.compute, s.master, s.trainable) for s in layout.segments]
    assert len(set(kinds)) == len(kinds)
    assert [s.trainable for s in layout.segments] == sorted((s.trainable for s in layout.segments), reverse=True)
    end_bytes = 0
    for segment, offset in zip(layout.segments, layout.offsets_bytes, strict=True):
        assert offset == round_up(end_bytes, SEGMENT_ALIGNMENT_BYTES)
        end_bytes = offset + segment.compute_bytes
        assert {(p.compute, p.master, p.trainable) for p in segment.params} == {
            (segment.compute, segment.master, segment.trainable)
        }
        assert 0 <= segment.padding_numel <= padding_bound_numel(segment)
        assert segment.range_numel % RANGE_ALIGNMENT_NUMEL == 0
        matrix_first = [p.is_matrix for p in segment.params]
        assert matrix_first == sorted(matrix_first, reverse=True)
        for start, spec in zip(segment.starts, segment.params, strict=True):
            assert start % (MATRIX_ALIGNMENT_NUMEL if spec.is_matrix else VECTOR_ALIGNMENT_NUMEL) == 0
    assert layout.buffer_bytes == round_up(end_bytes, SEGMENT_ALIGNMENT_BYTES)


@given(units())
@settings(max_examples=30, deadline=None)
def test_order_within_a_kind_is_the_given_one(unit: tuple[list[ParamSpec], int]) -> None:
    specs, factor = unit
    for segment in lay_out("u", specs, factor).segments:
        for matrices in (True, False):
            laid = [int(p.name[1:]) for p in segment.params if p.is_matrix is matrices]
            assert laid == sorted(laid)


@given(st.lists(st.integers(1, 64).map(lambda n: (n, 256)), min_size=1, max_size=20), st.integers(1, 512))
@settings(max_examples=60, deadline=None)
def test_padding_of_whole_rows_is_less_than_256_elements_a_rank(shapes: list[tuple[int, int]], factor: int) -> None:
    specs = [ParamSpec(f"p{i}", shape, torch.bfloat16, torch.float32, True) for i, shape in enumerate(shapes)]
    (segment,) = lay_out("u", specs, factor).segments
    assert segment.padding_numel < 256 * factor


def test_the_padding_bound_is_reached_by_tiny_matrices() -> None:
    """Not within 256 elements a rank: each start skips. The bound says so, and the page on plans too."""
    specs = [ParamSpec(f"p{i}", (1, 1), torch.float32, torch.float32, True) for i in range(100)]
    (segment,) = lay_out("u", specs, 2).segments
    assert segment.padding_numel > 256 * 2
    assert segment.padding_numel <= padding_bound_numel(segment)


def test_models_keep_the_padding_promise() -> None:
    padding = padding_module()
    for model in padding.models():
        for world in padding.WORLDS:
            padding.check(model, world)


def test_written_padding_tables_are_what_the_benchmark_computes() -> None:
    padding = padding_module()
    root = Path(__file__).parents[2]
    assert padding.whole_model_table() in (root / "docs" / "plans.md").read_text()
    results = (root / "benchmarks" / "padding" / "results.md").read_text()
    assert padding.whole_model_table() in results and padding.unit_table() in results


def test_the_promise_of_the_benchmark_bites() -> None:
    padding = padding_module()
    tiny = padding.Model("tiny", {"block": (1, {f"w{i}": (1, 1) for i in range(100)})})
    with pytest.raises(AssertionError, match="tiny, block, 2 ranks"):
        padding.check(tiny, 2)


def test_dim_0_nearly_doubles_a_128_expert_layer_that_needs_almost_no_padding() -> None:
    padding = padding_module()
    (block, *_) = padding.rows(padding.gpt_oss_like(), 256)
    assert 0.98 < block.dim0_share < 1.0
    assert block.share < 0.0001


@pytest.mark.parametrize(
    ("shape", "world", "expected_numel"), [((128, 5, 7), 256, 128 * 35), ((8, 3), 4, 0), ((7,), 4, 1), ((9, 2), 4, 6)]
)
def test_dim_0_formula(shape: tuple[int, ...], world: int, expected_numel: int) -> None:
    formula = padding_module().dim0_padding_numel
    assert formula(shape, world) == expected_numel
    chunk = -(-shape[0] // world)
    assert chunk * world * (torch.empty(shape).numel() // shape[0]) - torch.empty(shape).numel() == expected_numel


def broken(layout: UnitLayout, **changes: object) -> UnitLayout:
    (segment, *rest) = layout.segments
    return dataclasses.replace(layout, segments=(dataclasses.replace(segment, **changes), *rest))


def test_check_refuses_broken_layouts() -> None:
    two = [ParamSpec(n, (16, 32), torch.float32, torch.float32, True) for n in "ab"]
    frozen = ParamSpec("c", (16, 32), torch.float32, torch.float32, False)
    layout = lay_out("u", [*two, frozen], 2)
    layout.check()
    for wrong in (
        broken(layout, starts=(0, 256)),  # b begins inside a
        broken(layout, starts=(0, 1024)),  # b ends behind the segment
        broken(layout, numel=1025),  # unequal ranges
        broken(layout, numel=1000),  # ranges that are no multiple of 256
        broken(layout, numel=2048),  # runs into the next segment
        dataclasses.replace(layout, offsets_bytes=(0, 4100)),  # unaligned
        dataclasses.replace(layout, buffer_bytes=4096),  # ends behind the buffer
    ):
        with pytest.raises(AssertionError):
            wrong.check()


def test_text_names_every_parameter_with_its_elements() -> None:
    specs = [
        ParamSpec("w", (20, 30), torch.bfloat16, torch.float32, True),
        ParamSpec("b", (20,), torch.bfloat16, torch.float32, True),
        ParamSpec("scale", (), torch.float32, torch.float32, False),
    ]
    assert lay_out("block", specs, 3).text() == (
        "unit block: 4608 bytes\n"
        "  at 0: trainable bf16 (master fp32), 3 x 256 elements, padding 148\n"
        "    [0:600) w (20, 30)\n"
        "    [608:628) b (20,)\n"
        "  at 1536: frozen fp32 (master fp32), 3 x 256 elements, padding 767\n"
        "    [0:1) scale ()"
    )


def test_a_unit_without_parameters_is_empty_and_an_empty_parameter_has_no_owner() -> None:
    assert lay_out("u", [], 4).buffer_bytes == 0
    (segment,) = lay_out("u", [ParamSpec("e", (0, 5), torch.float32, torch.float32, True)], 4).segments
    assert [segment.owned(0, i) for i in range(4)] == [(0, 0)] * 4
    assert segment.range_numel == 256  # a collective of no elements is never planned


def test_short_names_of_dtypes() -> None:
    assert [short_dtype(d) for d in DTYPES] == ["bf16", "fp16", "fp32", "fp64", "int8"]
