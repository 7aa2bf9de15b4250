"""Parameters that a forward computes with and that no module has registered: layers in a plain list, in a closure.

They are none of `model.parameters()`: no unit holds them, and nothing would average their gradients. An optimizer that
is given them would train each rank's by its own data. Registrations do not tell of them, and a search through
attributes would miss some, and find what does not train: a teacher that is hidden on purpose, an average of the
weights.

Note [Leaves]
    1. The graph of a forward leads to all that trains in it. It is walked after the first forwards with gradients, and
       again after something was registered, or when some optimizer is about to step a parameter that no sharded model
       has, with the first gradient of it: found one step late then.
    2. What is made in the forward or given to it is the user's affair: an adversarial example, a prompt, positions
       whose gradient is a force, a copy of a layer. So a `Parameter` that is no argument is refused when a gradient
       comes to it, if it is found in the model's attributes or in a second forward; any other leaf, once an optimizer
       steps it.
    3. Nothing is refused for being in the graph: outputs may be detached, or go into no loss.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from lamina.core.full_parameter import FullParameter
from lamina.core.own_attributes import own_attributes
from lamina.core.shard_optim import (
    AFTER_BACKWARDS,
    AFTER_FAILED_BACKWARDS,
    BEFORE_BACKWARDS,
    BEFORE_INNER_BACKWARDS,
    SHARES,
    nodes_behind,
)
from lamina.core.shard_tensor import Shard
from lamina.core.uncompiled import uncompiled
from lamina.errors import ParameterChanged
from lamina.runtime import registrations
from lamina.runtime.failed_backward import ENGINES

FORWARDS_TO_WALK = 3
_MOST_OBJECTS = 100_000  # that are searched for names
_EMPTY_CELL = types.CellType()
_AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))
_loose: WeakIdKeyDictionary = WeakIdKeyDictionary()  # leaf that is no Parameter -> class of the model that uses it


class Unregistered:
    """Of one sharded model over several ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._forwards_left = 0
        self._forwards = 0  # that were walked
        _watch_steps()

    def walk_next_forwards(self) -> None:
        self._forwards_left = FORWARDS_TO_WALK

    def look(
        self,
        nodes: Iterable[Any],
        outputs: Sequence[Tensor],
        first_node: int,
        inputs: Sequence[Any],
        arguments: Sequence[Tensor],
    ) -> None:
        """A root forward with gradients has ended.

        Args:
            nodes: by which its graph is left.
            first_node: number of the first one that autograd may have made in it.
            inputs: nodes of differentiable arguments.
        """
        if not self._forwards_left:
            return
        self._forwards_left -= 1
        leaves = [*_leaves_behind(nodes, first_node, inputs), *(t for t in outputs if t.is_leaf and t.requires_grad)]
        self._listen(leaves, arguments)
        self._forwards += 1

    def look_again(self, roots: Iterable[Any]) -> None:
        """Torch's reentrant checkpoint makes a graph of its own for what it computes a second time."""
        if self._forwards_left:
            self._listen(_leaves_behind(nodes_behind(roots), 0, ()), ())

    def look_inside(self, roots: Iterable[Any]) -> None:
        """A backward begins inside a forward."""
        if self._forwards_left:
            self._listen(_leaves_behind(nodes_behind(roots), 0, ()), ())

    def _listen(self, leaves: Iterable[Tensor], arguments: Sequence[Tensor]) -> None:
        """Hear gradients that come to leaves. Those without a name in the model may have been made in this forward."""
        model, given = self._model(), frozenset(map(id, arguments))
        unknown = [leaf for leaf in leaves if id(leaf) not in given and not is_known(leaf)]
        if not unknown or model is None:
            return
        names = _names_in(model)
        for leaf in unknown:
            if not isinstance(leaf, nn.Parameter):
                _loose[leaf] = type(model).__name__
                continue
            hooks = (leaf._backward_hooks or {}).values()
            heard = next((hook for hook in hooks if isinstance(hook, _Arrival) and hook.of() is not None), None)
            if heard is None:
                name = names.get(id(leaf), "")
                heard = _Arrival(self, id(leaf), name or f"a parameter of shape {tuple(leaf.shape)}", self._forwards)
                heard.handle = leaf.register_hook(heard)
                heard.stays = bool(name)
            heard.stays |= heard.first_forward != self._forwards

    def refuse(self, named: str) -> None:
        """A backward brings a gradient to a leaf."""
        model = self._model()
        if model is None or not _Outermost.leads_through_models():
            return
        self.walk_next_forwards()
        raise ParameterChanged(
            f"{named} gets a gradient in a forward of the sharded {type(model).__name__}, and no module has registered "
            "it: it is none of `model.parameters()`, and its gradient would not be averaged over ranks. Before "
            "lamina.shard(), put layers into nn.ModuleList or nn.ModuleDict, and parameters into nn.ParameterList, "
            "where there is a plain list, dict or object now; or shard the layer by itself: `lamina.shard(layer)`. If "
            "it is not to train, call requires_grad_(False)"
        )


