"""Where the parameters of an optimizer lie in the flat buffers of their units.

torch's optimizers see a list of tensors and cannot know that most of them are neighbours in one buffer: 300 parameters
are 300 entries of every list. A `Place` says where a parameter's local elements lie, so that neighbours can be treated
as one range, by the optimizer's update and by the norm of the gradients alike.

Note [gradient views]
    A gradient is flat only while `p.grad` is the very object that its unit made for it. Nobody may keep a reference to
    such a view or to its `.local`: the runtime counts references to see whether the user still holds a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lamina.core.shard_tensor import Shard
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.engine import Engine
from lamina.runtime.unit import Unit


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The elements of one parameter inside the ranges of its unit on this rank."""

    unit: Unit
    segment: int
    position: int  # number of the parameter in the unit's layout
    start: int  # [start, stop) in masters[segment] and grads[segment]; empty where this rank holds nothing of it
    stop: int

    def is_followed_by(self, other: Place) -> bool:
        """Whether no other parameter's elements lie between the two; padding may, and is zero."""
        return other.unit is self.unit and other.segment == self.segment and other.position == self.position + 1

    @property
    def name(self) -> str:
        return self.unit.layout.params[self.position].name


# by id of the parameter; a model that takes parameters in later gets another engine
_PLACES: weakref.WeakKeyDictionary[Engine, dict[int, Place]] = weakref.WeakKeyDictionary()


def find_places(params: Iterable[Tensor]) -> list[Place | None]:
    """The place of each parameter; None where no sharded model owns it."""
    tables = []
    for runtime in list(RUNTIMES.values()):
        engine = runtime.engine
        if engine not in _PLACES:
            _PLACES[engine] = {id(unit.params[p.position]): p for unit in runtime.units for p in _places_of(unit)}
        tables.append(_PLACES[engine])
    ids = map(id, params)
    if len(tables) == 1:
        return list(map(tables[0].get, ids))
    return [next((table[key] for table in tables if key in table), None) for key in ids]


def _places_of(unit: Unit) -> list[Place]:
    places: list[Place] = []
    index = unit.mesh.range_index
    for number, segment in enumerate(unit.layout.segments):
        for i in range(len(segment.params)):
            start, stop = segment.owned(i, index)
            offset = min(segment.offset_in_range(i, index), segment.range_numel)
            places.append(Place(unit, number, len(places), offset, offset + stop - start))
    return places


def local_of(tensor: Tensor) -> Tensor:
    """This rank's elements: 1-D of a `Shard`, a plain tensor as it is."""
    return tensor.local if isinstance(tensor, Shard) else tensor
