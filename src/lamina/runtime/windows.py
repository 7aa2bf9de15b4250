"""Where a unit's parameters stand in modules, and their exchange with full parameters.

`setattr` of a parameter takes 1.4 us and checks what does not change; an entry of the module's own dict is exchanged in
a twentieth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from lamina.core.full_parameter import FullParameter
from lamina.core.shard_tensor import Shard
from lamina.errors import ParameterChanged

# by entry: where it goes, under which name, what to show, and what else stands there
Shown = list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]]


@dataclass
class Entry:
    """One place in a module where a parameter is swapped in and out."""

    parameters: dict[str, nn.Parameter | None]  # the module's own dict
    attribute: str
    position: int  # number of the parameter in the layout
    path: str  # qualified name of this place


class Window:
    """All places of one unit's parameters, exchanged together."""

    def __init__(self, entries: Sequence[Entry], params: Sequence[nn.Parameter]) -> None:
        """`params`: the persistent ones, in layout order."""
        self.entries = list(entries)
        self._params = list(params)
        self._shut = [(e.parameters, e.attribute, params[e.position]) for e in self.entries]  # what it is shut to
        self._places = [(e.parameters, e.attribute) for e in self.entries]

    def values(self, values: Sequence[nn.Parameter]) -> Shown:
        """What `show` takes, from values in layout order."""
        return [(e.parameters, e.attribute, values[e.position], self._params[e.position]) for e in self.entries]

    def open(self, values: Shown) -> None:
        """Show them where the parameters that were sharded stand, in all entries or in none."""
        try:
            for parameters, attribute, value, persistent in values:
                if parameters[attribute] is not persistent:
                    break
                parameters[attribute] = value
            else:
                return
        except KeyError:
            pass
        for before, name, _, persistent in values:
            if before is parameters and name == attribute:
                raise self._refused(parameters, attribute)
            before[name] = persistent

    def show(self, values: Shown) -> None:
        for parameters, attribute, value, _ in values:
            parameters[attribute] = value

    def shut(self) -> None:
        for parameters, attribute, persistent in self._shut:
            parameters[attribute] = persistent

    def check_shown(self) -> None:
        """The modules still hold what `show` gave them: another parameter would be lost when the window shuts."""
        try:
            for parameters, attribute in self._places:
                if type(parameters[attribute]) is not FullParameter:
                    break
            else:
                return
        except KeyError:
            pass
        raise self._refused(parameters, attribute)

    def check(self) -> None:
        """The modules still hold the parameters that were sharded."""
        for parameters, attribute, persistent in self._shut:
            if parameters.get(attribute) is not persistent:
                raise self._refused(parameters, attribute)

    def _refused(self, parameters: dict[str, nn.Parameter | None], attribute: str) -> ParameterChanged:
        """The error of an entry that somebody else has written."""
        entry = next(each for each in self.entries if each.parameters is parameters and each.attribute == attribute)
        return ParameterChanged(_replaced(entry, parameters.get(attribute)))


def refresh_flat_weights(module: nn.RNNBase | None) -> None:
    """Recurrent modules hold a list of their weights beside the dict. None: one that is gone."""
    if module is not None:
        module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]  # type: ignore[assignment, union-attr]


def release_computed_weights(model: nn.Module) -> None:
    """Old-style weight norm keeps a weight computed when it was applied, whose graph holds the parameters.

    Its hook computes it anew at each forward.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm) and isinstance(computed := getattr(module, hook.name, None), Tensor):
                setattr(module, hook.name, computed.detach())


def give_memory(param: nn.Parameter, value: Tensor) -> None:
    """Let a plain parameter lie in `value`, which may have another dtype or device (one on meta has no memory yet)."""
    grad, param.grad = param.grad, None
    if param.device.type == value.device.type:
        param.data = value
    else:
        made = nn.Parameter(value, requires_grad=param.requires_grad)
        torch._C._swap_tensor_impl(param, made)
    if grad is not None:
        param.grad = grad.to(param.device, param.dtype)


def _replaced(entry: Entry, found: object) -> str:
    if type(found) is Tensor:  # no module takes one in place of a parameter
        return (
            f"`{entry.path}` is a plain tensor now, of `lamina.gathered(model)` or torch.func.functional_call: a "
            "sharded model computes with its own weights. Call it outside, or inside `with lamina.keep(model):`: "
            "there weights stay gathered over several forwards; for `generate` see lamina.shard(..., entry_points=)"
        )
    if isinstance(found, Shard) and isinstance(found, nn.Parameter) and found.name != entry.path:
        return (
            f"`{entry.path}` is the sharded parameter `{found.name}` now, which another module gathers: tie weights "
            "before lamina.shard()"
        )
    what = "was deleted" if found is None else f"was replaced by a new {type(found).__name__}"
    return (
        f"`{entry.path}` {what} after lamina.shard(). Change values in place instead: `with torch.no_grad(): "
        "p.copy_(new)`, `load_state_dict(..., assign=False)`, or `with lamina.gathered(module, write=True)`"
    )
