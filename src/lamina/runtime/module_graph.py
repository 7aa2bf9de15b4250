"""Who runs whom, and who reads which weight: the graph that says when a parameter may be full.

`nn.Module` knows where modules are registered. A unit needs something else: a parameter may only belong to a unit
whose window is open at every moment at which something uses the parameter. Registration answers that for a weight that
is used by its own module, called by its parent, and is wrong for a tied weight, a module registered twice,
`F.linear(x, self.head.weight)` or `self.text.embed(ids)`.

Here all of these are edges of one graph: "while A's forward runs it may call module B, or read parameter p". The
units open at p are those open on *every* way to p, which is the textbook dominator problem; `open_units` solves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import is_lazy

from lamina.errors import UnitError

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# These read the weights of their children without calling them (fast paths, fused kernels).
_READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)


@dataclass(frozen=True)
class ModuleGraph:
    """Modules and parameters by their first qualified name, in registration order, and the edges between them."""

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    slots: dict[str, str]  # every module attribute that holds a parameter -> the parameter's first name
    callers: dict[str, set[str]]  # module -> modules whose forward may call it
    readers: dict[str, set[str]]  # parameter -> modules whose forward may use it
    names: dict[int, str] = field(repr=False)  # id(module) -> first name

    @classmethod
    def of(cls, model: nn.Module) -> ModuleGraph:
        """The graph that registration alone gives: parents call their children, modules use their own weights."""
        modules = dict(model.named_modules())
        names = {id(module): name for name, module in modules.items()}
        callers: dict[str, set[str]] = {name: set() for name in modules}
        parameters: dict[str, nn.Parameter] = {}
        first: dict[int, str] = {}
        slots: dict[str, str] = {}
        readers: dict[str, set[str]] = {}
        for name, module in modules.items():
            for child in module._modules.values():
                if child is not None:
                    callers[names[id(child)]].add(name)
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                slot = qualified(name, attribute)
                if is_lazy(parameter):
                    raise UnitError(
                        f"`{slot}` has no shape yet (its module is a lazy one); "
                        "run one batch through the model before lamina.shard(model)"
                    )
                owner = first.setdefault(id(parameter), slot)
                parameters.setdefault(owner, parameter)
                slots[slot] = owner
                readers.setdefault(owner, set()).add(name)
        return cls(modules, parameters, slots, callers, readers, names)

    def inside(self, name: str) -> set[str]:
        """First names of the parameters of a module and everything registered in it."""
        seen: set[str] = set()
        for module in self.modules[name].modules():
            base = self.names[id(module)]
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    seen.add(self.slots[qualified(base, attribute)])
        return seen

    def open_units(self, opens: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Units that are open whenever a module runs, and whenever a parameter is used, as bit masks.

        `opens` gives for some modules the number of the unit that their forward opens. Starting from "all are open",
        masks only shrink, so the loop ends; registration order makes two rounds the rule.
        """
        everything = (1 << (max(opens.values(), default=0) + 1)) - 1
        own = {name: 1 << opens[name] if name in opens else 0 for name in self.modules}
        at_module = dict.fromkeys(self.modules, everything)
        changed = True
        while changed:
            changed = False
            for name in self.modules:
                mask = 0 if name == "" else everything
                for caller in self.callers[name]:
                    mask &= at_module[caller]
                mask |= own[name]
                if mask != at_module[name]:
                    at_module[name], changed = mask, True
        at_parameter: dict[str, int] = {}
        for name, users in self.readers.items():
            mask = everything
            for user in users:
                mask &= at_module[user]
            at_parameter[name] = mask
        return at_module, at_parameter

    def owners(self, opens: Mapping[str, int]) -> dict[str, int]:
        """Number of the innermost unit that is open at every use of each parameter; the model's forward opens one."""
        at_module, at_parameter = self.open_units(opens)
        depth: dict[int, int] = {}
        for name, number in opens.items():
            depth[number] = max(depth.get(number, 0), at_module[name].bit_count())
        result = {}
        for parameter, mask in at_parameter.items():
            inner = [number for number in depth if mask >> number & 1]
            result[parameter] = max(inner, key=lambda number: (depth[number], number))
        return result


def qualified(module_name: str, attribute: str) -> str:
    """`module.attribute`, without a leading dot for the model itself."""
    return f"{module_name}.{attribute}" if module_name else attribute


def within(name: str, other: str) -> bool:
    """Whether the module `name` is strictly inside the module `other`."""
    return name != other and (other == "" or name.startswith(other + "."))


def has_forward(module: nn.Module) -> bool:
    """Whether calling the module runs anything: containers and bare modules cannot open a unit's window."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return type(module).forward not in _UNIMPLEMENTED
    return getattr(module.forward, "__func__", module.forward) not in _UNIMPLEMENTED


def is_atom(module: nn.Module) -> bool:
    """Whether a unit must not begin inside this module, because it reads the weights of its children directly."""
    return isinstance(module, _READ_THEIR_CHILDREN) or "parametrizations" in module._modules


_UNIMPLEMENTED = (nn.Module.forward,)
