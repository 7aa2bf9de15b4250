"""Whose call it was that met a `Shard` in a module's computation, and what to type instead.

A module computes with whole weights inside the forward of the unit that gathers them. Scripts come past it: by
`model.forward(x)`, which calls no hooks, by another method of the model, by a part of it, by a wrapper that reaches in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lamina.core.shard_tensor import Shard

_OF_EVERY_MODULE = frozenset([*dir(nn.Module), "forward", "reset_parameters"])
_CALLS = frozenset(["forward", "_call_impl", "_wrapped_call_impl"])
_MOST_METHODS = 6

LEAVE_DDP_OUT = (
    "Leave it out, whoever put it there (you, Accelerate's `prepare`, transformers' Trainer, Lightning's "
    'strategy="ddp"): docs/programs-of-others.md says how'
)

_Call = tuple[nn.Module, str]  # a module and the name of the function whose `self` it is


def cure_of(name: str, frame: FrameType | None) -> str:
    """What to type where a module is being called that has the parameter, or a framework at work; "" where none is."""
    optimizer = _optimizer_of(frame)
    if optimizer is not None:
        return (
            f"`{type(optimizer).__name__}` does not step element by element. Use an optimizer that does, such as "
            "`torch.optim.AdamW` or `lamina.optim.AdamW`, or keep parameters whole with "
            'lamina.shard(..., strategy="ddp").'
        )
    calls = list(_calls(frame))
    if any(isinstance(module, DistributedDataParallel) and function == "__init__" for module, function in calls):
        return (
            "torch's DistributedDataParallel is being put around the sharded model, which averages gradients itself. "
            f"{LEAVE_DDP_OUT}."
        )
    owner = next((m for m, function in calls if _computes(function) and _has(m._parameters.values(), name)), None)
    if owner is None:
        return ""
    called = f"`{type(owner).__name__}` was called, and not through the forward of the unit that gathers its weights"
    if torch._C._current_graph_task_id() != -1:
        return (
            f"{called}, in a backward that came past the outputs of that forward, through a tensor that was left in a "
            "list or another object: return that tensor from the forward, keep it as an attribute of a module in it, "
            "or recompute nothing and type `with lamina.keep(model):` around the forward and the backward."
        )
    alone = next((module for number, (module, _) in enumerate(calls) if _is_forward_alone(calls[number:])), None)
    if alone is not None:
        return (
            f"{called}: `{type(alone).__name__}.forward` was called as a function, so that none of the module's hooks "
            "ran. Type `model(...)` instead of `model.forward(...)`."
        )
    model = next((module for module, _ in reversed(calls) if _is_sharded_as(module, name)), calls[-1][0])
    methods = [method for module, method in calls if module is model and _is_own_method(model, method)]
    if not methods:
        return (
            f"{called}: call the model itself, or a method of it that does what you do here and that "
            "lamina.shard(..., entry_points=) names; or let the modules that you call be units, those of a tied weight "
            "one: units=[..., ['embedding', 'head']]. For values without gradients `with lamina.gathered(module):` "
            "around it is enough (collective)."
        )
    method = methods[-1]
    return (
        f"{called}: `{type(model).__name__}.{method}` leads past it. If that is the model's own method, type "
        f"lamina.shard(..., entry_points=({method!r},)){_also(model, method)}."
    )


def _optimizer_of(frame: FrameType | None) -> torch.optim.Optimizer | None:
    """Whose step is at work with the parameter; not where it has called a closure, which is the user's own."""
    inside = []
    while frame is not None:
        actor = frame.f_locals.get("self")
        if isinstance(actor, nn.Module):
            return None
        if isinstance(actor, torch.optim.Optimizer) and frame.f_code.co_name == "step":
            return None if _code_of(frame.f_locals.get("closure")) in inside else actor
        inside.append(frame.f_code)
        frame = frame.f_back
    return None


def _calls(frame: FrameType | None) -> Iterable[_Call]:
    """From the innermost one out."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module, frame.f_code.co_name
        frame = frame.f_back


def _computes(function: str) -> bool:
    """Unlike `load_state_dict` and what else modules do with their parameters."""
    return function in _CALLS or function not in _OF_EVERY_MODULE


def _has(params: Iterable[Any], name: str) -> bool:
    return any(type(param) is Shard and param.name == name for param in params)


def _is_forward_alone(calls: list[_Call]) -> bool:
    """Whether the first of these calls is a forward that torch has not called."""
    module, name = calls[0]
    return name == "forward" and (len(calls) == 1 or calls[1][0] is not module)


def _is_sharded_as(module: nn.Module, name: str) -> bool:
    """Whether the parameter has this name in it: it is what `lamina.shard` was given."""
    try:
        return _has([module.get_parameter(name)], name)
    except AttributeError:
        return False


def _is_own_method(model: nn.Module, name: str) -> bool:
    """What a decorator calls the function around a method is no name of the class."""
    return name not in _OF_EVERY_MODULE and callable(getattr(type(model), name, None))


def _also(model: nn.Module, named: str) -> str:
    """The other methods that use layers: one that is called so, too, would be the next error."""
    others = [name for name in _methods_with_layers(model) if name != named][:_MOST_METHODS]
    return f", with those of {', '.join(f'`{name}`' for name in others)} that you call, too" if others else ""


def _methods_with_layers(model: nn.Module) -> list[str]:
    layers = {*model._modules, *model._parameters}
    found = []
    for name in dir(type(model)):
        if name.startswith(("_", "set_")) or name in _OF_EVERY_MODULE or name in vars(model):
            continue
        code = _code_of(getattr(type(model), name, None))
        if code is not None and _takes_inputs(code) and layers.intersection(code.co_names):
            found.append(name)
    return found


def _takes_inputs(code: CodeType) -> bool:
    """Unlike `get_input_embeddings(self)` and `configure_optimizers(self)`."""
    return code.co_argcount + code.co_kwonlyargcount > 1 or bool(code.co_flags & inspect.CO_VARARGS)


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return getattr(function, "__code__", None)
