"""What a recomputed forward finds when it runs again in backward: what it found the first time.

torch's checkpoint gives the second forward the same tensors, autocast and random numbers of torch's. Everything else is
as the first one, or whatever came after it, has left it: running values of a batch norm move twice, spectral norms
iterate twice, counters count double, a cache of keys and values (which models of transformers fill unless told
otherwise) holds everything twice. Where the second forward reads such a thing, gradients are those of another function
without a word.

Here the second forward finds everything as it was, and what it changes is forgotten.

Note [What is kept]
    1. Lists, dicts, sets and objects among the arguments, however deep: their entries. Small tensors among these are
       copied: blocks count in them. Whose insides are left alone: insides.py.
    2. Attributes and buffers that the block's modules change in their forward: which these are is learned in the first
       forwards, and again when modules come or change between training and evaluation; until then everything is kept.
       A tensor that is written in place is copied, and its views with it. Kernels of batch norm write past the version
       counter: values count. So with random numbers that are not of torch's default generators (draws.py): their state
       is kept.
    3. Of all other tensors, nested in arguments or held by modules, the version. Who has written to one since would
       have the second forward read what he wrote: a `StateError`. What is an argument by itself, torch watches.
    4. What comes behind the forward, a hook on the block say, may write to a buffer, too: small ones are copied as long
       as the block learns, and known to change once that has been seen.
    5. Not seen: globals, attributes of classes, closures, memory written behind torch's back, callable objects and
       objects without a dict, what modules of torch's own keep in attributes, attributes that a forward begins to
       change later.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lamina.core.uncompiled import uncompiled
from lamina.runtime.draws import global_sources, has_drawn, set_state, state_of
from lamina.runtime.insides import Insides, KeptTensor, copies_of, copy_of_entries, is_kept, refill, tensors_of

FORWARDS_THAT_LEARN = 2
SMALL = 4096  # elements
_MISSING: Any = object()
_OWN = frozenset(vars(nn.Module())) | {"forward", "_flat_weights", "_flat_weight_refs"}


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


class Entry(NamedTuple):
    """What a place held."""

    place: Place
    value: Any  # for a tensor perhaps a `KeptTensor`
    insides: Insides | None
    kept: list[KeptTensor]

    def is_small(self) -> bool:
        return isinstance(self.value, KeptTensor) and self.value.value.numel() <= SMALL

    def has_changed(self) -> bool:
        return (
            not is_kept(self.place.value(), self.value)
            or any(each.differs() for each in self.kept)
            or (self.insides is not None and self.insides.have_changed())
        )


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
        self.modules, self.modes = block.modules, block.modes
        self.steady: list[tuple[weakref.ref[Tensor], int]] = []  # what keeps views of weights would be told so
        keeping = _Keeping()
        self.entries = [keeping.entry(place) for place in changed]
        self.arguments, self.in_arguments = keeping.of_arguments(arguments)
        keeping.finish()
        self._watch((*keeping.uncopied, *self.arguments.give_tensors()))
        self._watch(place.value() for place in tensors if place not in changed)
        self.draws: list[tuple[Place | None, Any, Any]] = [  # sources, and their states
            (None, source, state_of(source)) for source in (*sources, *self.arguments.sources)
        ]
        for place, _, insides, _ in self.entries:
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
        known = {entry.place for entry in self.entries}
        self.entries += [Entry(place, _MISSING, None, []) for place in places if place not in known]

    def changes(self) -> list[Place]:
        """What the forward has changed."""
        drawn = {place for place, *kept in self.draws if place is not None and has_drawn(*kept)}
        return [entry.place for entry in self.entries if entry.place in drawn or entry.has_changed()]

    def drawn(self) -> list[str]:
        """Global sources of random numbers that the forward has drawn from."""
        return [source for _, source, state in self.draws if isinstance(source, str) and has_drawn(source, state)]

    def forget_all_but(self, changed: Mapping[Place, None], sources: Container[str]) -> None:
        """And small tensors."""
        rest = [entry for entry in self.entries if entry.place not in changed and not entry.is_small()]
        self.entries = [entry for entry in self.entries if entry.place in changed or entry.is_small()]
        places = {entry.place for entry in self.entries}
        self.draws = [
            draw for draw in self.draws if draw[0] in places or (draw[0] is None and _stays(draw[1], sources))
        ]
        self._watch(entry.place.value() for entry in rest)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """For a second forward; what it changes is forgotten."""
        now = [(entry.place, entry.place.value()) for entry in self.entries]
        modes_now = modes_of(self.modules)
        insides = [self.arguments, *(entry.insides for entry in self.entries if entry.insides is not None)]
        holders = [entry for each in insides for entry in each.holders]
        held_now = [(holder, copy_of_entries(holder)) for holder, _ in holders]
        drawn_now = [(source, state_of(source)) for _, source, _ in self.draws]
        try:
            if modes_now != self.modes:
                _switch(self.modules, self.modes)
            with _disable_current_modes():  # these are no operations of the forward
                tensors = tensors_of({*self.in_arguments, *(each for entry in self.entries for each in entry.kept)})
            for entry in self.entries:
                _set(entry.place, _given(entry.value, tensors))
            for holder, before in holders:
                refill(holder, _given_entries(before, tensors))
            for _, source, state in self.draws:
                set_state(source, state)
            yield
        finally:
            for source, state in drawn_now:
                set_state(source, state)
            for holder, entries in held_now:
                refill(holder, entries)
            for place, value in now:
                _set(place, value)
            if modes_now != self.modes:
                _switch(self.modules, modes_now)


class _Keeping:
    """What is kept for tensors while a `Found` is made: one thing for each, wherever it lies."""

    def __init__(self) -> None:
        self.uncopied: list[Tensor] = []
        self._kept: dict[int, KeptTensor] = {}
        self._to_copy: list[tuple[KeptTensor, Tensor]] = []
        self._here: list[KeptTensor] = []  # in what is looked at

    def entry(self, place: Place) -> Entry:
        value, self._here = place.value(), []
        if issubclass(type(value), Tensor):
            return Entry(place, self._copy(value), None, self._here)
        return Entry(place, value, Insides([value], self._copy), self._here)

    def of_arguments(self, values: Iterable[Any]) -> tuple[Insides, list[KeptTensor]]:
        self._here = []
        return Insides(values, self._copy_if_small), self._here

    def finish(self) -> None:
        """Make the copies, all at once."""
        copies = copies_of([tensor for _, tensor in self._to_copy])
        for (kept, tensor), copy in zip(self._to_copy, copies, strict=True):
            kept.value, kept.is_copy = copy, copy is not tensor
            if copy is tensor:
                self.uncopied.append(tensor)

    def _copy(self, tensor: Tensor) -> Any:
        return self._keep(tensor, self._to_copy) if _counts(tensor) else tensor

    def _copy_if_small(self, tensor: Tensor) -> Any:
        if not _counts(tensor) or id(tensor) in self._kept or tensor.numel() <= SMALL:
            return self._copy(tensor)
        self.uncopied.append(tensor)
        return tensor if tensor.grad_fn is None else self._keep(tensor, [])

    def _keep(self, tensor: Tensor, new: list[tuple[KeptTensor, Tensor]]) -> KeptTensor:
        kept = self._kept.get(id(tensor))
        if kept is None:
            kept = self._kept[id(tensor)] = KeptTensor(tensor)
            new.append((kept, tensor))
        self._here.append(kept)
        return kept


class SecondForwards:
    """Of one block; the block holds it, and it does not hold the block."""

    def __init__(self) -> None:
        self.modules: list[weakref.ref[nn.Module]] = []
        self.modes: list[int] = []  # of the modules, in the call that began last
        self._to_learn: dict[tuple[int, ...], int] = {}  # forwards with these modes
        self._changed: dict[Place, None] = {}
        self._tensors: list[Place] = []
        self._sources: dict[str, None] = {}

    @uncompiled
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

    @uncompiled
    def learn(self, found: Found) -> None:
        """The forward that has found this is over."""
        modes = tuple(found.modes)
        if self._to_learn[modes]:
            self._to_learn[modes] -= 1
            found.note_new(self._places())
            self._tensors = [entry.place for entry in found.entries if isinstance(entry.value, KeptTensor)]
            self._changed.update(dict.fromkeys(found.changes()))
            self._sources.update(dict.fromkeys(found.drawn()))
            found.forget_all_but(self._changed, self._sources)

    def learn_late(self, found: Found) -> None:
        """A second forward begins."""
        written = [entry.place for entry in found.entries if any(each.is_written() for each in entry.kept)]
        self._changed.update(dict.fromkeys(written))

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
    is_tensor = issubclass(type(value), Tensor)
    return is_tensor and not isinstance(value, nn.Parameter) and not value.is_inference()


def _stays(source: Any, sources: Container[str]) -> bool:
    return not isinstance(source, str) or source in sources


def _set(place: Place, value: Any) -> None:
    if value is _MISSING:
        place.entries().pop(place.name, None)
    elif place.value() is not value:
        place.entries()[place.name] = value


def _given(value: Any, tensors: Mapping[Any, Tensor]) -> Any:
    return tensors[value] if type(value) is KeptTensor else value


def _given_entries(before: Any, tensors: Mapping[Any, Tensor]) -> Any:
    if isinstance(before, set):
        return before
    if isinstance(before, dict):
        return {key: _given(value, tensors) for key, value in before.items()}
    return [_given(value, tensors) for value in before]
