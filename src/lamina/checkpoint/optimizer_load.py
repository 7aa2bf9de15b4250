"""Optimizer state into an optimizer of any layout: matched by parameter name, read in ranges, handed over whole.

Memory that the optimizer has already is written in place. What it has not (a fresh optimizer has no state yet) is
allocated for this rank's elements only. Groups take the options that their parameters had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lamina.checkpoint.contents import Held
from lamina.checkpoint.manifest import OptimizerEntry
from lamina.checkpoint.matching import Differences, kind_of, some
from lamina.checkpoint.optimizer_state import entries_of, is_split, name_in_group
from lamina.checkpoint.source import Source, Stored, Transfer
from lamina.checkpoint.values import decode
from lamina.core.shard_optim import leave_states
from lamina.core.shard_tensor import Shard


@dataclass
class OptimizerPlan:
    """What `optimizer.load_state_dict` will get, its tensors still to be filled."""

    optimizer: torch.optim.Optimizer
    states: dict[int, dict[str, Any]] = field(default_factory=dict)  # by number of the parameter
    groups: list[dict[str, Any]] = field(default_factory=list)
    others: dict[Any, Any] = field(default_factory=dict)  # states of no parameter
    entries: dict[str, Any] = field(default_factory=dict)  # of a `state_dict()` that has more than torch's
    transfers: list[Transfer] = field(default_factory=list)  # into memory that the optimizer has
    fresh: list[Transfer] = field(default_factory=list)  # into memory that was made for it, and is not given to it yet
    own: dict[str, list[str]] = field(default_factory=dict)  # states of other ranks' parts -> their parameters
    differences: Differences = field(default_factory=Differences)

    def hand_over(self) -> None:
        """Give states and options to the optimizer, by its own door; tensor options keep their identity."""
        kept = [{k: v for k, v in g.items() if isinstance(v, Tensor)} for g in self.optimizer.param_groups]
        states = {**self.others, **self.states}
        self.optimizer.load_state_dict({**self.entries, "state": states, "param_groups": self.groups})
        leave_states(self.optimizer)
        if type(self.optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            self._undo_casts()
        for group, tensors in zip(self.optimizer.param_groups, kept, strict=True):
            for key, tensor in tensors.items():
                value = group.get(key)
                if isinstance(value, (Tensor, float, int)):
                    tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)
                    group[key] = tensor

    def _undo_casts(self) -> None:
        """torch's `load_state_dict` casts all tensors but "step" to the parameter's dtype, and breaks texts up."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        for number, planned in self.states.items():
            state = self.optimizer.state[params[number]]
            for key, value in planned.items():
                now = state.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and key != "step" and value.dtype != now.dtype:
                    state[key] = value.to(now.device)
                elif isinstance(value, str):
                    state[key] = value


def plan_optimizer(
    source: Source,
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    held: dict[str, Held],
    stored_names: dict[str, str],
) -> OptimizerPlan | None:
    """Match groups and states. Local; None: the checkpoint's optimizer is of another class, or there is none.

    Args:
        names: of the model's parameters, by id.
        held: parameters of units, by name.
        stored_names: a parameter's name in the checkpoint, by its name in the model.
    """
    entry = source.optimizer
    if entry is None or entry.kind not in (type(optimizer).__name__, ""):  # files of other libraries do not name it
        return None
    plan = OptimizerPlan(optimizer, others=decode(entry.more.get("state", {})))
    plan.entries = {**entries_of(optimizer), **decode(entry.more.get("entries", {}))}
    groups_of = {name: number for number, group in enumerate(entry.groups) for name in group.parameters}
    met, number = set(), 0
    for place, group in enumerate(optimizer.param_groups):
        members = [name_in_group(param, names, place, i) for i, param in enumerate(group["params"])]
        stored = [stored_names.get(name, name) for name in members]
        plan.differences.missing += [n for n, s in zip(members, stored, strict=True) if s not in groups_of]
        met.update(stored)
        numbers = range(number, number + len(members))
        plan.groups.append({**_options(plan, entry, group, place, stored, groups_of), "params": list(numbers)})
        for param, name, stored_name, at in zip(group["params"], members, stored, numbers, strict=True):
            if stored_name in entry.states and (name in stored_names or name not in held):
                plan.states[at] = _state(plan, source, param, stored_name, held.get(name))
        number += len(members)
    plan.differences.unexpected += [name for name in groups_of if name not in met]
    plan.differences.other += [
        f"state {key!r} of {some(of)} is each rank's own, such as of its part of the parameter: it fits only the "
        "number of ranks and the strategy that it was saved in"
        for key, of in plan.own.items()
    ]
    return plan


