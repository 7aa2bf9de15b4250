"""Tensors that leave a forward by another way than its return value.

A backward may come into a unit through what a hook on a layer inside has seen (features for a perceptual loss), or
through an attribute that the forward has set (the auxiliary loss of a mixture of experts), and never pass the unit's
outputs. Such tensors count as outputs (Note [Begin and end] in uses.py). What leaves in any other way, in a list of the
user's say, is found by nobody; a backward that reads weights through it raises: Note [Given back] in slots.py.

Note [Attributes]
    Looking at every attribute of every module costs a microsecond a module. So all are looked at in the first forwards,
    and whenever a module has got more of them; afterwards only the places that have held a tensor with a graph, or
    where one may come: None and short containers, in modules that are not torch's own. Modules are not held: what
    autograd holds of a forward leads here, and the garbage collector does not see what autograd holds.
"""

from __future__ import annotations

import collections
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lamina.runtime.uses import tensors_in

FORWARDS_THAT_LEARN = 3
_CONTAINERS = (list, tuple, dict, set, collections.deque)
_FILLED_LATER = (list, dict, collections.deque)
_SHORT = 64  # entries
_OWN = frozenset(vars(nn.Module()))  # attributes of every module
_is_there: Any = functools.partial(operator.is_not, None)
_hooks_of = operator.attrgetter("_forward_hooks")


class Escapes:
    """What leaves the forwards of one hooked module, `made_for` one engine."""

    def __init__(
        self,
        module: nn.Module,
        made_for: object,
        catch: Callable[[Any], None],
        opens_window: Callable[[nn.Module], bool],
    ) -> None:
        """
        Args:
            catch: called with the outputs of modules inside that the user has hooked.
            opens_window: whether a module has a forward that is hooked by itself: what is inside is its own affair.
        """
        self.made_for, self._catch = made_for, weakref.WeakMethod(catch)
        inside = list(_inside(module, opens_window))
        self._inside = [weakref.ref(each) for each in inside]
        self._handles: dict[int, Any] = {}  # of our hook, by the position of the module
        self._hook_count = 0
        self._all = [weakref.ref(module), *self._inside]
        self._attribute_count = 0
        self._forwards_to_learn = FORWARDS_THAT_LEARN
        self._places: dict[tuple[weakref.ref[nn.Module], str], None] = {}  # modules, and names of attributes

    def listen(self) -> None:
        """A forward begins: where the user has hung hooks since, hear what they will see."""
        if (count := sum(map(len, map(_hooks_of, _there(self._inside))))) == self._hook_count:
            return
        for position, reference in enumerate(self._inside):
            module = reference()
            if module is not None and module._forward_hooks and position not in self._handles:
                self._handles[position] = module.register_forward_hook(Ear(self._catch))
                count += 1
        self._hook_count = count

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()

    def found(self, caught: list[Any], first_node: int) -> list[Tensor]:
        """A forward has ended: tensors with a graph that it has left elsewhere.

        Args:
            caught: what modules inside have returned to the user's hooks.
            first_node: number of the first node that autograd may have made in this forward.
        """
        if (count := sum(map(len, map(vars, _there(self._all))))) != self._attribute_count:
            self._attribute_count, self._forwards_to_learn = count, FORWARDS_THAT_LEARN
        if self._forwards_to_learn > 0:
            self._forwards_to_learn -= 1
            self._learn()
        if not caught and not self._places:
            return []
        held = [*caught, *(getattr(reference(), name, None) for reference, name in self._places)]
        return [t for t in tensors_in(held) if t.grad_fn is not None and t.grad_fn._sequence_nr() >= first_node]

    def _learn(self) -> None:
        for reference in self._all:
            module = reference()
            is_torchs = type(module).__module__.startswith("torch.nn.")
            for name, value in vars(module).items() if module is not None else ():
                if name not in _OWN and (_holds_graph(value) or (not is_torchs and _may_hold_later(value))):
                    self._places[reference, name] = None


def _there(references: Iterable[weakref.ref[nn.Module]]) -> Iterator[nn.Module]:
    """Those that still live. In C, for it is done in every forward."""
    return filter(_is_there, map(operator.call, references))


def _holds_graph(value: Any) -> bool:
    is_held = isinstance(value, (Tensor, *_CONTAINERS))
    return is_held and any(tensor.grad_fn is not None for tensor in tensors_in(value))


def _may_hold_later(value: Any) -> bool:
    return value is None or (isinstance(value, _FILLED_LATER) and len(value) <= _SHORT)


class Ear:
    """A forward hook behind the user's. A copied model gets its own."""

    def __init__(self, catch: Callable[[], Callable[[Any], None] | None]) -> None:
        self._catch = catch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return  # one node stands for all that is compiled
        catch = self._catch()
        if catch is not None and torch.is_grad_enabled():
            catch(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ear:
        return Ear(_nobody)

    def __reduce__(self) -> Any:
        return _deaf, ()


def _deaf() -> Ear:
    return Ear(_nobody)


def _nobody() -> None:
    return None


def _inside(module: nn.Module, opens_window: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Modules below that run in its window and in no other."""
    waiting, seen = list(module._modules.values()), {id(module)}
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen and not opens_window(each):
            seen.add(id(each))
            yield each
            waiting += each._modules.values()
