"""What a sharded model holds: every parameter with its ranges on all ranks, every tensor that is not split.

`state_dict()` gives this rank's `Shard`s and says nothing about who else holds the same values. A checkpoint needs to
know it: values that several ranks hold are written once, each of them writing a part. All of it follows from layouts
and factors, which every rank knows, so nobody asks anybody.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lamina.checkpoint.checksums import crc32
from lamina.checkpoint.datafile import as_bytes, view_of
from lamina.checkpoint.manifest import Piece
from lamina.checkpoint.values import check_plain
from lamina.core.layout import ParamSpec, Segment
from lamina.core.mesh import DataMesh
from lamina.core.strategy import Factors
from lamina.errors import StateError, UsageError
from lamina.runtime.assemble import Runtime
from lamina.runtime.parts import PARTS
from lamina.runtime.unit import Unit
from lamina.runtime.unit_gradients import local_of


@dataclass(frozen=True, eq=False)
class Held:
    """One parameter of a unit: its elements here, and where all of them are."""

    spec: ParamSpec
    param: nn.Parameter
    mesh: DataMesh
    segment: Segment
    number: int  # in the segment
    unit: Unit

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def owned(self) -> tuple[int, int]:
        """The elements [start, stop) that lie on this rank."""
        return self.segment.owned(self.number, self.mesh.range_index)

    @property
    def local(self) -> Tensor:
        """These elements, 1-D: the memory itself."""
        return local_of(self.param).detach().reshape(-1)

    @cached_property
    def written(self) -> tuple[int, int]:
        """The part of `owned` that this rank writes: copies of a range are written by one rank each."""
        factors, rank = self.mesh.factors, self.mesh.rank
        return self._cut(factors.range_index(rank), factors.replicas.place(rank))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Which rank writes what, in order."""
        first, range_numel = self.segment.starts[self.number], self.segment.range_numel
        replicas, writers = self.mesh.factors.replicas.size, writers_of(self.mesh.factors)
        made = []
        for index in range(first // range_numel, (first + max(self.spec.numel, 1) - 1) // range_numel + 1):
            for replica in range(replicas):
                start, stop = self._cut(index, replica)
                if start < stop:
                    made.append(Piece(writers[index, replica], start, stop))
        return tuple(made)

    def _cut(self, index: int, replica: int) -> tuple[int, int]:
        """A range of the segment is cut evenly among its copies; what of it lies in this parameter."""
        segment, replicas = self.segment, self.mesh.factors.replicas.size
        end_numel = segment.starts[-1] + segment.params[-1].numel  # padding follows
        at = index * segment.range_numel
        length = max(0, min(end_numel - at, segment.range_numel))
        begin, end = at + length * replica // replicas, at + length * (replica + 1) // replicas
        first = self.segment.starts[self.number]
        start, stop = max(begin - first, 0), min(end - first, self.spec.numel)
        return (start, stop) if start < stop else (0, 0)

    def part(self, values: Tensor) -> Tensor:
        """What this rank writes of `values`, which hold this rank's elements, or all of them."""
        start, stop = self.written
        if values.dim() == 1 and values.numel() == stop - start and not values.requires_grad:
            return values  # as it is: the usual case, a thousand times in a save that a step waits for
        flat = values.detach().reshape(-1)
        first = self.owned[0] if flat.numel() != self.spec.numel else 0
        return flat[start - first : stop - first] if start < stop else flat[:0]


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor that every rank holds whole: a buffer, a parameter that lamina leaves alone, some optimizer states."""

    name: str
    values: Tensor


@functools.cache
def writers_of(factors: Factors) -> dict[tuple[int, int], int]:
    """Data rank by number of the range and of the copy."""
    return {(factors.range_index(rank), factors.replicas.place(rank)): rank for rank in range(factors.world)}


def held_by(runtime: Runtime) -> list[Held]:
    """The parameters of all units, once each, in the order of the units. Refuses parts of larger ones by name."""
    found = []
    for unit in runtime.units:
        unit.check_masters()
        position = 0
        for segment in unit.layout.segments:
            for number, spec in enumerate(segment.params):
                param = unit.params[position]
                if param in PARTS:
                    raise UsageError(
                        f"`{spec.name}` is a part of a larger parameter (lamina.split_parameter), which lamina's "
                        "checkpoints do not hold yet: use torch.distributed.checkpoint.save(model.state_dict(), ...)"
                    )
                if position not in unit.gone:
                    found.append(Held(spec, param, unit.mesh, segment, number, unit))
                position += 1
    return found


def ties_of(runtime: Runtime) -> dict[str, str]:
    """Further names of parameters -> the name under which lamina owns them."""
    return {
        entry.path: unit.layout.params[entry.position].name
        for unit in runtime.units
        for entry in unit.entries
        if entry.path != unit.layout.params[entry.position].name
    }


def whole_tensors(model: nn.Module, held: Sequence[Held]) -> list[Whole]:
    """Persistent buffers and parameters outside all units, by qualified name."""
    placed, names = {id(h.param) for h in held}, {h.name for h in held}
    found, seen = [], set()
    for prefix, module in model.named_modules():
        inside = f"{prefix}." if prefix else ""
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, value in {**module._parameters, **kept}.items():
            if value is None or id(value) in placed or id(value) in seen:
                continue
            seen.add(id(value))
            if inside + key in names:
                raise StateError(
                    f"`{inside}{key}` is a full tensor now, of a forward or of lamina.gathered(model), which "
                    "checkpoints do not hold: save and load outside"
                )
            if type(value) not in (Tensor, nn.Parameter):
                kind = type(value).__name__
                raise UsageError(f"`{inside}{key}` is a {kind}, which lamina's checkpoints do not hold")
            check_plain(value, f"`{inside}{key}`")
            found.append(Whole(inside + key, value.detach()))
    return found


def module_states(model: nn.Module) -> dict[str, Any]:
    """What modules with `get_extra_state` want to keep, by their qualified names."""
    default = nn.Module.get_extra_state
    return {n: m.get_extra_state() for n, m in model.named_modules() if type(m).get_extra_state is not default}


def crc_of(tensor: Tensor) -> int:
    return crc32(view_of(as_bytes(tensor.detach().contiguous().cpu())))


def spread(sizes_bytes: Sequence[int], world: int) -> list[int]:
    """A rank for each whole tensor, so that all write about the same; the same answer on every rank."""
    load = [0] * world
    chosen = []
    for size_bytes in sizes_bytes:
        rank = load.index(min(load))
        load[rank] += size_bytes
        chosen.append(rank)
    return chosen
