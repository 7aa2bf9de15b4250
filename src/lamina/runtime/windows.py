"""Where a unit's parameters stand in modules, and their exchange with full parameters.

`setattr` of a parameter takes 1.4 us and checks what does not change; an entry of the module's own dict is exchanged in
a twentieth. All entries of a unit in one dict are exchanged by one `update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from lamina.errors import ParameterChanged


@dataclass
class Entry:
    """One place in a module where a parameter is swapped in and out."""

    parameters: dict[str, nn.Parameter | None]  # the module's own dict
    attribute: str
    position: int  # number of the parameter in the layout
    path: str  # qualified name of this place


class Window:
    """All entries of one unit in one module's dict."""

    def __init__(self, parameters: dict[str, nn.Parameter | None]) -> None:
        self.parameters = parameters
        self.entries: list[Entry] = []
        self.persistent: dict[str, nn.Parameter | None] = {}  # what is there while it is shut

    def fulls(self, values: Sequence[nn.Parameter]) -> dict[str, nn.Parameter | None]:
        """What `show` puts there, from values in layout order."""
        return {entry.attribute: values[entry.position] for entry in self.entries}

    def show(self, values: dict[str, nn.Parameter | None]) -> None:
        self.parameters.update(values)

    def shut(self) -> None:
        self.parameters.update(self.persistent)

    def check(self) -> None:
        """The module still holds the parameters that were sharded."""
        if all(map(is_, map(self.parameters.get, self.persistent), self.persistent.values())):
            return
        for entry in self.entries:
            found = self.parameters.get(entry.attribute)
            if found is not self.persistent[entry.attribute]:
                raise ParameterChanged(_replaced(entry, found))


def windows_of(entries: Sequence[Entry], params: Sequence[nn.Parameter]) -> list[Window]:
    """Entries by dict; `params` in layout order."""
    windows: dict[int, Window] = {}
    for entry in entries:
        window = windows.setdefault(id(entry.parameters), Window(entry.parameters))
        window.entries.append(entry)
        window.persistent[entry.attribute] = params[entry.position]
    return list(windows.values())


def refresh_flat_weights(module: nn.RNNBase) -> None:
    """Recurrent modules hold a list of their weights beside the dict."""
    module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]  # type: ignore[assignment, union-attr]


def release_computed_weights(model: nn.Module) -> None:
    """Old-style weight norm keeps a weight computed when it was applied, whose graph holds the parameters.

    Its hook computes it anew at each forward.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm) and isinstance(computed := getattr(module, hook.name, None), Tensor):
                setattr(module, hook.name, computed.detach())


def _replaced(entry: Entry, found: object) -> str:
    what = "was deleted" if found is None else f"was replaced by a new {type(found).__name__}"
    return (
        f"`{entry.path}` {what} after lamina.shard(). Change values in place instead: `with torch.no_grad(): "
        "p.copy_(new)`, `load_state_dict(..., assign=False)`, or `with lamina.gathered(module, write=True)`"
    )
