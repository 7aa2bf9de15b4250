"""Whose weights round ties away from zero in the forward that comes, where lamina chooses how masters lie."""

from __future__ import annotations

from torch import nn

from lamina.runtime import halving
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.halved import may_be_halved
from lamina.runtime.unit import Unit


def coming_halves(model: nn.Module, trains: bool) -> set[str]:
    """Names of parameters; `trains`: the forward will have gradients."""
    held, found = list(halving._held()), set()
    for unit in RUNTIMES[model].units:
        if _comes_in_halves(unit, trains, held):
            for number, segment in enumerate(unit.layout.segments):
                if number in unit.halved or (not unit.halved and may_be_halved(segment)):
                    found |= {spec.name for spec in segment.params}
    return found


def _comes_in_halves(unit: Unit, trains: bool, held: list[set[int]]) -> bool:
    """What `halving.choose` is going to do, which is not asked: it would count a step."""
    own = unit.halving
    if not unit.halved:
        params = halving._halvable(unit) if own.is_free else set()
        return bool(params) and any(params <= ids for ids in held) and halving._may_change(unit)
    if not own.is_free or not trains or not unit.dirty.value:
        return True
    is_touched = unit.has_whole_masters or any(master.was_touched for master in unit.halved.values())
    return not (is_touched and own.touched_steps + 1 >= halving.PATIENCE)
