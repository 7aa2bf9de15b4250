"""Containers and objects that values lead to, what they held, and how they are filled with it again.

Note [Values of the user's]
    1. What they are tells their type: proxies and mocks answer for others where `isinstance` asks.
    2. Containers are read and filled by the methods of Python's own types: classes of the user's may count, refuse or
       compute where an entry is read.
    3. What several threads use is left alone, or who waits there might never be woken: locks, and who holds one. So are
       modules, loggers, which lead to all others, and members of enumerations.
    4. No more than `ENTRIES` are kept, nor more than `LOOKS` of these looked into, nearest first: data sets and
       tokenizers hold millions.
    5. Of a tensor with a graph its values are kept, not the tensor: an attribute that each forward replaces would have
       the graph of each step hold that of the step before.
"""

from __future__ import annotations

import collections
import enum
import logging
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.own_attributes import own_attributes
from lamina.runtime.draws import is_source
from lamina.runtime.uses import PLAIN_LEAVES

ENTRIES, LOOKS = 65536, 1024
_PLAIN = frozenset(map(id, PLAIN_LEAVES))  # classes need not be hashable
_NEVER = (*PLAIN_LEAVES, type, nn.Module, types.ModuleType, logging.Logger, enum.Enum)
_LOCKS = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Thread),
    *(threading.Condition, threading.Semaphore, threading.Event),
)
_CONTAINERS: tuple[Any, ...] = (collections.OrderedDict, dict, list, set, collections.deque)
_BASES = {id(kind): kind for kind in _CONTAINERS}


class KeptTensor:
    """What stands for a tensor, which may be alive or not: its values, or a copy of them."""

    def __init__(self, tensor: Tensor) -> None:
        self.reference, self.version = weakref.ref(tensor), tensor._version
        self.needs_grad, self.is_copy = tensor.requires_grad, False
        self.value = tensor.detach() if tensor.grad_fn is not None else tensor

    def is_written(self) -> bool:
        """By the version counter."""
        tensor = self.reference()
        return tensor is not None and tensor._version != self.version

    def differs(self) -> bool:
        """By its values as well: kernels of batch norm write past the version counter."""
        tensor = self.reference()
        if tensor is None or tensor.is_meta or self.is_written():
            return self.is_written()
        try:
            return not torch.equal(tensor, self.value)
        except Exception:  # a kind of tensor that cannot be compared
            return False


def tensors_of(kept: Collection[KeptTensor]) -> dict[KeptTensor, Tensor]:
    """What a forward that runs again is given in their place, which it may write to."""
    if not kept:
        return {}
    found = {each: each.reference() for each in kept if not each.is_copy}
    given = {each: tensor for each, tensor in found.items() if tensor is not None}
    lost = [each for each in kept if each not in given]
    given.update(zip(lost, copies_of([each.value for each in lost]), strict=True))
    for each in lost:
        if each.needs_grad and given[each] is not each.value:  # a copy of a leaf, which may be written in place
            given[each] = given[each].requires_grad_().clone()
    return given


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What shares memory does so in the copies. Those that cannot be copied are returned themselves."""
    if not tensors:
        return []
    places = list(map(_memory, tensors))
    several = {place for place, count in collections.Counter(places).items() if place is not None and count > 1}
    memory: dict[int | None, Any] = {}
    copies = []
    for tensor, place in zip(tensors, places, strict=True):
        if place not in several:
            copies.append(_copy_of(tensor))
            continue
        if place not in memory:
            memory[place] = tensor.untyped_storage().clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copies.append(empty.set_(memory[place], tensor.storage_offset(), tensor.shape, tensor.stride()))
    return copies


def _copy_of(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except Exception:  # a class of the user's that refuses, or a weight whose memory serves another now
        return tensor


def _memory(tensor: Tensor) -> int | None:
    """Where it lies, if it is a plain view of memory."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    return None if tensor.is_meta or tensor.is_conj() or tensor.is_neg() else tensor.untyped_storage()._cdata


