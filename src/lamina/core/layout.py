"""Where each parameter of a unit lies: segments, element ranges, padding.

Dim-0 sharding pads every tensor to a multiple of the world size (99 % on a 128-expert layer over 256 ranks), and one
flat parameter a unit mixes dtypes and frozen weights. Here a unit is a few *segments* (one compute dtype, one master
dtype, one trainability each). A segment is its parameters one after the other, matrices first, cut into equal ranges
at any element; the padding is at the end, once.

Pure: no communication, no device. `UnitLayout.text()` is the readable form, `check()` the law.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

MATRIX_ALIGNMENT_NUMEL = 256  # starts of matrices: whole quantisation blocks, whole vector loads
VECTOR_ALIGNMENT_NUMEL = 16  # starts of vectors: 32 bytes in 16 bit; 256 would cost more than the total padding
RANGE_ALIGNMENT_NUMEL = 256  # length of a rank's range: keeps NCCL on its fast path at odd world sizes
SEGMENT_ALIGNMENT_BYTES = 256  # start of a segment in the unit's buffer, whatever its dtype


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the plan sees it."""

    name: str
    shape: tuple[int, ...]
    compute: torch.dtype
    master: torch.dtype
    trainable: bool

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) >= 2


@dataclass(frozen=True)
class Segment:
    """Parameters of one compute dtype, master dtype and trainability, contiguous in the unit's buffer."""

    compute: torch.dtype
    master: torch.dtype
    trainable: bool
    params: tuple[ParamSpec, ...]
    starts: tuple[int, ...]  # element at which each parameter begins
    numel: int  # with padding: factor * range_numel
    factor: int  # ranges the segment is cut into

    @property
    def range_numel(self) -> int:
        return self.numel // self.factor

    @property
    def padding_numel(self) -> int:
        return self.numel - sum(p.numel for p in self.params)

    @property
    def compute_bytes(self) -> int:
        return self.numel * self.compute.itemsize

    def owned(self, param: int, index: int) -> tuple[int, int]:
        """Element range [start, stop) of parameter number `param` that lies in range `index`; (0, 0) when none does."""
        first, spec = self.starts[param], self.params[param]
        start = max(index * self.range_numel - first, 0)
        stop = min((index + 1) * self.range_numel - first, spec.numel)
        return (start, stop) if start < stop else (0, 0)

    def offset_in_range(self, param: int, index: int) -> int:
        """Where the owned part of a parameter begins inside range `index`."""
        return max(self.starts[param] - index * self.range_numel, 0)


@dataclass(frozen=True)
class UnitLayout:
    """The segments of one unit and where each begins in the unit's buffer."""

    name: str
    segments: tuple[Segment, ...]
    offsets_bytes: tuple[int, ...]
    buffer_bytes: int

    @cached_property
    def params(self) -> tuple[ParamSpec, ...]:
        return tuple(p for s in self.segments for p in s.params)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    def thawed(self, positions: Collection[int]) -> UnitLayout:
        """The same places with these parameters trainable: all of a segment's get a place for their gradient."""
        params = [replace(p, trainable=p.trainable or i in positions) for i, p in enumerate(self.params)]
        segments = []
        for segment in self.segments:
            own, params = tuple(params[: len(segment.params)]), params[len(segment.params) :]
            segments.append(replace(segment, params=own, trainable=any(p.trainable for p in own)))
        return replace(self, segments=tuple(segments))

    def text(self) -> str:
        lines = [f"unit {self.name or 'root'}: {self.buffer_bytes} bytes"]
        for segment, offset in zip(self.segments, self.offsets_bytes, strict=True):
            kind = "trainable" if segment.trainable else "frozen"
            lines.append(
                f"  at {offset}: {kind} {short_dtype(segment.compute)} (master {short_dtype(segment.master)}), "
                f"{segment.factor} x {segment.range_numel} elements, padding {segment.padding_numel}"
            )
            lines += [
                f"    [{start}:{start + spec.numel}) {spec.name} {tuple(spec.shape)}"
                for start, spec in zip(segment.starts, segment.params, strict=True)
            ]
        return "\n".join(lines)

    def check(self) -> None:
        """The law of a layout; AssertionError names what is broken."""
        end_bytes = 0
        for segment, offset in zip(self.segments, self.offsets_bytes, strict=True):
            assert offset % SEGMENT_ALIGNMENT_BYTES == 0 and offset >= end_bytes, f"{self.name}: segments overlap"
            end_bytes = offset + segment.compute_bytes
            assert segment.numel == segment.factor * segment.range_numel
            assert segment.range_numel % RANGE_ALIGNMENT_NUMEL == 0
            end = 0
            for start, spec in zip(segment.starts, segment.params, strict=True):
                assert start >= end, f"{spec.name} overlaps the parameter before it"
                end = start + spec.numel
            assert end <= segment.numel
            for i, spec in enumerate(segment.params):
                pieces = [segment.owned(i, r) for r in range(segment.factor)]
                assert sum(b - a for a, b in pieces) == spec.numel, f"{spec.name} is not covered once"
        assert end_bytes <= self.buffer_bytes


def lay_out(name: str, specs: Iterable[ParamSpec], factor: int) -> UnitLayout:
    """Lay the parameters of a unit out for `factor` ranges; the order within a kind is the given one."""
    kinds: dict[tuple[bool, torch.dtype, torch.dtype], list[ParamSpec]] = {}
    for spec in specs:
        kinds.setdefault((not spec.trainable, spec.compute, spec.master), []).append(spec)
    segments, offsets, offset_bytes = [], [], 0
    for (frozen, compute, master), members in sorted(kinds.items(), key=lambda item: item[0][0]):
        segments.append(_segment(compute, master, not frozen, members, factor))
        offsets.append(offset_bytes)
        offset_bytes = round_up(offset_bytes + segments[-1].compute_bytes, SEGMENT_ALIGNMENT_BYTES)
    return UnitLayout(name, tuple(segments), tuple(offsets), offset_bytes)


def _segment(
    compute: torch.dtype, master: torch.dtype, trainable: bool, members: list[ParamSpec], factor: int
) -> Segment:
    ordered = sorted(members, key=lambda spec: not spec.is_matrix)  # stable: matrices first
    starts, end = [], 0
    for spec in ordered:
        end = round_up(end, MATRIX_ALIGNMENT_NUMEL if spec.is_matrix else VECTOR_ALIGNMENT_NUMEL)
        starts.append(end)
        end += spec.numel
    range_numel = round_up(-(-max(end, 1) // factor), RANGE_ALIGNMENT_NUMEL)
    return Segment(compute, master, trainable, tuple(ordered), tuple(starts), range_numel * factor, factor)


def padding_bound_numel(segment: Segment) -> int:
    """Upper bound on a segment's padding: the total, and what the starts may skip."""
    matrices = sum(spec.is_matrix for spec in segment.params)
    vectors = len(segment.params) - matrices
    return (
        segment.factor * RANGE_ALIGNMENT_NUMEL
        + matrices * (MATRIX_ALIGNMENT_NUMEL - 1)
        + vectors * (VECTOR_ALIGNMENT_NUMEL - 1)
    )


def short_dtype(dtype: torch.dtype) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(
        str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch.")
    )
