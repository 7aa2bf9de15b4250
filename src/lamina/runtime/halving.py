"""Which units keep their masters in halves, where `Precision(halves=None)` leaves it to lamina.

Halves (halved.py) take two bytes an element less and no time where one optimizer updates both where they lie. Whatever
else touches a parameter has them joined before and halved again after it, so not every training is better off.

Note [Free]
    1. `shard()` leaves a unit's form free where halves are possible and where an update of them takes no longer. Its
       masters are then whole until an optimizer that clips in its step holds all of them that are trained: looked for
       before each publishing, so it may be built at any time.
    2. A unit that anything else has made whole at `PATIENCE` steps in a row has masters that stay whole. A step is what
       lies between two forwards with gradients that find the unit changed: neither evaluations nor further
       micro-batches count.
    3. Each rank decides for itself, and nobody waits: a master's value does not depend on its form, and what is
       published only where it is a tie (core/halves.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lamina.core.lanes import Lanes
from lamina.core.strategy import Factors
from lamina.runtime.halved import has_halves, may_be_halved, put_together, take_apart

if TYPE_CHECKING:
    from lamina.runtime.unit import Unit

PATIENCE = 3  # steps in a row
NO_HOLDER = "no lamina.optim.AdamW(max_norm=...) holds all of them (float('inf') clips nothing, and will do)"
FROZEN = "they were frozen when the model was sharded"
TOUCHED = "something else touches parameters at every step, such as an average of them, a norm, or an optimizer"


class Clips(Protocol):
    """An optimizer that updates halves where they lie if it clips (`max_norm` is not None)."""

    max_norm: float | None
    param_groups: list[dict[str, Any]]

    def let_go(self) -> None:
        """Hold no part of any masters until the next step."""


CLIPPING: weakref.WeakSet[Clips] = weakref.WeakSet()


@dataclass
class Halving:
    """Of one unit."""

    is_free: bool = False  # Note [Free]
    touched_steps: int = 0  # in a row
    why_whole: str = ""


def pays_on(device: torch.device) -> bool:
    """Whether an update of halves takes no longer: on GPUs it is one kernel, on CPUs torch's, piece after piece."""
    return device.type == "cuda"


def why_never(halves: bool | None, factors: Factors, device: torch.device) -> str:
    """Why no form is left free, of units that peers read; "": those of masters that may be halved are."""
    if halves is False:
        return "Precision(halves=False) asks for it"
    if factors.optimizer != factors.params:
        return "optimizer state is not split like parameters"
    return "" if pays_on(device) else "an update of halves takes longer on a CPU, where only halves=True asks for it"


def leave_free(units: Iterable[Unit], halves: bool | None) -> None:
    """Note [Free] 1, of units for which nothing has been chosen; `halves`: what was asked for."""
    for unit in units:
        if unit.sharded and not unit.halving.why_whole:
            why = FROZEN if halves else why_never(halves, unit.mesh.factors, unit.mesh.device)
            unit.halving.is_free = not why and any(map(has_halves, unit.layout.segments))
            unit.halving.why_whole = why


def choose(units: Sequence[Unit], lanes: Lanes) -> Iterator[Unit]:
    """Note [Free]: before a publishing. Gives the units whose masters have changed their form."""
    free = [unit for unit in units if unit.halving.is_free and not unit.kept]
    for unit in free if torch.is_grad_enabled() else ():
        if unit.halved and unit.dirty.value and _is_tired(unit):
            stay_whole(unit, TOUCHED)
            yield unit
    waiting = [unit for unit in free if unit.halving.is_free and unit.trainable and not unit.halved]
    held = list(_held()) if waiting else []
    for unit in waiting if held else ():
        params = _halvable(unit)
        if params and any(params <= ids for ids in held) and _may_change(unit):
            unit.check_masters()
            _have_let_go()
            take_apart(unit, lanes)
            _note_other_form(unit)
            yield unit


def all_are_held(units: Iterable[Unit]) -> bool:
    """Whether each unit whose masters may lie in halves would have them so in the next forward."""
    held = list(_held())
    asked = [unit for unit in units if any(map(may_be_halved, unit.layout.segments))]
    return all(any(params <= ids for ids in held) if (params := _halvable(unit)) else False for unit in asked)


def _may_change(unit: Unit) -> bool:
    """Not while the weights that are published may be gathered again for a backward: they would differ at ties."""
    return unit.dirty.value or not unit.visits.alive


def stay_whole(unit: Unit, why: str) -> None:
    """From now on, and for good."""
    if unit.halved:
        unit.check_masters()
        _have_let_go()
        put_together(unit)
        _note_other_form(unit)
    unit.halving.is_free, unit.halving.why_whole = False, why


def forget_halves(units: Iterable[Unit]) -> None:
    """There are no peers any more: masters are whole, and nothing is published."""
    _have_let_go()
    for unit in units:
        put_together(unit)
        unit.published, unit.halving = [], Halving()
        unit.note_writes()


def _have_let_go() -> None:
    """Else the form that is left keeps its memory until after the backward, when optimizers look anew."""
    for optimizer in list(CLIPPING):
        optimizer.let_go()


def _note_other_form(unit: Unit) -> None:
    """Masters lie in other memory, and what is published differs at ties."""
    unit.dirty.mark()
    unit.note_writes()


def _is_tired(unit: Unit) -> bool:
    was_touched = False
    for master in unit.halved.values():
        was_touched = was_touched or master.was_touched or master.whole is not None
        master.was_touched = False
    unit.halving.touched_steps = unit.halving.touched_steps + 1 if was_touched else 0
    return unit.halving.touched_steps >= PATIENCE


def _held() -> Iterator[set[int]]:
    """Ids of the parameters of each optimizer that clips."""
    for optimizer in list(CLIPPING):
        if optimizer.max_norm is not None:
            yield {id(param) for group in optimizer.param_groups for param in group["params"]}


def _halvable(unit: Unit) -> set[int]:
    """Ids of the parameters whose masters may be halved, and which train."""
    spots = [may_be_halved(segment) for segment in unit.layout.segments for _ in segment.params]
    params: list[Tensor] = [p for i, p in enumerate(unit.params) if spots[i] and i not in unit.gone]
    return {id(param) for param in params if param.requires_grad}