class Insides:
    """Of some values: containers and objects with their entries, tensors, and sources of random numbers."""

    def __init__(self, values: Iterable[Any], keep: Callable[[Tensor], Any]) -> None:
        """
        Args:
            keep: what is kept for a tensor that is an entry of a list, a dict, a deque or an object.
        """
        self.holders: list[tuple[Any, Any]] = []  # a dict, list, set or deque, and its entries
        self.tensors: list[Tensor] = []  # others
        self.sources: list[Any] = []
        self._room = ENTRIES
        looks, seen, waiting = LOOKS, set[int](), collections.deque(values)
        while waiting:
            value = waiting.popleft()
            kind = type(value)
            if issubclass(kind, Tensor):
                self.tensors.append(value)
            elif not issubclass(kind, _NEVER) and id(value) not in seen:
                seen.add(id(value))
                for entries in self._entries_in(value, kind, keep):
                    if len(entries) <= looks:
                        looks -= len(entries)
                        waiting.extend(entries)

    def _entries_in(self, value: Any, kind: type, keep: Callable[[Tensor], Any]) -> Iterator[Sequence[Any]]:
        """Those that may lead on."""
        if is_source(value):
            self.sources.append(value)
            return
        if issubclass(kind, (tuple, frozenset)):
            base: Any = tuple if issubclass(kind, tuple) else frozenset
            yield [each for each in base.__iter__(value) if not _is_plain(each)]
        elif issubclass(kind, _CONTAINERS):
            yield self._hold(value, keep)
        if id(kind) not in _BASES and not callable(value) and (inside := own_attributes(value)):
            yield self._hold(inside, keep)

    def _hold(self, holder: Any, keep: Callable[[Tensor], Any]) -> Sequence[Any]:
        if _base(holder).__len__(holder) > self._room:
            return ()
        before = copy_of_entries(holder)
        values = list(before.values() if isinstance(before, dict) else before)
        are_plain = _PLAIN.issuperset(map(id, map(type, values)))
        leading = [] if are_plain else [each for each in values if not _is_plain(each)]
        if any(issubclass(type(each), _LOCKS) for each in leading):
            return ()
        self._room -= len(before)
        self.holders.append((holder, before))
        if isinstance(before, set) or not leading:
            return leading
        for key, value in before.items() if isinstance(before, dict) else enumerate(values):
            if issubclass(type(value), Tensor):
                before[key] = keep(value)
        return [each for each in leading if not issubclass(type(each), Tensor)]

    def give_tensors(self) -> list[Tensor]:
        """Once: they are not kept here."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def have_changed(self) -> bool:
        return not all(_has(holder, before) for holder, before in self.holders)


def _is_plain(value: Any) -> bool:
    return id(type(value)) in _PLAIN


def _base(holder: Any) -> Any:
    kind = type(holder)
    return _BASES.get(id(kind)) or next(base for base in _CONTAINERS if issubclass(kind, base))


def copy_of_entries(holder: Any) -> Any:
    """In a container of Python's own."""
    kind = _base(holder)
    return kind(kind.items(holder) if issubclass(kind, dict) else kind.__iter__(holder))


def is_kept(value: Any, kept: Any) -> bool:
    """Whether it is what was kept, or what that stands for."""
    return value is kept or (type(kept) is KeptTensor and kept.reference() is value)


def _has(holder: Any, before: Any, is_same: Callable[[Any, Any], bool] = is_kept) -> bool:
    kind = _base(holder)
    if kind is set:
        return bool(set.__eq__(holder, before))
    if kind.__len__(holder) != len(before):
        return False
    if not issubclass(kind, dict):
        return all(map(is_same, kind.__iter__(holder), before))
    return all(map(is_, kind.__iter__(holder), before)) and all(map(is_same, kind.values(holder), before.values()))


def refill(holder: Any, entries: Any) -> None:
    if _has(holder, entries, is_):
        return
    kind = _base(holder)
    if kind is list:
        list.__setitem__(holder, slice(None), entries)
        return
    kind.clear(holder)
    if issubclass(kind, dict):
        for key, value in entries.items():
            kind.__setitem__(holder, key, value)
    elif kind is set:
        set.update(holder, entries)
    else:
        kind.extend(holder, entries)
