"""Parameters that joined the model after `shard()`: adapters, replaced heads, ignored ones that begin to train.

Nothing would average their gradients: each rank would train its own, without an error. torch tells of every parameter
and module that is registered anywhere in the process, so that a forward looks only when there is something to see.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from lamina.errors import ParameterChanged, StateError
from lamina.runtime import registrations
from lamina.runtime.unit import Unit
from lamina.runtime.unregistered import Unregistered
from lamina.runtime.wrappers import refuse_steps_in_backward


class Newcomers:
    """What one sharded model holds beside the parameters of its units."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], refusal: str = "") -> None:
        """`refusal`: why nothing is to be computed with the model."""
        registrations.count_from_here()
        self.model, self.units, self.refusal = weakref.ref(model), units, refusal
        self.owned = frozenset(id(param) for unit in units for param in unit.params)
        self.seen = -1  # registrations in the process when this last looked
        self.others: list[tuple[str, nn.Parameter]] = []
        self.unregistered = Unregistered(model)

    def check(self) -> None:
        """Before a root forward: raise for a parameter in no unit that wants a gradient."""
        if self.refusal:
            raise StateError(self.refusal)
        model = self.model()
        if self.seen != registrations.count() and model is not None:
            self.seen = registrations.count()
            self.unregistered.walk_next_forwards()
            refuse_steps_in_backward(self.units)
            for unit in self.units:  # what stands where one of theirs stood is named as that
                unit.window.check()
            self.others = [(name, p) for name, p in model.named_parameters() if id(p) not in self.owned]
        if not self.others or not torch.is_grad_enabled():
            return
        for name, param in self.others:
            if param.requires_grad:
                raise ParameterChanged(
                    f"`{name}` requires a gradient but belongs to no unit: it was added or replaced after "
                    "lamina.shard(), or ignored there, and its gradient would not be averaged over ranks. Type "
                    f"`lamina.adopt(model, {module_expression(name.rpartition('.')[0])})` on every rank once it is "
                    f"there, or `model.get_parameter({name!r}).requires_grad_(False)`"
                )


def parameters_beside(model: nn.Module, units: Sequence[Unit]) -> tuple[nn.Parameter, ...]:
    """The parameters of a model that lie in no unit."""
    owned = {id(param) for unit in units for param in unit.params}
    return tuple(param for param in model.parameters() if id(param) not in owned)


def module_expression(name: str) -> str:
    """What a user types for a module of `model` with that name."""
    if not name:
        return "model"
    plain = all(part.isidentifier() for part in name.split("."))
    return f"model.{name}" if plain else f"model.get_submodule({name!r})"
