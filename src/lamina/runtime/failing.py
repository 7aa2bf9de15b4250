"""Where in a step memory ran out: phase and unit, read from what an error leaves behind.

torch says how much was asked for and by which line. A person needs the unit and the phase, because that is where a plan
has a number. Nothing is noted while a step runs: the frames that the error has passed hold the modules of a forward,
and the uses that a backward had begun stay open until the next forward cleans up.

`lamina train` makes an error of its own of it, with a forecast. In a loop of one's own the error stays torch's, and
gets a note when nobody has caught it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from lamina.errors import LaminaError
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.report import readable_bytes, report

CPU_WORDS = ("can't allocate memory", "not enough memory")  # of torch's allocator for CPUs, which raises RuntimeError
UNITS_BYTES = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Of a step; `phase` is "forward", "loss", "backward", "optimizer" or "evaluation"."""

    phase: str
    unit: str = ""  # "": none, or nobody knows

    def __str__(self) -> str:
        return f"{self.phase} of `{self.unit}`" if self.unit else self.phase

    @property
    def moments(self) -> tuple[str, ...]:
        """What a plan calls it, the nearest first."""
        if self.phase == "backward":
            return (f"backward {self.unit or 'loss'}", "backward loss")
        if self.phase in ("forward", "evaluation"):
            return (f"forward {self.unit or 'root'}",)
        return (self.phase,)


def ran_out(error: BaseException) -> bool:
    """Whether it says that there is no memory: torch's own error of a GPU, or its RuntimeError of a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_WORDS)


def asked_bytes(error: BaseException) -> int | None:
    """What torch tried to allocate; None if the error does not say."""
    found = ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * UNITS_BYTES[found[2].lower()])


def place_of(error: BaseException, model: nn.Module) -> Place:
    """Where in a step of the sharded `model` the error came up; to be asked before the next forward."""
    names = {id(module): name for name, module in model.named_modules()}
    phase, deepest = "loss", ""
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        owner, function = frame.f_locals.get("self"), frame.f_code.co_name
        if id(owner) in names:
            deepest = names[id(owner)] or deepest
            if phase == "loss":
                phase = "forward"
        elif isinstance(owner, torch.optim.Optimizer):
            return Place("optimizer")
        elif function == "_engine_run_backward":
            phase, deepest = "backward", ""  # what follows runs again in it
        elif function == "evaluate":
            phase = "evaluation"
    if phase == "loss":
        return Place(phase)
    unit = _unit_of(deepest, model) if deepest or phase != "backward" else _open_unit(model)
    return Place(phase, unit)


def note_of(error: BaseException) -> str:
    """What a terminal says below an error of memory that nobody caught; empty for others. Local, and never raises."""
    if isinstance(error, LaminaError) or not ran_out(error):
        return ""
    places = {model: place_of(error, model) for model in RUNTIMES}
    inside = {model: place for model, place in places.items() if place.unit or len(places) == 1}
    if len(inside) != 1:
        return ""  # no sharded model, or several and nobody knows which
    ((model, place),) = inside.items()
    about = report(model)
    where = f"in {place}" if place.phase != "loss" else "outside the model's forward and backward"
    kinds = ", ".join(f"{kind} {readable_bytes(size)}" for kind, size in about.memory.items())
    further = "" if about.strategy == "zero3" else ", strategy='zero3'"
    return (
        f"lamina: memory ran out {where}. The model's state is {readable_bytes(about.memory_bytes)} here ({kinds}); "
        "what else was taken are activations, the loss, and your own tensors.\n"
        f"Smallest changes first: lamina.shard(..., recompute='selective' or 'full'{further}), or the same batch in "
        "more passes: `with lamina.accumulate(model, last=...)`. What fits is known before it runs: lamina.plan(model, "
        "gpus, batch=, seq=)"
    )


def _unit_of(module: str, model: nn.Module) -> str:
    """The innermost unit that a module lies in."""
    units = RUNTIMES[model].units if model in RUNTIMES else []
    opening = {name: unit.name for unit in reversed(units) for name in unit.plan.modules if name}
    holding = [name for name in opening if module == name or module.startswith(f"{name}.")]
    return opening[max(holding, key=len)] if holding else "root"


def _open_unit(model: nn.Module) -> str:
    """The unit whose backward had begun last; empty before the first one."""
    if model not in RUNTIMES:
        return ""
    phase = RUNTIMES[model].engine.phase
    if phase is None or not phase.is_backward:
        return ""
    uses = [use for active in phase.tasks.values() for use in active]
    names = [use.visits.unit for use in uses]
    return next((name for name in reversed(names) if name != "root"), names[-1] if names else "")