def _options(
    plan: OptimizerPlan,
    entry: OptimizerEntry,
    group: dict[str, Any],
    place: int,
    stored: Sequence[str],
    groups_of: dict[str, int],
) -> dict[str, Any]:
    """The group's options as they were for its parameters; as they are where that is not one answer."""
    own = {key: value for key, value in group.items() if key != "params"}
    origins = sorted({groups_of[name] for name in stored if name in groups_of})
    if not stored and place < len(entry.groups) and not entry.groups[place].parameters:
        origins = [place]
    options = [entry.groups[origin].options for origin in origins]
    if any(other != options[0] for other in options):
        plan.differences.other.append(
            f"group {place} of the optimizer holds parameters that were in groups {', '.join(map(str, origins))} with "
            "different options: build the groups as they were"
        )
        return own
    return {**own, **decode(options[0])} if options else own


def _state(plan: OptimizerPlan, source: Source, param: Tensor, stored_name: str, held: Held | None) -> dict[str, Any]:
    assert source.optimizer is not None
    entry = source.optimizer.states[stored_name]
    before = plan.optimizer.state.get(param) or {}
    made: dict[str, Any] = {}
    is_cast = stored_name in source.tensors and source.tensors[stored_name].dtype != param.dtype
    for key in entry.split:
        stored = source.state(stored_name, key)
        made[key] = _split_place(stored, before.get(key), param, key, held, is_cast)
        into = made[key].local if isinstance(made[key], Shard) else made[key].view(-1)
        start = held.owned[0] if held is not None and isinstance(made[key], Shard) else 0
        known = plan.transfers if made[key] is before.get(key) else plan.fresh
        known.append(Transfer(stored, start, into))
    for key, whole in entry.whole.items():
        if whole.file is None and not source.has_same_ranks(stored_name, None if held is None else held.pieces):
            plan.own.setdefault(key, []).append(stored_name)
            continue
        stored = source.state(stored_name, key)
        old = before.get(key)
        fits = type(old) is Tensor and tuple(old.shape) == stored.shape and old.is_contiguous()
        dtype = param.dtype if stored.dtype.is_floating_point and is_cast else stored.dtype
        made[key] = old if fits else torch.empty(stored.shape, dtype=dtype, device=param.device)
        known = plan.transfers if made[key] is old else plan.fresh
        known.append(Transfer(stored, 0, made[key].view(-1)))
    for key, value in entry.values.items():
        number = made[key] = decode(value)
        if is_cast and key != "step" and isinstance(number, Tensor) and number.is_floating_point():
            made[key] = number.to(param.dtype)
    return made


def _split_place(stored: Stored, old: Any, param: Tensor, key: str, held: Held | None, is_cast: bool) -> Tensor:
    """Memory for this rank's elements: what is there already, or new; cast with the parameter if that is cast."""
    fits = held is not None and is_split(key, old, held) and kind_of(old.dtype) == kind_of(stored.dtype)
    if fits and (isinstance(old, Shard) or old.is_contiguous()):
        return old
    if type(old) is Tensor and old.shape == stored.shape and old.dtype == stored.dtype and old.is_contiguous():
        return old  # whole on every rank, as this optimizer wants it
    floating = stored.dtype.is_floating_point and param.is_floating_point()
    dtype = param.dtype if floating and is_cast else stored.dtype
    if isinstance(param, Shard):
        return Shard(torch.empty(param.spec.local_numel, dtype=dtype, device=param.device), param.spec.derived)
    return torch.empty(param.shape, dtype=dtype, device=param.device)
