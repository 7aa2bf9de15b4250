"""What a checkpoint holds against what the model wants: names, shapes, kinds; all differences in one message.

`load_state_dict` raises on the rank that it runs on and says shapes of shards. Here the comparison is of full shapes,
made before anything is read, the same on all ranks, and names of tied parameters stand for one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.checkpoint.contents import Held, Whole
from lamina.checkpoint.datafile import as_bytes
from lamina.checkpoint.source import Source, Stored, Transfer
from lamina.errors import CheckpointError

_LISTED = 40  # names of each kind in a message


@dataclass
class Differences:
    """Names by kind of difference, each list in the order of the model or the checkpoint."""

    missing: list[str] = field(default_factory=list)  # wanted, not in the checkpoint
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, not wanted
    shape: list[str] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.missing, self.unexpected, self.shape, self.kind, self.other))

    def __str__(self) -> str:
        named = {"missing": self.missing, "unexpected": self.unexpected, "shape": self.shape, "dtype": self.kind}
        parts = [f"{word}: {some(names)}" for word, names in named.items() if names]
        return "; ".join(parts + self.other)

    def raise_if_any(self, what: str, remedy: str) -> None:
        if self:
            raise CheckpointError(f"{what}: {self}. {remedy}")


def some(names: Sequence[str]) -> str:
    """Not all of ten thousand."""
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


@dataclass(frozen=True)
class Strided:
    """A buffer whose elements do not lie one after the other: a transposed one, or one that was expanded."""

    name: str
    place: Tensor  # the buffer's memory
    transfer: Transfer  # into a 1-D tensor that nobody else has

    def check(self) -> None:
        """Elements that share memory must have been saved with one value."""
        read, once = self.transfer.into.view(self.place.shape), self._once(self.transfer.into.view(self.place.shape))
        if not torch.equal(as_bytes(read), as_bytes(once.expand_as(read))):
            raise CheckpointError(
                f"buffer `{self.name}` is an expanded tensor here, and its elements differ in the checkpoint: give the "
                "model a buffer with memory for each of them (`.clone()`)"
            )

    def copy(self) -> None:
        self._once(self.place).copy_(self._once(self.transfer.into.view(self.place.shape)))

    def _once(self, values: Tensor) -> Tensor:
        """The first element of each dim along which the buffer repeats itself."""
        for dim, stride in enumerate(self.place.stride()):
            values = values.narrow(dim, 0, 1) if stride == 0 and values.shape[dim] > 1 else values
        return values


@dataclass
class Matched:
    """What is to be read into a model."""

    transfers: list[Transfer] = field(default_factory=list)
    stored_names: dict[str, str] = field(default_factory=dict)  # parameter -> its name in the checkpoint
    copies: list[tuple[str, str, Transfer]] = field(default_factory=list)  # a second stored value of a tied parameter
    strided: list[Strided] = field(default_factory=list)  # read into memory of their own, then copied
    differences: Differences = field(default_factory=Differences)


def match(source: Source, held: Sequence[Held], ties: dict[str, str], wholes: Sequence[Whole]) -> Matched:
    """Pair everything in the model with what is stored; local and the same on every rank."""
    found, used = Matched(), set()
    further: dict[str, list[str]] = {}
    for other, name in ties.items():
        further.setdefault(name, []).append(other)
    targets = [(h.name, tuple(h.spec.shape), h.local, h.owned[0]) for h in held]
    plain = {w.name: w.values if w.values.is_contiguous() else w.values.new_empty(w.values.shape) for w in wholes}
    targets += [(name, tuple(values.shape), values.view(-1), 0) for name, values in plain.items()]
    strided = {w.name: w.values for w in wholes if plain[w.name] is not w.values}
    for name, shape, into, start in targets:
        candidates = [source.ties.get(n, n) for n in (name, *further.get(name, ()))]
        stored_names = [n for n in dict.fromkeys(candidates) if n in source.tensors]
        used.update(stored_names)
        if not stored_names:
            found.differences.missing.append(name)
            continue
        first, *others = stored_names
        stored = source.tensors[first]
        if not _fits(name, stored, shape, into, found.differences):
            continue
        found.stored_names[name] = first
        transfer = Transfer(stored, start, into)
        if name in strided:
            found.strided.append(Strided(name, strided[name], transfer))
            continue
        found.transfers.append(transfer)
        for other in others:
            found.copies.append((first, other, Transfer(source.tensors[other], start, into)))
    found.differences.unexpected += [name for name in source.tensors if name not in used]
    return found


def _fits(name: str, stored: Stored, shape: tuple[int, ...], into: Tensor, differences: Differences) -> bool:
    if stored.shape != shape:
        differences.shape.append(f"{name} got {stored.shape} want {shape}")
        return False
    if kind_of(stored.dtype) != kind_of(into.dtype):
        differences.kind.append(f"{name} got {stored.dtype} want {into.dtype}")
        return False
    return True


def kind_of(dtype: torch.dtype) -> str:
    """Values are cast within a kind, and never into another one."""
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype is torch.bool else "integer"


def check_copies(source: Source, matched: Matched, staging: Tensor) -> None:
    """Parameters that are one in this model and were two when it was saved must have been equal."""
    for first, other, transfer in matched.copies:
        one = next(t for t in matched.transfers if t.into is transfer.into)
        a, b = torch.empty_like(transfer.into), torch.empty_like(transfer.into)
        source.transfer([one._replace(into=a)], staging)
        source.transfer([transfer._replace(into=b)], staging)
        if transfer.stored.shape != one.stored.shape or not torch.equal(a, b):
            raise CheckpointError(
                f"`{first}` and `{other}` are one parameter in this model and have different values in {source.where}: "
                "untie them in the model, or take one of the two out of the checkpoint"
            )
