"""Optimizer state by parameter name.

`optimizer.state_dict()` numbers parameters by their place in the groups, holds what this rank has, and fits only an
optimizer of the same layout. Here states are split like their parameters, or whole, or plain values, each under the
parameter's name; the way back goes through the optimizer's own `load_state_dict`, so hooks and overrides act as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lamina.checkpoint.contents import Held, Whole
from lamina.checkpoint.manifest import GroupEntry, state_key
from lamina.checkpoint.values import TAG, check_plain, dtype_name, encode
from lamina.core.shard_tensor import Shard
from lamina.errors import StateError, UsageError

# 0-dim states that are a number of their own, also beside a 0-dim parameter
SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
_NOT_OPTIONS = ("params", "param_names")


@dataclass
class States:
    """The optimizer of this rank, taken apart."""

    kind: str
    groups: list[GroupEntry] = field(default_factory=list)
    split: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # parameter -> key -> this rank's elements
    whole: dict[str, dict[str, Whole]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)  # encoded
    more: dict[str, Any] = field(default_factory=dict)  # encoded; see `OptimizerEntry`


def check_optimizer(optimizer: object, call: str) -> None:
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise UsageError(f"{call}: {type(optimizer).__name__} is no torch.optim.Optimizer")


def take_apart(optimizer: torch.optim.Optimizer, names: dict[int, str], held: dict[str, Held]) -> States:
    """States and groups by parameter name. Local.

    Args:
        names: by id of the parameter.
        held: parameters of units, by name.
    """
    states = States(type(optimizer).__name__, more=_take_more(optimizer))
    numbers: list[tuple[str, str, Tensor]] = []  # parameter, key, 0-dim tensor
    for number, group in enumerate(optimizer.param_groups):
        members = tuple(name_in_group(param, names, number, i) for i, param in enumerate(group["params"]))
        options = {}
        for key, value in group.items():
            if key not in _NOT_OPTIONS:
                made = encode(value, f"optimizer group {number}, {key!r}", inline_tensors=True)
                if made.tensors:
                    raise UsageError(f"optimizer group {number}, {key!r}: tensors of so many elements are not saved")
                options[key] = made.json
        states.groups.append(GroupEntry(members, options))
        for param, name in zip(group["params"], members, strict=True):
            if optimizer.state.get(param):
                _take_state(states, numbers, name, optimizer.state[param], held.get(name))
    for name, key, json in _read_numbers(numbers):
        states.values[name][key] = json
    return states


def _take_more(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What belongs to no parameter: states under other keys, and what the optimizer's own `state_dict()` adds."""
    state = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor) and value != {}}
    more = {}
    for what, found in (("state", state), ("entries", entries_of(optimizer))):
        if found:
            made = encode(found, f"optimizer {what}", inline_tensors=True)
            if made.tensors or made.pickled:
                kept = ", ".join(map(repr, found))
                raise UsageError(
                    f"{type(optimizer).__name__} keeps {kept} beside its parameters' states, with large tensors or "
                    "objects inside, which are not saved with it: put them into extra="
                )
            more[what] = made.json
    return more


def entries_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What `state_dict()` holds beside states and groups: nothing where it is torch's own, without hooks."""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if getattr(type(optimizer), "state_dict", None) is torch.optim.Optimizer.state_dict and not hooks:
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}


def name_in_group(param: Tensor, names: dict[int, str], group: int, place: int) -> str:
    name = names.get(id(param))
    if name is None:
        raise UsageError(
            f"the optimizer's group {group} holds a parameter of shape {tuple(param.shape)} (number {place}) that is "
            "not one of the model's: save and load the model that the optimizer was built for"
        )
    return name


def _take_state(
    states: States, numbers: list[tuple[str, str, Tensor]], name: str, state: dict[str, Any], held: Held | None
) -> None:
    split, whole = states.split.setdefault(name, {}), states.whole.setdefault(name, {})
    values = states.values.setdefault(name, {})
    for key, value in state.items():
        if isinstance(value, Tensor):
            check_plain(value, f"optimizer state {key!r} of `{name}`")
        if held is not None and is_split(key, value, held):
            split[key] = value.local if isinstance(value, Shard) else value
        elif isinstance(value, Shard):
            raise StateError(
                f"optimizer state {key!r} of `{name}` is cut in another way than the parameter: {value.spec.describe()}"
            )
        elif isinstance(value, Tensor) and value.dim() == 0:
            values[key] = None
            numbers.append((name, key, value.detach()))
        elif isinstance(value, Tensor):
            whole[key] = Whole(state_key(key, name), value.detach().contiguous())
        else:
            made = encode(value, f"optimizer state {key!r} of `{name}`", inline_tensors=True)
            if made.tensors:
                raise UsageError(f"optimizer state {key!r} of `{name}` is a {type(value).__name__} with tensors inside")
            values[key] = made.json


def is_split(key: str, value: Any, held: Held) -> bool:
    """Whether a state lies where its parameter lies: beside a `Shard` only a `Shard` does, whatever shape it has."""
    if isinstance(value, Shard) or isinstance(held.param, Shard):
        return isinstance(value, Shard) and isinstance(held.param, Shard) and value.spec.same(held.param.spec)
    if not isinstance(value, Tensor) or value.shape != held.param.shape:
        return False
    return value.dim() > 0 or key not in SCALARS


def _read_numbers(numbers: Sequence[tuple[str, str, Tensor]]) -> list[tuple[str, str, Any]]:
    """Step counts and the like; one wait for a device, not one a parameter."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (_, _, value) in enumerate(numbers):
        kinds.setdefault((value.device, value.dtype), []).append(i)
    read = []
    for (_, dtype), places in kinds.items():
        stacked = torch.stack([numbers[i][2] for i in places]).cpu()
        wide = stacked.double() if dtype.is_floating_point else stacked
        for i, number in zip(places, wide.tolist(), strict=True):
            name, key, _ = numbers[i]
            read.append((name, key, {TAG: "value", "dtype": dtype_name(dtype), "shape": [], "items": [number]}))
    return read