class _Arrival:
    """A hook on a leaf, until it has raised. It does not hold the leaf."""

    def __init__(self, of: Unregistered, leaf: int, named: str, first_forward: int) -> None:
        self.of, self.leaf, self.named = weakref.ref(of), leaf, named
        self.first_forward = first_forward  # number of the one in which it was found
        self.stays = False  # whether it is there from one forward to the next
        self.handle: Any = None

    @uncompiled
    def __call__(self, grad: Tensor) -> None:
        of = self.of()
        if of is None or not self.stays:
            return
        if type(grad) is Shard or any(id(param) == self.leaf for param in SHARES):
            return  # it has been sharded since
        try:
            of.refuse(self.named)
        except ParameterChanged:
            self.handle.remove()
            raise


class _Outermost:
    """The backward that is under way, around all others."""

    roots: ClassVar[Sequence[Any]] = ()
    found: ClassVar[bool | None] = None  # by the walk from its roots

    @classmethod
    def leads_through_models(cls) -> bool:
        """Whether it comes into a forward of any sharded model, or is made in one. A leaf may come before any unit."""
        if any(engine.phase is not None and not engine.is_stale() for engine in ENGINES):
            return True
        if cls.found is None:
            nodes = nodes_behind(cls.roots)
            cls.found = any(engine.reference in node.metadata for node in nodes for engine in ENGINES)
        return cls.found


def is_known(leaf: Tensor) -> bool:
    """Whether a sharded model averages its gradient."""
    return isinstance(leaf, (Shard, FullParameter)) or leaf in SHARES


def _before_backward(roots: list[Any]) -> None:
    _Outermost.roots, _Outermost.found = roots, None
    for engine in list(ENGINES):
        if engine.newcomers is not None and engine.phase is not None and not engine.is_stale():
            engine.newcomers.unregistered.look_inside(roots)


def _before_inner_backward(roots: list[Any]) -> None:
    for engine in list(ENGINES):
        if engine.newcomers is not None and engine.phase is not None and engine.phase.is_backward:
            engine.newcomers.unregistered.look_again(roots)


def _leaves_behind(nodes: Iterable[Any], first_node: int, inputs: Sequence[Any]) -> list[Tensor]:
    """What a forward has computed with."""
    waiting, seen, found = list(nodes), set(inputs), []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, _AccumulateGrad):
            found.append(node.variable)  # type: ignore[attr-defined]
        elif node._sequence_nr() >= first_node:
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _after_backward() -> None:
    _Outermost.roots = ()


BEFORE_BACKWARDS.append(_before_backward)
AFTER_BACKWARDS.append(_after_backward)
AFTER_FAILED_BACKWARDS.append(_after_backward)
BEFORE_INNER_BACKWARDS.append(_before_inner_backward)


# ---- before a step of any optimizer --------------------------------------------------------------------------------


class _Strangers:
    """What one optimizer steps beside the parameters of sharded models."""

    def __init__(self, count: int, params: list[Tensor]) -> None:
        self.count = count  # of all its parameters
        self.params = params
        self.waiting = [p for p in params if isinstance(p, nn.Parameter)]  # those that have had no gradient


_strangers: WeakKeyDictionary[torch.optim.Optimizer, _Strangers] = WeakKeyDictionary()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


@uncompiled
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    found = _strangers.get(optimizer)
    if found is None or found.count != count:
        params = [param for group in optimizer.param_groups for param in group["params"] if not is_known(param)]
        found = _strangers[optimizer] = _Strangers(count, params)
    if found.waiting and any(param.grad is not None for param in found.waiting):
        found.waiting = [param for param in found.waiting if param.grad is None]
        registrations.note()
    for param in found.params if _loose else ():
        if param in _loose and param.grad is not None and not is_known(param):
            raise ParameterChanged(
                f"an optimizer steps a tensor of shape {tuple(param.shape)} that a forward of the sharded "
                f"{_loose[param]} computes with, and no module has registered it: its gradient was not averaged over "
                "ranks. Make it an nn.Parameter, as an attribute of a module, before lamina.shard(); or give it to the "
                "forward as an argument, where each rank is to train its own"
            )


# ---- names -----------------------------------------------------------------------------------------------------


def _names_in(model: nn.Module) -> dict[int, str]:
    """By parameter: the shortest way to it from the model's attributes, as it is typed."""
    waiting: list[tuple[str, Any]] = [("", model)]
    seen: dict[int, Any] = {}
    names: dict[int, str] = {}
    for name, value in waiting:
        if isinstance(value, nn.Parameter):
            names.setdefault(id(value), f"`{name.removeprefix('.')}`")
        elif id(value) not in seen and len(seen) < _MOST_OBJECTS:
            seen[id(value)] = value
            waiting += [(name + step, inner) for step, inner in _inside(value)]
    return names


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (str, bytes, int, float, type, types.ModuleType, Tensor)):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", each) for number, each in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        yield from ((f".__closure__[{number}]", cell) for number, cell in enumerate(value.__closure__ or ()))
    elif isinstance(value, types.CellType):
        yield from [(".cell_contents", value.cell_contents)] if value != _EMPTY_CELL else []
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    else:
        if isinstance(value, nn.Module):
            yield from ((f".{name}", each) for name, each in (*value._parameters.items(), *value._modules.items()))
        own = own_attributes(value)
        yield from ((f".{name}", each) for name, each in own.items() if name not in _ATTRIBUTES_OF_MODULES)
