"""Where this rank's elements of a parameter lie: the plain data beside every `Shard`.

torch describes a piece of a tensor by placements over a mesh (DTensor: whole rows of dim 0, or of another dim). Cuts
at arbitrary elements, which make padding-free units possible, cannot be said that way. A `ShardSpec` says it with one
flat element range per rank of one group.

Note [spec identity]
1. `geometry` is one tuple object, shared by a spec and everything made from it: comparing two related specs is an
   identity test, also inside a list comparison.
2. `dirty`, `receive` and `notes` travel with aliases of the parameter only. Results, clones, gradients and optimizer
   states carry `spec.derived`, so that writing to them never marks the parameter as changed.
3. The groups stay out of `geometry`: a spec that was loaded from a file has none and still matches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lamina.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from lamina.core.lanes import Mark
    from lamina.core.shard_losses import Share

Geometry = tuple[torch.Size, tuple[tuple[int, int], ...], int]


class DirtyFlag:
    """Set by every in-place write to a parameter (or to an alias of it); its reader sets `value` back to False."""

    __slots__ = ("published", "value", "written")

    def __init__(self, value: bool = False) -> None:
        self.value = value
        self.written: Mark | None = None  # when the last write is done on the device; None: when all that is queued is
        self.published = False  # it went into the copy that peers read, too

    def mark(self, written: Mark | None = None, published: bool = False) -> None:
        self.value, self.written, self.published = True, written, published

    def __repr__(self) -> str:
        return f"DirtyFlag({self.value})"


class Notes:
    """What users do to some parameters that no operation tells of."""

    __slots__ = ("are_hooked", "freezes")

    def __init__(self) -> None:
        self.are_hooked = False  # whether a hook was ever hung on any
        self.freezes = 0  # how often any was frozen or thawed


@dataclass(frozen=True)
class GlobalSpec:
    """The larger tensor of which a parameter is a part, such as one rank's columns under tensor parallelism."""

    shape: torch.Size  # of the larger tensor
    dim: int  # the dim along which it is split
    start: int = 0  # where the parameter begins along `dim`

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part_of(self, whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The view of `whole` (this spec's shape) that is the parameter."""
        return whole.narrow(self.dim, self.start, shape[self.dim])

    def offset_of(self, offset: tuple[int, ...]) -> tuple[int, ...]:
        """An offset inside the parameter, counted inside the larger tensor."""
        return tuple(at + self.start if dim == self.dim else at for dim, at in enumerate(offset))


class Box(NamedTuple):
    """An axis-aligned block of a tensor."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """One parameter, cut into one flat element range per rank of a group."""

    name: str  # qualified parameter name
    shape: torch.Size  # of the full parameter
    ranges: tuple[tuple[int, int], ...]  # [start, stop) by group rank; disjoint, cover [0, numel), may be empty
    index: int  # this rank's place in `ranges`
    group: ProcessGroup | None  # of those ranks; None: one rank holds everything, or the spec came out of a file
    outer: tuple[ProcessGroup, ...] = ()  # groups over which further disjoint pieces lie
    global_spec: GlobalSpec | None = None
    dirty: DirtyFlag | None = None
    share: Share | None = None  # in means over the data ranks
    receive: Callable[[torch.Tensor], None] | None = None  # takes gradients that autograd brings the parameter itself
    notes: Notes | None = None
    gathers: ProcessGroup | None = None  # the same ranks, for the whole parameter; None: `group`
    geometry: Geometry | None = field(default=None, repr=False, kw_only=True)  # None: made from the fields above
    start: int = field(init=False, repr=False)
    stop: int = field(init=False, repr=False)
    numel: int = field(init=False, repr=False)
    local_numel: int = field(init=False, repr=False)
    strides: tuple[int, ...] = field(init=False, repr=False)  # row-major, as the full parameter would have

    def __post_init__(self) -> None:
        fill = object.__setattr__
        shape = self.shape if type(self.shape) is torch.Size else torch.Size(self.shape)
        geometry = self.geometry
        if geometry is None:
            geometry = (shape, tuple((int(start), int(stop)) for start, stop in self.ranges), self.index)
        start, stop = geometry[1][self.index]
        fill(self, "shape", shape)
        fill(self, "ranges", geometry[1])
        fill(self, "geometry", geometry)
        fill(self, "start", start)
        fill(self, "stop", stop)
        fill(self, "numel", math.prod(shape))
        fill(self, "local_numel", stop - start)
        fill(self, "strides", _row_major(shape))

    @property
    def derived(self) -> ShardSpec:
        """The same geometry for anything that is not the parameter itself; see Note [spec identity]."""
        if self.dirty is None:
            return self
        made: ShardSpec | None = self.__dict__.get("_derived")
        if made is None:
            made = replace(self, dirty=None, receive=None, notes=None, geometry=self.geometry)
            object.__setattr__(self, "_derived", made)
        return made

    def reshaped(self, shape: torch.Size) -> ShardSpec:
        """The spec of a row-major view with another shape: the flat range is the same one."""
        made: dict[torch.Size, ShardSpec] = self.__dict__.setdefault("_reshaped", {})
        if shape not in made:
            made[shape] = replace(self, shape=shape, global_spec=None, geometry=None)
        return made[shape]

    def stretched(self, shape: torch.Size, numerator: int, denominator: int) -> ShardSpec:
        """The spec after every element became `numerator / denominator` elements (complex seen as real, and back)."""
        ranges = tuple((a * numerator // denominator, b * numerator // denominator) for a, b in self.ranges)
        return replace(self, shape=shape, ranges=ranges, global_spec=None, geometry=None)

    def same(self, other: ShardSpec) -> bool:
        """Do both describe the same elements of tensors of one shape?"""
        return self is other or self.geometry is other.geometry or self.geometry == other.geometry

    @property
    def detached(self) -> bool:
        """A piece that has lost its group (it was pickled): elementwise work only."""
        return self.group is None and len(self.ranges) > 1

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """All groups over which the elements lie, innermost first. Raises if the pieces cannot be reached."""
        if self.detached:
            raise StateError(
                f"`{self.name}` (shape {tuple(self.shape)}, elements [{self.start}, {self.stop})) was loaded from a "
                f"file and knows no process group, so its other {len(self.ranges) - 1} pieces cannot be reached. Copy "
                "it into the live parameter first: `param.copy_(loaded)` or `model.load_state_dict(...)`."
            )
        return self.outer if self.group is None else (self.group, *self.outer)

    @property
    def total_numel(self) -> int:
        """Elements over all groups: of the larger tensor where the parameter is a part of one."""
        if self.global_spec is not None:
            return self.global_spec.numel
        return self.numel * math.prod(group.size() for group in self.outer)

    def describe(self) -> str:
        """For messages: the name, the shape and what lies here."""
        return (
            f"`{self.name}` (shape {tuple(self.shape)}; rank {self.index} of {len(self.ranges)} holds elements "
            f"[{self.start}, {self.stop}) of {self.numel})"
        )

    def boxes(self) -> list[Box]:
        """The local range as boxes, each contiguous in flat order, at most 2 * ndim - 1 of them."""
        return flat_boxes(tuple(self.shape), self.start, self.stop)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardSpec):
            return NotImplemented
        return self.same(other) and self.group is other.group and self.outer == other.outer

    def __hash__(self) -> int:
        return hash((self.shape, self.start, self.stop))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        return self  # a process group cannot be copied, and nothing here changes

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSpec, (self.name, self.shape, self.ranges, self.index, None, (), self.global_spec)


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut the flat range [start, stop) of a row-major tensor into boxes that are contiguous in flat order.

    Part of a first row, whole rows, part of a last row; the two parts are cut the same way one dim further in.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row_numel = math.prod(shape[1:])

    def in_one_row(lo: int, hi: int) -> list[Box]:
        row = lo // row_numel
        inner = flat_boxes(shape[1:], lo - row * row_numel, hi - row * row_numel)
        return [Box((row, *box.offset), (1, *box.sizes)) for box in inner]

    first_whole, end_whole = -(-start // row_numel), stop // row_numel  # rows that lie wholly inside
    if first_whole > end_whole:
        return in_one_row(start, stop)
    boxes = in_one_row(start, first_whole * row_numel)
    if first_whole < end_whole:
        boxes.append(Box((first_whole, *(0 for _ in shape[1:])), (end_whole - first_whole, *shape[1:])))
    return boxes + in_one_row(end_whole * row_numel, stop)
