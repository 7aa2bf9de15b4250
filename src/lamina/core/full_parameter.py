"""What a module's forward computes with: parameters over the memory that a unit is gathered into.

Note [Kept parameters]
    1. Whoever keeps a full parameter beyond its forward, in a list, a closure or an attribute, has other weights before
       him later, for the memory serves several units. Autograd compares versions; a plain read would be wrong without a
       word. So it is refused by name, and allowed again while a use of the unit reads its weights.
    2. Reads of a subclass go through Python, which costs microseconds. So a full parameter becomes a `LockedParameter`
       only if somebody keeps it, which its count of references tells when the last use of the unit ends (`Keepers`).
    3. Views of it (`weight.detach()`, `weight[0]`) are plain tensors, and are not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.shard_tensor import OWN_ATTRIBUTES
from lamina.errors import StateError

_set_data = Tensor.data.__set__  # type: ignore[attr-defined]
_count_in_torch: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 1)


def _owner_of(full: FullParameter) -> nn.Parameter | None:
    owner = vars(full).get("_owner")
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
        with torch.no_grad():
            self.detach().copy_(value)


class LockedParameter(FullParameter):
    """One that somebody has kept; it may be asked what it is, not for its values. Note [Kept parameters]."""

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

    def __deepcopy__(self, memo: dict[int, Any]) -> LockedParameter:
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{_name_of(self)}, gathered no longer>"

    def __format__(self, spec: str) -> str:
        return repr(self)


_PROPERTIES_WITH_VALUES = frozenset(["T", "mT", "H", "mH", "real", "imag"])
_SIZES = frozenset(["size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset"])
_KINDS = frozenset(["is_contiguous", "element_size", "data_ptr", "get_device", "is_floating_point", "is_complex"])
_GRADIENTS = frozenset(["requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"])
_FACTS = _SIZES | _KINDS | _GRADIENTS


def _graph_references() -> int:
    """Python's references to a tensor that stand for all of C++'s, of graphs above all: one in torch 2.13."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, device="cpu", requires_grad=True)
        alone = sys.getrefcount(leaf)
        graph = leaf * 2
        found = sys.getrefcount(leaf) - alone
    del graph
    return found


GRAPH_REFERENCES = _graph_references()


def _become(full: FullParameter, kind: type[FullParameter]) -> None:
    nn.Parameter.__setattr__(full, "__class__", kind)


def _name_of(full: Tensor) -> str:
    owner = _owner_of(full) if isinstance(full, FullParameter) else None
    return "a parameter" if owner is None else f"`{getattr(owner, 'name', '') or 'a parameter'}`"


def _refuse_reading(what: str, arguments: Sequence[Any]) -> StateError:
    found: list[Tensor] = [each for each in arguments if isinstance(each, LockedParameter)]
    for several in arguments:
        if isinstance(several, (list, tuple)):
            found += [each for each in several if isinstance(each, LockedParameter)]
    named = _name_of(found[0]) if found else "a parameter"
    return StateError(
        f"{named} was kept in a forward and is read after it ({what}), when its memory may hold other weights. Read "
        "`module.weight` inside the module's forward; keep what is computed from it, or `weight.detach().clone()`; or "
        "put all into `with lamina.keep(model):`"
    )


def bind(view: Tensor, requires_grad: bool, counter: Tensor) -> FullParameter:
    """A full parameter over `view` with the version counter of `counter`: writes to the slot do not reach it."""
    full = FullParameter(counter, requires_grad=False)
    _set_data(full, view)
    full.requires_grad_(requires_grad)
    return full


class Keepers:
    """Whether others than the runtime keep full parameters of a slot."""

    def __init__(self, fulls: Sequence[FullParameter]) -> None:
        self._fulls = fulls
        self._locked: list[FullParameter] = []
        self.have_none()

    def have_none(self) -> None:
        """Python's references are the runtime's."""
        self._references = [
            count - GRAPH_REFERENCES * (_count_in_torch(full) > 1)
            for full, count in zip(self._fulls, self._count_references(), strict=True)
        ]
        self._references_in_graphs = [count + GRAPH_REFERENCES for count in self._references]

    def _count_references(self) -> list[int]:
        return list(map(sys.getrefcount, self._fulls))

    def lock(self) -> None:
        """The last use has ended: what others keep is not to be read."""
        found = self._count_references()
        if found in (self._references, self._references_in_graphs):
            return
        for full, count, known in zip(self._fulls, found, self._references, strict=True):
            if count - GRAPH_REFERENCES * (_count_in_torch(full) > 1) > known:
                _become(full, LockedParameter)
                self._locked.append(full)

    def unlock(self) -> None:
        """A use begins."""
        while self._locked:
            _become(self._locked.pop(), FullParameter)
