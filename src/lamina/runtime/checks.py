"""`check()`: is this model still one model over all ranks?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.core.control import name_ranks
from lamina.core.uncompiled import uncompiled
from lamina.errors import Disagreement
from lamina.runtime.access import runtime_of
from lamina.runtime.agreement import checksum
from lamina.runtime.unit import Unit


@uncompiled
def check(model: nn.Module) -> None:
    """Raise if parameters were cast, moved or replaced, or if replicas of one range differ. Collective.

    Raises:
        ParameterChanged: a parameter is not where `shard()` put it, or has another dtype.
        Disagreement: two ranks that hold the same range hold different values.
    """
    runtime = runtime_of(model)
    for unit in runtime.units:
        unit.window.check()
        unit.check_masters()
    units = [unit for unit in runtime.units if not unit.mesh.replicas.is_trivial]
    sums = [checksum(values) for unit in units for values in _values_of(unit)]
    if runtime.mesh.world == 1 or not sums:
        return
    names = [f"{unit.name}" for unit in units for _ in unit.masters]
    rows = runtime.control.exchange([runtime.mesh.range_index, *sums], "check")
    for number, name in enumerate(names, start=1):
        by_range: dict[int, list[int]] = {}
        for rank, row in enumerate(rows):
            by_range.setdefault(row[0] if not units_are_full(units, number) else 0, []).append(rank)
        for ranks in by_range.values():
            different = [rank for rank in ranks if rows[rank][number] != rows[ranks[0]][number]]
            if different:
                raise Disagreement(
                    f"replicas of unit `{name}` differ: {name_ranks(different)} hold other values "
                    f"than rank {ranks[0]}. "
                    "Something wrote to parameters on some ranks only; load the same checkpoint on all of them"
                )


def _values_of(unit: Unit) -> list[Tensor]:
    """By segment. Whole parameters may lie elsewhere than in their masters (`p.data = value`)."""
    if unit.communicates:
        return unit.read_masters()
    params = iter(unit.params)
    return [torch.cat([next(params).detach().reshape(-1) for _ in segment.params]) for segment in unit.layout.segments]


def units_are_full(units: list, number: int) -> bool:
    """Whether entry `number` of the checksums is of a unit that every rank holds whole."""
    flat = [unit for unit in units for _ in unit.masters]
    return flat[number - 1].mesh.factors.optimizer == 1
