"""Loops over the parameters of a unit, to each of which a step comes a dozen times. What calls a function of each runs
in C: `any` of what returns None goes through all of it. What only compares is faster as a plain loop: to map a function
takes as long as six of Python's operations.

Note [As plain]
    Outside `AS_PLAIN()` torch looks for an override before it reads or writes an attribute of a parameter, which takes
    longer than the attribute. To open that scope takes as long as two of them. So it is opened by callers that come to
    several parameters, once, around no code of the user's. What is found is the same inside and outside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import repeat, zip_longest
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor

from lamina.core.shard_spec import ShardSpec
from lamina.core.shard_tensor import Shard

_requires_grad_of = vars(torch._C.TensorBase)["requires_grad"].__get__  # past the property of Shards
_grad_of = attrgetter("grad")
_none = repeat(None)
_set_gradient: Any = vars(torch._C.TensorBase)["grad"].__set__  # past `__setattr__` of classes that have one


def gradients_of(params: Iterable[Tensor]) -> list[Tensor | None]:
    """Each one's `.grad`. See Note [As plain]."""
    return list(map(_grad_of, params))


def bind_gradients(params: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    """Make each one's `.grad` what stands at its place. See Note [As plain]."""
    any(map(_set_gradient, params, gradients))


def clear_gradients(params: Iterable[Tensor]) -> None:
    """Make each one's `.grad` None. See Note [As plain]."""
    any(map(_set_gradient, params, _none))


def has_gradient(params: Iterable[Tensor]) -> bool:
    """Whether any has a `.grad`. See Note [As plain]."""
    for param in params:  # noqa: SIM110  # a generator costs more than this loop
        if param.grad is not None:
            return True
    return False


def any_there(values: Iterable[object]) -> bool:
    """Whether any is not None."""
    for value in values:  # noqa: SIM110
        if value is not None:
            return True
    return False


def all_there(values: Iterable[object]) -> bool:
    """Whether none is None."""
    for value in values:  # noqa: SIM110
        if value is None:
            return False
    return True


def are_there(values: Iterable[object]) -> list[bool]:
    """Place by place: not None?"""
    return list(map(is_not, values, _none))


def requirements_of(params: Iterable[Tensor]) -> list[bool]:
    """Each one's `.requires_grad`. See Note [As plain]."""
    return list(map(_requires_grad_of, params))


def are_same(values: Iterable[object], others: Iterable[object]) -> list[bool]:
    """Place by place: the same object?"""
    return list(map(is_, values, others))


def held_elsewhere(views: Sequence[Tensor], locals_: Sequence[Tensor]) -> list[bool] | None:
    """Which of some Shards anybody else refers to, as the object or as its `.local`; None: none of them.

    Args:
        views, locals_: lists of the Shards and of their locals, as many or none, to which nothing else refers.
    """
    of_views, of_locals = list(map(sys.getrefcount, views)), list(map(sys.getrefcount, locals_))
    if of_views.count(_ALONE) == len(of_views) and of_locals.count(_ALONE_LOCAL) == len(of_locals):
        return None
    return [v > _ALONE or p > _ALONE_LOCAL for v, p in zip_longest(of_views, of_locals, fillvalue=0)]


def _references_when_alone() -> tuple[int, int]:
    """What `sys.getrefcount`, mapped over a list, says of a view and of its local tensor that nobody else holds."""
    shard = Shard(torch.zeros(1), ShardSpec("alone", torch.Size([1]), ((0, 1),), 0, None))
    views, locals_ = [shard], [shard.local]
    del shard
    return next(map(sys.getrefcount, views)), next(map(sys.getrefcount, locals_))


_ALONE, _ALONE_LOCAL = _references_when_alone()
