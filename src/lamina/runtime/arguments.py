"""What `lamina.shard()` is given, before anything is made of it: values of a kind that cannot be meant.

Each raises the error that the user reads, not one of the first line of code that stumbles. What depends on the model
(names that match nothing, factors that do not divide) is refused where it is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lamina.errors import StateError, UsageError
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.precision import Precision
from lamina.runtime.recorder import Recorder


def check_names(argument: str, given: Any, example: str) -> None:
    """`given` is a list, tuple or set of names."""
    if isinstance(given, str):
        raise UsageError(f"{argument}={given!r}: got a string, wanted a list; type {argument}=[{given!r}]")
    is_list = isinstance(given, (list, tuple, set, frozenset))
    wrong = next((item for item in given if not isinstance(item, str)), None) if is_list else given
    if not is_list or (wrong is not None or None in given):
        raise UsageError(
            f"{argument}={given!r}: got {wrong!r} of type {type(wrong).__name__}, wanted a list of names; type for "
            f"example {argument}=[{example!r}]"
        )


def check_entry_points(model: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if callable(getattr(type(model), name, None)):
            continue
        if isinstance(getattr(model, name, None), nn.Module):
            raise UsageError(
                f"entry_points={name!r}: that is a module of the model, and its calls are seen as they are"
            )
        raise UsageError(f"entry_points={name!r}: {type(model).__name__} has no such method")


def check_precision(given: Any) -> None:
    """The fields of a `Precision`, one by one; other words are looked up later."""
    if isinstance(given, torch.dtype) or given is Precision:
        raise UsageError(f"precision={given!r}: type precision=lamina.Precision(compute=torch.bfloat16), or 'bf16'")
    if not isinstance(given, Precision):
        return
    check_names("Precision(keep=...)", given.keep, "*norm*")
    for field in ("compute", "output", "wire", "master"):
        dtype = getattr(given, field)
        if dtype is None and field != "master":
            continue
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise UsageError(
                f"Precision({field}={dtype!r}): wanted a floating dtype of 16 bits or more, such as torch.bfloat16"
            )
    if given.master.itemsize < 4:
        raise UsageError(
            f"Precision(master={given.master}): what the optimizer updates is at least float32, as gradients "
            "are. Leave master out; compute= says what forward and backward take"
        )


def check_model(model: Any) -> None:
    """A module that is not sharded yet, in whole or in part."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"lamina.shard() takes an nn.Module, not a {type(model).__name__}")
    if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
        raise StateError("lamina.shard() inside lamina.deferred(): leave it first, shard() fills what was built in it")
    for module in model.modules():
        if module in RUNTIMES:
            what = "this model is" if module is model else f"its {type(module).__name__} is"
            raise StateError(f"{what} sharded already: call lamina.shard() once, on the outermost module")
    owners = {id(p): other for other, runtime in RUNTIMES.items() for unit in runtime.units for p in unit.params}
    for name, param in model.named_parameters():
        if id(param) in owners:
            raise StateError(
                f"`{name}` belongs to a {type(owners[id(param)]).__name__} that is sharded already: call "
                "lamina.shard() once, on a module that holds both"
            )
        if param.is_inference():
            raise UsageError(
                f"`{name}` was made inside torch.inference_mode() and cannot be trained: build the model outside it"
            )
