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


@dataclass
class Matched:
    """What is to be read into a model."""

    transfers: list[Transfer] = field(default_factory=list)
    stored_names: dict[str, str] = field(default_factory=dict)  # parameter -> its name in the checkpoint
    copies: list[tuple[str, str, Transfer]] = field(default_factory=list)  # a second stored value of a tied parameter
    differences: Differences = field(default_factory=Differences)


def match(source: Source, held: Sequence[Held], ties: dict[str, str], wholes: Sequence[Whole]) -> Matched:
    """Pair everything in the model with what is stored; local and the same on every rank."""
    found, used = Matched(), set()
    further: dict[str, list[str]] = {}
    for other, name in ties.items():
        further.setdefault(name, []).append(other)
    targets = [(h.name, tuple(h.spec.shape), h.local, h.owned[0]) for h in held]
    targets += [(w.name, tuple(w.values.shape), w.values.view(-1), 0) for w in wholes]
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
        found.transfers.append(Transfer(stored, start, into))
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
