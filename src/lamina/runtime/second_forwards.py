"""What a recomputed forward finds when it runs again in backward: what it found the first time.

torch's checkpoint gives the second forward the same tensors, autocast and random numbers of torch's. Everything else is
as the first one, or whatever came after it, has left it: running values of a batch norm move twice, spectral norms
iterate twice, counters count double, a cache of keys and values (which models of transformers fill unless told
otherwise) holds everything twice. Where the second forward reads such a thing, gradients are those of another function
without a word.

Here the second forward finds everything as it was, and what it changes is forgotten.

Note [What is kept]
    1. Lists, dicts, sets and objects among the arguments, however deep: their entries.
    2. Attributes and buffers that the block's modules change in their forward: which these are is learned in the first
       forwards, and again when modules come or change between training and evaluation; until then everything is kept.
       A tensor that is written in place is copied. Kernels of batch norm write past the version counter: values count.
       So with random numbers that are not of torch's default generators (draws.py): their state is kept.
    3. Of all other tensors, nested in arguments or held by modules, the version. Who has written to one since would
       have the second forward read what he wrote: a `StateError`. What is an argument by itself, torch watches.
    4. What comes behind the forward, a hook on the block say, may write to a buffer, too: small ones are copied as long
       as the block learns, and known to change once that has been seen.
    5. Not seen: globals, attributes of classes, closures, memory written behind torch's back, objects without a dict,
       what modules of torch's own keep in attributes, attributes that a forward begins to change later.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lamina.core.own_attributes import own_attributes
from lamina.runtime.draws import global_sources, has_drawn, is_source, set_state, state_of
from lamina.runtime.uses import PLAIN_LEAVES

FORWARDS_THAT_LEARN = 2
SMALL = 4096  # elements
MOST = 4096  # containers and objects among the arguments of a call
_MISSING: Any = object()
_OWN = frozenset(vars(nn.Module())) | {"forward", "_flat_weights", "_flat_weight_refs"}
_NEVER = (*PLAIN_LEAVES, type, nn.Module)
_CONTAINERS = (dict, list, set, collections.deque)


class Insides:
    """Containers and objects that values lead to, with their entries, and the tensors in them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.holders: list[tuple[Any, Any]] = []  # a dict, list, set or deque, and its copy
        self.tensors: list[Tensor] = []
        self.sources: list[Any] = []  # of random numbers
        self._look(values, set())

    def _look(self, values: Iterable[Any], seen: set[int]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.tensors.append(value)
            elif not isinstance(value, _NEVER) and id(value) not in seen and len(seen) < MOST:
                seen.add(id(value))
                if is_source(value):
                    self.sources.append(value)
                else:
                    self._look_into(value, seen)

    def _look_into(self, value: Any, seen: set[int]) -> None:
        if isinstance(value, (tuple, frozenset)):
            self._look(value, seen)
        elif isinstance(value, _CONTAINERS):
            self._keep(value, seen)
        if not callable(value) and (inside := own_attributes(value)):
            self._keep(inside, seen)

    def _keep(self, holder: Any, seen: set[int]) -> None:
        before = _copy(holder)
        self.holders.append((holder, before))
        self._look(before.values() if isinstance(before, dict) else before, seen)

    def give_tensors(self) -> list[Tensor]:
        """Once: they are not kept here."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def have_changed(self) -> bool:
        return not all(_is_same(holder, before) for holder, before in self.holders)


class Place(NamedTuple):
    """An attribute or a buffer of a module, which is not held."""

    module: weakref.ref[nn.Module]
    name: str
    is_buffer: bool

    def entries(self) -> dict[str, Any]:
        module = self.module()
        if module is None:
            return {}
        return module._buffers if self.is_buffer else vars(module)

    def value(self) -> Any:
        return self.entries().get(self.name, _MISSING)


class Found:
    """What one call of a block finds."""

    def __init__(
        self,
        block: SecondForwards,
        changed: Mapping[Place, None],
        tensors: Iterable[Place],
        sources: Iterable[str],
        arguments: Iterable[Any],
    ) -> None:
        """
        Args:
            block: which it does not hold.
            changed: places whose entries, or what is inside of them, the forward may change.
            tensors: places of tensors. Those in `changed` may be written in place, and are copied.
            sources: global ones of random numbers that the forward may draw from.
        """
        self.has_run = False
        self.modules, self.modes = block.modules, block.modes
        self.entries = [(place, value := place.value(), _insides_of(value)) for place in changed]
        self.copies = [(place, v, v._version, v.detach().clone()) for place, v, _ in self.entries if _counts(v)]
        self.arguments = Insides(arguments)
        self.steady: list[tuple[weakref.ref[Tensor], int]] = []  # what keeps views of weights would be told so
        self._watch(self.arguments.give_tensors())
        self._watch(place.value() for place in tensors if place not in changed)
        self.draws: list[tuple[Place | None, Any, Any]] = [  # sources, and their states
            (None, source, state_of(source)) for source in (*sources, *self.arguments.sources)
        ]
        for place, _, insides in self.entries:
            if insides is not None:
                self._watch(insides.give_tensors())
                self.draws += [(place, source, state_of(source)) for source in insides.sources]

    def _watch(self, values: Iterable[Any]) -> None:
        self.steady += [(weakref.ref(value), value._version) for value in values if _counts(value)]

    def written(self) -> Iterator[Tensor]:
        """Tensors that were written to since, of which there is no copy."""
        for reference, version in self.steady:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                yield tensor

    def note_new(self, places: Iterable[Place]) -> None:
        """Places that have come since."""
        known = {place for place, _, _ in self.entries}
        self.entries += [(place, _MISSING, None) for place in places if place not in known]

    def changes(self) -> list[Place]:
        """What the forward has changed."""
        known = {place for place, *kept in self.copies if _is_written(*kept)}
        known |= {place for place, *kept in self.draws if place is not None and has_drawn(*kept)}
        return [
            place
            for place, value, insides in self.entries
            if place in known or place.value() is not value or (insides is not None and insides.have_changed())
        ]

    def drawn(self) -> list[str]:
        """Global sources of random numbers that the forward has drawn from."""
        return [source for _, source, state in self.draws if isinstance(source, str) and has_drawn(source, state)]

    def forget_all_but(self, changed: Mapping[Place, None], sources: Container[str]) -> None:
        """And small tensors."""
        kept = {place for place, tensor, _, _ in self.copies if tensor.numel() <= SMALL} | changed.keys()
        self.draws = [draw for draw in self.draws if draw[0] in kept or (draw[0] is None and _stays(draw[1], sources))]
        self.entries = [entry for entry in self.entries if entry[0] in kept]
        self._watch(tensor for place, tensor, _, _ in self.copies if place not in kept)
        self.copies = [entry for entry in self.copies if entry[0] in kept]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """For a second forward; what it changes is forgotten."""
        now = [(place, place.value()) for place, _, _ in self.entries]
        modes_now = modes_of(self.modules)
        kept = [self.arguments, *(insides for _, _, insides in self.entries if insides is not None)]
        holders = [entry for insides in kept for entry in insides.holders]
        held_now = [(holder, _copy(holder)) for holder, _ in holders]
        drawn_now = [(source, state_of(source)) for _, source, _ in self.draws]
        try:
            if modes_now != self.modes:
                _switch(self.modules, self.modes)
            for place, value, _ in self.entries:
                _set(place, value)
            with _disable_current_modes():  # these are no operations of the forward
                for place, _, _, copy in self.copies:
                    _set(place, copy.clone())
            _refill(holders)
            for _, source, state in self.draws:
                set_state(source, state)
            yield
        finally:
            for source, state in drawn_now:
                set_state(source, state)
            _refill(held_now)
            for place, value in now:
                _set(place, value)
            if modes_now != self.modes:
                _switch(self.modules, modes_now)


class SecondForwards:
    """Of one block; the block holds it, and it does not hold the block."""

    def __init__(self) -> None:
        self.modules: list[weakref.ref[nn.Module]] = []
        self.modes: list[int] = []  # of the modules, in the call that began last
        self._to_learn: dict[tuple[int, ...], int] = {}  # forwards with these modes
        self._changed: dict[Place, None] = {}
        self._tensors: list[Place] = []
        self._sources: dict[str, None] = {}

    def find(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
        """What a call finds that begins now."""
        self.modes = modes_of(self.modules)
        if not self.modes or tuple(self.modes) not in self._to_learn:
            self.modules = list(map(weakref.ref, block.modules()))
            self.modes = modes_of(self.modules)
        arguments = (*args, *kwargs.values())
        if self._to_learn.setdefault(tuple(self.modes), FORWARDS_THAT_LEARN):
            return Found(self, dict.fromkeys(self._places()), (), global_sources(), arguments)
        return Found(self, self._changed, self._tensors, self._sources, arguments)

    def learn(self, found: Found) -> None:
        """The forward that has found this is over."""
        found.has_run = True
        modes = tuple(found.modes)
        if self._to_learn[modes]:
            self._to_learn[modes] -= 1
            found.note_new(self._places())
            self._tensors = [place for place, value, _ in found.entries if isinstance(value, Tensor)]
            self._changed.update(dict.fromkeys(found.changes()))
            self._sources.update(dict.fromkeys(found.drawn()))
            found.forget_all_but(self._changed, self._sources)

    def learn_late(self, found: Found) -> None:
        """A second forward begins."""
        for place, tensor, version, _ in found.copies:
            if tensor._version != version:
                self._changed[place] = None

    def _places(self) -> Iterator[Place]:
        for reference in self.modules:
            module = reference()
            if module is not None:
                yield from _places_of(module, reference)


def _places_of(module: nn.Module, reference: weakref.ref[nn.Module]) -> Iterator[Place]:
    for name in module._buffers:
        yield Place(reference, name, True)
    if not type(module).__module__.startswith("torch.nn."):
        for name in vars(module):
            if name not in _OWN:
                yield Place(reference, name, False)


def modes_of(modules: Iterable[weakref.ref[nn.Module]]) -> list[int]:
    """Whether they are in training, and how many lie inside; nothing if one has gone."""
    try:
        return [(module := each()).training + 2 * len(module._modules) for each in modules]  # type: ignore[union-attr]
    except AttributeError:
        return []


def _switch(modules: Iterable[weakref.ref[nn.Module]], modes: Iterable[int]) -> None:
    for reference, mode in zip(modules, modes, strict=False):
        module = reference()
        if module is not None:
            module.training = mode % 2 == 1


def _counts(value: Any) -> bool:
    """Whether it is a tensor with a version of its own; parameters lie in memory that is gathered into."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference()


def _stays(source: Any, sources: Container[str]) -> bool:
    return not isinstance(source, str) or source in sources


def _is_written(tensor: Tensor, version: int, copy: Tensor) -> bool:
    if tensor._version != version or tensor.is_meta:
        return tensor._version != version
    try:
        return not torch.equal(tensor, copy)
    except (RuntimeError, NotImplementedError):  # a kind of tensor that cannot be compared
        return False


def _copy(holder: Any) -> Any:
    """Of a plain type: what a class of the user's does with copies and updates is its own affair."""
    kind = next(kind for kind in _CONTAINERS if isinstance(holder, kind))
    return kind(dict.items(holder) if kind is dict else holder)


def _is_same(holder: Any, before: Any) -> bool:
    if isinstance(holder, set):
        return bool(holder == before)
    if len(holder) != len(before) or not all(map(is_, holder, before)):
        return False
    return not isinstance(holder, dict) or all(map(is_, dict.values(holder), before.values()))


def _refill(holders: Iterable[tuple[Any, Any]]) -> None:
    for holder, entries in holders:
        if not _is_same(holder, entries):
            _fill(holder, entries)


def _fill(holder: Any, entries: Any) -> None:
    if isinstance(holder, collections.OrderedDict):
        collections.OrderedDict.clear(holder)
        for key, value in entries.items():
            collections.OrderedDict.__setitem__(holder, key, value)
    elif isinstance(holder, dict):
        dict.clear(holder)
        dict.update(holder, entries)
    elif isinstance(holder, list):
        list.__setitem__(holder, slice(None), entries)
    elif isinstance(holder, set):
        set.clear(holder)
        set.update(holder, entries)
    else:
        collections.deque.clear(holder)
        collections.deque.extend(holder, entries)


def _set(place: Place, value: Any) -> None:
    if value is _MISSING:
        place.entries().pop(place.name, None)
    elif place.value() is not value:
        place.entries()[place.name] = value


def _insides_of(value: Any) -> Insides | None:
    return None if isinstance(value, (Tensor, *_NEVER)) else Insides([value])
