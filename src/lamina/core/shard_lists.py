"""Operations on lists of tensors: what torch's foreach and fused optimizers call.

These run every step over every parameter, so the usual case (all entries are Shards, cut alike across lists) is checked
and unwrapped by C loops (`map`, list comparison by identity, see Note [spec identity]), with no Python per entry. Any
other mixture takes the careful way, entry by entry: each list must fit its leading entry, because a fused kernel given
a plain full state beside a short local range runs, and writes past the range.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from lamina.core.shard_aliases import Reach
from lamina.core.shard_ops import INTO_PLAIN, local_of, op_name, refuse
from lamina.core.shard_tensor import Shard
from lamina.errors import ShardOpError

_local, _own_local, _reach = attrgetter("local"), attrgetter("_local"), attrgetter("_reach")
_geometry = attrgetter("geometry")
_dirty = attrgetter("spec.dirty")
_derived = attrgetter("spec.derived")
_ONLY_SHARDS = {Shard}


def _all_shards(entries: Sequence[Any]) -> bool:
    return set(map(type, entries)) == _ONLY_SHARDS


def _is_tensor_list(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and len(arg) > 0 and isinstance(arg[0], Tensor)


def _locals(entries: Sequence[Shard]) -> list[Tensor]:
    """`.local` of each, which is a call for each."""
    reaches = set(map(_reach, entries))
    reaches.discard(None)
    if not {Reach}.issuperset(map(type, reaches)):  # what they open is not what lies there
        return list(map(_local, entries))
    for reach in reaches:
        reach.is_open = True
    return list(map(_own_local, entries))


def _mark_all(entries: Sequence[Shard]) -> None:
    for flag in set(map(_dirty, entries)):
        if flag is not None:
            flag.mark()


def _owners(args: Sequence[Any]) -> list[Shard | None]:
    """For each place in the lists the first Shard that stands there, or None if all are plain."""
    lists = [arg for arg in args if _is_tensor_list(arg)]
    return [next((value for value in place if type(value) is Shard), None) for place in zip(*lists, strict=False)]


def _entry(func: Any, value: Any, owner: Shard | None) -> Any:
    return value if owner is None else local_of(value, owner.spec, func, (value, owner))


def _unwrap(func: Any, arg: Any, args: tuple[Any, ...], owners: list[Shard | None]) -> Any:
    if type(arg) is Shard:
        refuse(func, args, {}, "a single sharded tensor cannot stand beside a list")
    if not _is_tensor_list(arg):
        return arg
    return [_entry(func, value, owner) for value, owner in zip(arg, owners, strict=True)]


def _unwrap_uniform(arg: Any, geometries: list[Any]) -> Any:
    """The locals of a list of Shards cut like the lead; the argument itself if it is no tensor; None if neither."""
    if isinstance(arg, list | tuple):
        if not arg or not isinstance(arg[0], Tensor):
            return arg
        if _all_shards(arg) and list(map(_geometry, arg)) == geometries:
            return _locals(arg)
        return None
    return None if arg is None or type(arg) is Shard else arg


def _uniform(args: Sequence[Any], geometries: list[Any]) -> list[Any] | None:
    unwrapped = []
    for arg in args:
        local_arg = _unwrap_uniform(arg, geometries)
        if local_arg is None and arg is not None:
            return None
        unwrapped.append(local_arg)
    return unwrapped


def foreach_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    lead = args[0]
    if _all_shards(lead):
        unwrapped = _uniform(args, list(map(_geometry, lead)))
        if unwrapped is not None and not any(map(_is_tensor_list, kwargs.values())):
            func(*unwrapped, **kwargs)
            _mark_all(lead)
            return
    owners = _owners((*args, *kwargs.values()))
    for target, owner in zip(lead, owners, strict=True):
        if owner is not None and type(target) is not Shard:
            refuse(func, (owner,), {}, INTO_PLAIN)
    func(
        *[_unwrap(func, arg, args, owners) for arg in args],
        **{key: _unwrap(func, value, args, owners) for key, value in kwargs.items()},
    )
    _mark_all([target for target in lead if type(target) is Shard])


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if "out" in kwargs:
        refuse(func, args, kwargs, "`out=` lists of sharded tensors are not supported")
    lead = args[0]
    if _is_tensor_list(lead) and _all_shards(lead) and not any(map(_is_tensor_list, kwargs.values())):
        unwrapped = _uniform(args, list(map(_geometry, lead)))
        if unwrapped is not None:
            return list(map(Shard, func(*unwrapped, **kwargs), map(_derived, lead)))
    owners = _owners((*args, *kwargs.values()))
    results = func(
        *[_unwrap(func, arg, args, owners) for arg in args],
        **{key: _unwrap(func, value, args, owners) for key, value in kwargs.items()},
    )
    return [
        result if owner is None else Shard(result, owner.spec.derived)
        for result, owner in zip(results, owners, strict=True)
    ]


def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`_fused_adamw_` and its like: lists of parameters, gradients, states and step counts in one kernel."""
    lead = args[0]
    names = [argument.name for argument in func._schema.arguments]
    geometries = list(map(_geometry, lead)) if _all_shards(lead) else None
    local_args = [_fused_list(func, lead, geometries, *named) for named in zip(names, args, strict=False)]
    local_kwargs = {name: _fused_list(func, lead, geometries, name, arg) for name, arg in kwargs.items()}
    _by_name(func)(*local_args, **local_kwargs)
    _mark_all(lead if geometries is not None else [param for param in lead if type(param) is Shard])


@functools.cache
def _by_name(func: Any) -> Any:
    """The same operation, whose arguments torch takes from Python in half the time."""
    return getattr(torch, func._opname, func)


def _fused_list(func: Any, lead: Sequence[Tensor], geometries: list[Any] | None, name: str, arg: Any) -> Any:
    if not _is_tensor_list(arg) or name == "state_steps":  # the steps are plain 0-dim tensors
        return arg
    if geometries is not None and _all_shards(arg) and (arg is lead or list(map(_geometry, arg)) == geometries):
        return _locals(arg)
    unwrapped = []
    for value, param in zip(arg, lead, strict=True):
        if type(value) is Shard and type(param) is Shard:
            unwrapped.append(local_of(value, param.spec, func))
        elif type(value) is Shard or type(param) is Shard:
            _refuse_plain(func, name, value, param)
        else:
            unwrapped.append(value)
    return unwrapped


def _refuse_plain(func: Any, name: str, value: Tensor, param: Tensor) -> NoReturn:
    sharded, plain = (value, param) if isinstance(value, Shard) else (param, value)
    assert isinstance(sharded, Shard)
    raise ShardOpError(
        f"`{op_name(func)}` got the sharded {sharded.spec.describe()} beside a plain tensor of shape "
        f"{tuple(plain.shape)} in `{name}`. Optimizer states and gradients are cut like their parameter: load them "
        "with `lamina.load` or `optimizer.load_state_dict`, and step through `optimizer.step()`."
    )
