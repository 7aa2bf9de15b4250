"""Tensors that leave a forward by another way than its return value.

A backward may come into a unit through what a hook on a layer inside has seen (features for a perceptual loss), or
through an attribute that the forward has set (the auxiliary loss of a mixture of experts), and never pass the unit's
outputs. Such tensors count as outputs of every forward that they were made in, however deep (Note [Begin and end] in
uses.py). What leaves in any other way, in a list of the user's say, is found by nobody; a backward that reads weights
through it raises: Note [Given back] in slots.py.

Note [Attributes]
    Looking at every attribute of every module costs a microsecond a module. So all are looked at in the first forwards,
    and whenever a module has got more of them; afterwards only the places that have held a tensor with a graph, or
    where one may come: None, and in modules that are not torch's own 0, tensors and short containers. Modules are not
    held: what autograd holds of a forward leads here, and the garbage collector does not see what autograd holds. Hooks
    are looked for when others than the runtime have made a handle of any. One without, written into a module's dict by
    hand, is not heard: what it keeps is found by nobody.
"""

from __future__ import annotations

import collections
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from lamina.core.full_parameter import Locked
from lamina.core.own_attributes import own_attributes
from lamina.runtime.uses import NODE_HOOKS, nodes_of_outputs, tensors_in

FORWARDS_THAT_LEARN = 3
_CONTAINERS = (list, tuple, dict, set, collections.deque)
FILLED_LATER = (list, dict, collections.deque)
_SHORT = 64  # entries
_OWN = frozenset(vars(nn.Module()))  # attributes of every module
_NEVER = (nn.Module, type, str, bytes, int, float)  # to be looked into
_dict_of: Any = vars(nn.Module)["__dict__"].__get__  # `vars(module)` is a search that comes by Module.__getattr__
_hooks_in = operator.itemgetter("_forward_hooks", "_forward_pre_hooks")
HEARD_EVERYWHERE = (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks)


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
            catch: called with what modules inside that the user has hooked are given and return.
            opens_window: whether a module has a forward that is hooked by itself: what is inside is its own affair.
        """
        self.made_for, self._catch = made_for, weakref.WeakMethod(catch)
        inside = list(_inside(module, opens_window))
        self._inside = [weakref.ref(each) for each in inside]
        self._handles: dict[int, list[Any]] = {}  # of our hooks, by the position of the module
        self._hook_count = 0
        self._hung = -1  # hooks of others on anything, when these were last counted
        self._all = [weakref.ref(module), *self._inside]
        self._attribute_count = 0
        self._forwards_to_learn = FORWARDS_THAT_LEARN
        self._places: dict[tuple[weakref.ref[nn.Module], str], None] = {}  # modules, and names of attributes

    def listen(self) -> None:
        """A forward begins: where the user has hung hooks since, hear what they will see."""
        hung = RemovableHandle.next_id - NODE_HOOKS.made
        if hung == self._hung:
            return
        self._hung = hung
        if self._count_hooks() == self._hook_count:
            return
        hears_all = bool(HEARD_EVERYWHERE[0] or HEARD_EVERYWHERE[1])
        for position, reference in enumerate(self._inside):
            module = reference()
            if module is None or position in self._handles:
                continue
            if module._forward_hooks or module._forward_pre_hooks or hears_all:
                self._handles[position] = _hang_ears(module, self._catch)
        self._hook_count = self._count_hooks()

    def _count_hooks(self) -> int:
        modules = [module for reference in self._inside if (module := reference()) is not None]
        hooks = itertools.chain.from_iterable(map(_hooks_in, map(_dict_of, modules)))
        return sum(map(len, hooks)) + len(HEARD_EVERYWHERE[0]) + len(HEARD_EVERYWHERE[1])

    def remove(self) -> None:
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()

    def found(self, caught: Iterable[Any], first_node: int) -> list[Any]:
        """A forward has ended: nodes of what it has left elsewhere.

        Args:
            caught: nodes of what the user's hooks on modules inside were given.
            first_node: number of the first node that autograd may have made in this forward.
        """
        count = 0
        try:
            for reference in self._all:
                count += len(reference().__dict__)  # type: ignore[union-attr]
        except AttributeError:  # one has gone
            self._all = [reference for reference in self._all if reference() is not None]
            count = sum(len(vars(reference())) for reference in self._all)
        if count != self._attribute_count:
            self._attribute_count, self._forwards_to_learn = count, FORWARDS_THAT_LEARN
        if self._forwards_to_learn > 0:
            self._forwards_to_learn -= 1
            self._learn()
        if not caught and not self._places:
            return []
        kept = [getattr(reference(), name, None) for reference, name in self._places]
        left = [tensor for tensor in tensors_in(kept) if not isinstance(tensor, Locked)]
        nodes = dict.fromkeys([*caught, *nodes_of_outputs(left, ())])
        return [node for node in nodes if node._sequence_nr() >= first_node]

    def _learn(self) -> None:
        for reference in self._all:
            module = reference()
            if module is None:
                continue
            is_torchs = type(module).__module__.startswith("torch.nn.")
            for name, value in (*vars(module).items(), *module._buffers.items()):
                may_hold_later = value is None if is_torchs else _may_hold_later(value)
                if name not in _OWN and (may_hold_later or _holds_graph(value)):
                    self._places[reference, name] = None


def is_heard(module: nn.Module) -> bool:
    """Whether a module of a unit's has hooks of the user's, beside ours."""
    after, before = _hooks_in(_dict_of(module))
    return bool(len(after) + len(before) > 2 or HEARD_EVERYWHERE[0] or HEARD_EVERYWHERE[1])


def _holds_graph(value: Any) -> bool:
    if isinstance(value, _NEVER):
        return False
    is_held = isinstance(value, (Tensor, *_CONTAINERS)) or any(map(_is_held, own_attributes(value).values()))
    return is_held and any(not isinstance(each, Locked) and each.grad_fn is not None for each in tensors_in(value))


def _is_held(value: Any) -> bool:
    """Whether a tensor may be in a value of an object's."""
    return isinstance(value, Tensor) or (isinstance(value, _CONTAINERS) and len(value) <= _SHORT)


def _may_hold_later(value: Any) -> bool:
    if isinstance(value, FILLED_LATER):
        return len(value) <= _SHORT
    return value is None or isinstance(value, Tensor) or (type(value) in (int, float) and value == 0)


def _hang_ears(module: nn.Module, catch: Callable[[], Callable[[Any], None] | None]) -> list[Any]:
    """Before and behind all hooks of the user's, which may change what the next one sees."""
    return [
        module.register_forward_pre_hook(Ear(catch), prepend=True, with_kwargs=True),
        module.register_forward_hook(Ear(catch), prepend=True, with_kwargs=True),
        module.register_forward_hook(Ear(catch), with_kwargs=True),
    ]


class Ear:
    """A hook beside the user's. A copied model gets its own."""

    def __init__(self, catch: Callable[[], Callable[[Any], None] | None]) -> None:
        self._catch = catch

    def __call__(self, module: nn.Module, *seen: Any) -> None:
        if torch.compiler.is_compiling():
            return  # one node stands for all that is compiled
        catch = self._catch()
        if catch is not None:
            catch(seen)

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
