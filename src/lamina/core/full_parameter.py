"""What a module's forward computes with: parameters over the memory that a unit is gathered into.

Whoever keeps one, or a view of it, beyond its forward has other weights before him later: see keepers.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.shard_tensor import OWN_ATTRIBUTES
from lamina.errors import StateError

_set_data = Tensor.data.__set__  # type: ignore[attr-defined]


def _owner_of(tensor: Any) -> nn.Parameter | None:
    owner = vars(tensor).get("_owner")
    return None if owner is None else owner()


def _is_own(name: str) -> bool:
    return name == "_owner" or name.startswith("_dynamo")


class FullParameter(nn.Parameter):
    """A parameter while it is gathered.

    torch's own `.data` hides writes from the version counter, by which a forward that changes its weights is known: it
    would lose them without a word. This one counts them.

    What users hang on a parameter belongs to the Shard that this one stands for, and is copied here when a use begins
    (torch.compile takes no attributes that `__getattr__` finds). What is set here is set there, too; not what
    torch.compile notes of a tensor, which is about this memory.
    """

    _owner: Callable[[], nn.Parameter | None]

    def belong_to(self, owner: Callable[[], nn.Parameter | None]) -> None:
        """`owner` gives the Shard, or None once the model is gone, and holds neither: kept graphs hold this one."""
        vars(self)["_owner"] = owner

    def take_attributes(self, param: nn.Parameter) -> None:
        here, there = vars(self), {name: value for name, value in vars(param).items() if name not in OWN_ATTRIBUTES}
        for name in [name for name in here if name not in there and not _is_own(name)]:
            del here[name]
        here.update(there)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not hasattr(FullParameter, name) and not _is_own(name) and (owner := _owner_of(self)) is not None:
            setattr(owner, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if (owner := _owner_of(self)) is not None and name in vars(owner):
            delattr(owner, name)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype is not self.dtype or value.shape != self.shape or value.device != self.device:
            name = getattr(_owner_of(self), "name", "a parameter")
            raise StateError(
                f"`{name}` was given data of {_form(value)} but is gathered as {_form(self)}, and stays so: cast or "
                "move what goes into the layer instead. A layer that is to compute in another dtype than the model: "
                f'lamina.Precision(keep=["{name}"])'
            )
        if value.data_ptr() == self.data_ptr() and value.stride() == self.stride():
            return  # `module.to(...)` where it changes nothing
        with torch.no_grad():
            self.detach().copy_(value)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} and shape {tuple(tensor.shape)} on {tensor.device}"


class Locked:
    """A tensor of gathered weights that somebody has kept: it may be asked what it is, not for its values."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_property = getattr(func, "__self__", None)
        if isinstance(of_property, GetSetDescriptorType):
            name = of_property.__name__
            is_fact = name not in _PROPERTIES_WITH_VALUES
        else:
            name = getattr(func, "__name__", str(func))
            is_fact = name in _FACTS
        if not is_fact:
            raise _refuse_reading(name, (*args, *(kwargs or {}).values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Locked:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{_said_of(self)}, gathered no longer>"

    def __format__(self, spec: str) -> str:
        return repr(self)


class LockedParameter(Locked, FullParameter):  # type: ignore[misc]
    pass


@functools.cache
def locked(kind: type[Tensor]) -> type[Tensor]:
    """The class that a kept tensor of a class becomes."""
    return LockedParameter if kind is FullParameter else type(f"Locked{kind.__name__}", (Locked, kind), {})


_PROPERTIES_WITH_VALUES = frozenset(["T", "mT", "H", "mH", "real", "imag"])
_SIZES = frozenset(["size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset"])
_KINDS = frozenset(["is_contiguous", "element_size", "data_ptr", "get_device", "is_floating_point", "is_complex"])
_GRADIENTS = frozenset(["requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"])
_FACTS = _SIZES | _KINDS | _GRADIENTS | {"_is_view"}


def become(tensor: Tensor, kind: type[Tensor]) -> None:
    Tensor.__setattr__(tensor, "__class__", kind)


def _said_of(kept: Any) -> str:
    owner = _owner_of(kept)
    named = "a parameter" if owner is None else f"`{getattr(owner, 'name', '') or 'a parameter'}`"
    return named if isinstance(kept, FullParameter) else f"a view of {named}, of shape {tuple(kept.shape)},"


def _refuse_reading(what: str, arguments: Sequence[Any]) -> StateError:
    found = [each for each in arguments if isinstance(each, Locked)]
    for several in arguments:
        if isinstance(several, (list, tuple)):
            found += [each for each in several if isinstance(each, Locked)]
    return StateError(
        f"{_said_of(found[0]) if found else 'a parameter'} was kept in a forward and is read after it ({what}), when "
        "its memory may hold other weights. Read `module.weight` inside the module's forward; keep what is computed "
        "from it, or `weight.detach().clone()`; or put all into `with lamina.keep(model):`"
    )


def bind(view: Tensor, requires_grad: bool, counter: Tensor) -> FullParameter:
    """A full parameter over `view` with the version counter of `counter`: writes to the slot do not reach it."""
    full = FullParameter(counter, requires_grad=False)
    _set_data(full, view)
    full.requires_grad_(requires_grad)
    return full
