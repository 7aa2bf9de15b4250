"""Loops over the parameters of a unit that run in C. A step comes to every parameter a dozen times: as loops in Python
they took a third of the runtime's time on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor

from lamina.core.shard_tensor import AS_PLAIN

_grad_of, _layout_of = attrgetter("grad"), attrgetter("layout")
_set_grad: Any = vars(torch._C.TensorBase)["grad"].__set__
_none, _strided = repeat(None), repeat(torch.strided)


def gradients_of(params: Iterable[Tensor]) -> list[Tensor | None]:
    """Each one's `.grad`."""
    with AS_PLAIN():
        return list(map(_grad_of, params))


def bind_gradients(params: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    """Make each one's `.grad` what stands at its place."""
    with AS_PLAIN():
        deque(map(_set_grad, params, gradients), maxlen=0)


def clear_gradients(params: Iterable[Tensor]) -> None:
    """Make each one's `.grad` None."""
    with AS_PLAIN():
        deque(map(_set_grad, params, _none), maxlen=0)


def any_there(values: Iterable[object]) -> bool:
    """Whether any is not None."""
    return any(map(is_not, values, _none))


def all_there(values: Iterable[object]) -> bool:
    """Whether none is None."""
    return all(map(is_not, values, _none))


def are_there(values: Iterable[object]) -> list[bool]:
    """Place by place: not None?"""
    return list(map(is_not, values, _none))


def are_same(values: Iterable[object], others: Iterable[object]) -> list[bool]:
    """Place by place: the same object?"""
    return list(map(is_, values, others))


def are_strided(tensors: Sequence[Tensor]) -> bool:
    """Whether none is sparse or of another layout."""
    return all(map(is_, map(_layout_of, tensors), _strided))
