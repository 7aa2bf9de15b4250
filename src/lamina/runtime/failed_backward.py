"""After a backward that has raised: modules show the user's parameters again.

It is also where autograd's own word for weights that are not there gets its names: see Note [Given back] in slots.py.

torch drops the callbacks of a backward that ends with an error, and the next forward cleans up what it left. Before
that, whoever caught the error may call `model.zero_grad()`, save, or look at `model.parameters()`: with the windows of
the broken backward still open they would find gathered copies there, and gradients would outlive `zero_grad`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from weakref import WeakSet

from lamina.core.shard_optim import AFTER_FAILED_BACKWARDS, EXPLANATIONS, others_run_backward
from lamina.core.slots import LEAST_GIVEN_BACK, outlived
from lamina.errors import StateError
from lamina.runtime.suspects import described

if TYPE_CHECKING:
    from lamina.runtime.engine import Engine

ENGINES: WeakSet[Engine] = WeakSet()


def shut_windows() -> None:
    """Local. A window that a forward has open around the backward stays: its phase is the forward's.

    Gradients of whole parameters are what they were before the backward. To those of Shards, what was reduced before
    the error stays added, as torch leaves it.
    """
    if others_run_backward():
        return  # it may be theirs that is open: the next forward cleans up
    for engine in list(ENGINES):
        if engine.phase is not None and engine.phase.is_backward:
            for unit in engine.units:
                if unit.windows:
                    unit.swap_out()
                    unit.windows = 0
            if not engine.lanes.is_recording:
                engine.lanes.join()  # gathers read masters, reductions write gradients: both are the user's now
            engine.gradients.restore()
        elif engine.phase is None:
            engine.gradients.restore()


def close_stale() -> None:
    """Local. Close what an error has ended and nobody has closed, before modules are looked at from outside."""
    for engine in list(ENGINES):
        if engine.is_stale():
            engine.close_failed()


def explain_given_back(error: BaseException) -> StateError | None:
    """The error in our words if a backward has come to weights that are not there."""
    said = re.search(r"modified by an inplace operation: (.*) is at version (\d+);", str(error), re.DOTALL)
    for engine in ENGINES if said else ():
        for unit in engine.units:
            if any(slot.given_back == int(said[2]) for slot in unit.slots):  # type: ignore[index]
                return StateError(_given_back(described(unit, said[1]), unit.name))  # type: ignore[index]
    return outlived("a parameter") if said and int(said[2]) >= LEAST_GIVEN_BACK else None


def _given_back(parameters: str, unit: str) -> str:
    return (
        f"a backward needs {parameters}, which is not gathered: it came into `{unit}` past the outputs of its "
        f"forward, through a tensor that was left in a list or another object, or is made a second time after its "
        f"weights were changed. Return that tensor from the forward of `{unit}`, keep it as an attribute of a module "
        "in it, or type `with lamina.keep(model):` around the forward and the backward"
    )


AFTER_FAILED_BACKWARDS.append(shut_windows)
EXPLANATIONS.append(explain_given_back)
