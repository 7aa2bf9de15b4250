"""The law of a unit plan, tried on the real model: parameters are readable only while their unit's window is open.

No ranks and no sharding: outside its unit's window every parameter is replaced by a `Closed` tensor, which knows its
shape and dtype and refuses every operation. If the forward still gives the plain model's output, then no weight is used
outside its window, which is all that a plan promises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lamina.runtime.units import UnitPlan


class ClosedError(RuntimeError):
    """A parameter was used while its unit's window was closed."""


class Closed(torch.Tensor):
    """Shape and dtype of a parameter without its values."""

    parameter_name: str
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, like: Tensor, name: str) -> Closed:
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, requires_grad=like.requires_grad)
        made.parameter_name = name
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.parameter_name for argument in args if isinstance(argument, Closed)]
        raise ClosedError(f"{func} used {names or 'a parameter'} while the unit's window was closed")


class _Window:
    """Swaps one unit's parameters in while at least one of its modules runs."""

    def __init__(self, model: nn.Module, plan: UnitPlan) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.open_count = 0
        self.opened = 0  # how often the window opened
        self.slots: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for slot, owner in plan.aliases:
            module_name, _, attribute = slot.rpartition(".")
            closed = Closed(parameters[owner], owner)
            self.slots.append((model.get_submodule(module_name), attribute, parameters[owner], closed))
        self.swap(full=False)

    def swap(self, *, full: bool) -> None:
        for module, attribute, parameter, closed in self.slots:
            module._parameters[attribute] = parameter if full else closed  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):  # keeps a list of its weights beside `_parameters`
                module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]

    def enter(self, *_: Any) -> None:
        self.open_count += 1
        if self.open_count == 1:
            self.opened += 1
            self.swap(full=True)

    def leave(self, *_: Any) -> None:
        self.open_count -= 1
        if self.open_count == 0:
            self.swap(full=False)


@contextmanager
def only_in_windows(model: nn.Module, plans: Sequence[UnitPlan]) -> Iterator[dict[str, int]]:
    """Inside, weights can be used in their windows only; yields how often each opened, complete at exit."""
    modules = dict(model.named_modules())
    windows = {plan.name: _Window(model, plan) for plan in plans}
    opened: dict[str, int] = {}
    handles = []
    for plan in plans:
        for name in plan.modules:
            window = windows[plan.name]
            handles.append(modules[name].register_forward_pre_hook(window.enter, prepend=True))
            handles.append(modules[name].register_forward_hook(window.leave, always_call=True))
    try:
        yield opened
    finally:
        opened.update({name: window.opened for name, window in windows.items()})
        for handle in handles:
            handle.remove()
        for window in windows.values():
            window.swap(full=True)
