"""Where values to be loaded come from: tensors by name, each as ranges of files that can be read one by one.

torch.distributed.checkpoint reads with a plan per rank that must fit what the plan of the save put together. Here a
stored tensor is a list of flat ranges, so what a rank needs of it is an intersection of ranges, whatever wrote it: this
rank's part of a parameter is read from wherever it lies, and nothing else is.

Note [order of reading]
    What is verified and read a second time may be more than the page cache holds. A disk wants to be read as files lie,
    and the cache forgets first what was read first. So files are verified from the last window to the first, each
    window forwards, and then read from the first to the last: as much as the cache can hold of it, it has. The end of
    what has just been saved is met first, too.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lamina.checkpoint import folders
from lamina.checkpoint.checksums import threads_for
from lamina.checkpoint.datafile import BLOCK_BYTES, DataFile
from lamina.checkpoint.manifest import (
    Manifest,
    OptimizerEntry,
    Piece,
    WholeEntry,
    buffer_key,
    parameter_key,
    state_key,
)
from lamina.checkpoint.values import decode, dtype_of
from lamina.errors import CheckpointError, LaminaError

WINDOW_BYTES = 64 * BLOCK_BYTES  # far more than a system reads ahead


class StoredPiece(NamedTuple):
    """Elements [start, stop) of a tensor: all of what `key` is in file number `file`, or from `skip` on."""

    file: int
    key: str
    start: int
    stop: int
    skip: int = 0


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]  # in order, cover the tensor once

    def between(self, start: int, stop: int) -> Iterator[tuple[StoredPiece, int, int]]:
        """The pieces that hold elements of [start, stop), and which."""
        if start >= stop:
            return
        first = bisect.bisect_right(self.pieces, start, key=lambda piece: piece.stop)
        for piece in self.pieces[first:]:
            if piece.start >= stop:
                return
            yield piece, max(piece.start, start), min(piece.stop, stop)


class Readable(Protocol):
    """A file that can be read by ranges of its keys; `DataFile` is one."""

    def position(self, key: str, start: int) -> int: ...

    def check(self, key: str, start: int, stop: int, staging: Tensor) -> None: ...

    def read(self, key: str, start: int, into: Tensor, staging: Tensor) -> None: ...


class Transfer(NamedTuple):
    """Elements of a stored tensor, from `start` on, and where they go."""

    stored: Stored
    start: int
    into: Tensor  # 1-D, contiguous

    def parts(self) -> Iterator[tuple[StoredPiece, int, Tensor]]:
        """By piece: its first wanted element, and the place for it. Complex numbers are stored as pairs of reals."""
        stored, first, into = self
        scale = 2 if stored.dtype.is_complex else 1
        for piece, a, b in stored.between(first, first + into.numel()):
            place = into[a - first : b - first]
            yield (
                piece,
                scale * (a + piece.skip - piece.start),
                torch.view_as_real(place).view(-1) if scale == 2 else place,
            )


class Part(NamedTuple):
    """Elements of a key that are wanted, from `start` on; all in one window."""

    file: int
    position_bytes: int  # in the data of the file
    key: str
    start: int
    into: Tensor  # 1D

    @property
    def window(self) -> tuple[int, int]:
        return self.file, self.position_bytes // WINDOW_BYTES


class Source:
    """A checkpoint, open for reading. Base of one class a format."""

    where: Path
    tensors: dict[str, Stored]  # parameters and buffers
    ties: dict[str, str]  # further names -> the name in `tensors`
    optimizer: OptimizerEntry | None = None

    def open_file(self, number: int) -> Readable:
        raise NotImplementedError

    def state(self, name: str, key: str) -> Stored:
        """Optimizer state `key` of the parameter that is stored as `name`."""
        raise NotImplementedError

    def has_same_ranks(self, name: str, pieces: tuple[Piece, ...] | None) -> bool:
        """Whether what each rank has kept of a parameter, whose pieces are these now, is of use to the same rank."""
        return True

    def beside(self, rank: int, world: int, staging: Tensor) -> dict[str, Any]:
        """What was saved beside the model: "extra", "modules" and, for a rank of the same world, "random"."""
        return {"extra": None, "modules": {}}

    _files: dict[int, Readable]

    def file(self, number: int) -> Readable:
        """Opened once, and checked as far as it can be without reading its data."""
        if number not in self._files:
            self._files[number] = self.open_file(number)
        return self._files[number]

    def verify(self, transfers: Sequence[Transfer], staging: Tensor, fresh: Sequence[Transfer] = ()) -> None:
        """Read all that is going to be used and compare its checksums, if it has some: Note [order of reading].

        Args:
            transfers: what is read a second time, by `transfer`.
            fresh: for places that nobody looks at if this raises: they are filled on the way.
        """
        for part in self.parts_of(transfers):
            self.file(part.file).check(part.key, part.start, part.start + part.into.numel(), staging)
        self.transfer(fresh, staging)

    def transfer(self, transfers: Sequence[Transfer], staging: Tensor) -> None:
        """Copy what is wanted into its place."""
        for part in self.parts_of(transfers):
            self.file(part.file).read(part.key, part.start, part.into, staging)

    def parts_of(self, transfers: Sequence[Transfer]) -> list[Part]:
        """All that is wanted, as it lies in the files."""
        found = []
        for transfer in transfers:
            item_bytes = transfer.stored.dtype.itemsize // (2 if transfer.stored.dtype.is_complex else 1)
            for piece, at, into in transfer.parts():
                position_bytes = self.file(piece.file).position(piece.key, at)
                while into.numel():
                    room_bytes = WINDOW_BYTES - position_bytes % WINDOW_BYTES
                    head, into = into[: max(1, room_bytes // item_bytes)], into[max(1, room_bytes // item_bytes) :]
                    found.append(Part(piece.file, position_bytes, piece.key, at, head))
                    at, position_bytes = at + head.numel(), position_bytes + head.numel() * item_bytes
        return sorted(found, key=lambda part: part[:2])


class LaminaSource(Source):
    """A folder that `lamina.save` wrote, as one rank of a world sees it."""

    def __init__(self, where: Path, rank: int = 0, world: int = 0) -> None:
        self.where, self._files = where, {}
        self._threads = threads_for(world)
        self.manifest: Manifest = folders.read_manifest(where)
        # what differs over ranks: each its own where there are as many as before, else the first one's
        self._is_same_world = world == self.manifest.world
        self._own = rank if self._is_same_world else 0
        self.ties = self.manifest.ties
        self.optimizer = self.manifest.optimizer
        self.tensors = {
            name: Stored(
                p.shape, dtype_of(p.dtype), tuple(StoredPiece(f, parameter_key(name), a, b) for f, a, b in p.pieces)
            )
            for name, p in self.manifest.parameters.items()
        }
        self.tensors |= {name: self._whole(entry, buffer_key(name)) for name, entry in self.manifest.buffers.items()}

    def _whole(self, entry: WholeEntry, key: str) -> Stored:
        file = self._own if entry.file is None else entry.file
        shape = entry.shape if entry.file is not None else self._own_shape(entry, key)
        numel = math.prod(shape)
        return Stored(shape, dtype_of(entry.dtype), (StoredPiece(file, key, 0, numel),) if numel else ())

    def _own_shape(self, entry: WholeEntry, key: str) -> tuple[int, ...]:
        """The manifest has the first rank's; what is empty is not in a file."""
        file = self.file(self._own)
        assert isinstance(file, DataFile)
        if key not in file.placed:
            return entry.shape if entry.numel == 0 else (0,)
        return entry.shape if dtype_of(entry.dtype).is_complex else file.placed[key].shape

    def has_same_ranks(self, name: str, pieces: tuple[Piece, ...] | None) -> bool:
        before = self.manifest.parameters.get(name)
        return self._is_same_world and (None if before is None else before.pieces) == pieces

    def state(self, name: str, key: str) -> Stored:
        assert self.optimizer is not None
        entry, stored = self.optimizer.states[name], state_key(key, name)
        if key in entry.whole:
            return self._whole(entry.whole[key], stored)
        pieces = tuple(piece._replace(key=stored) for piece in self.tensors[name].pieces)
        return Stored(self.tensors[name].shape, dtype_of(entry.split[key]), pieces)

    def open_file(self, number: int) -> DataFile:
        entry = self.manifest.files[number]
        return DataFile(self.where / entry.name, entry.size_bytes, entry.header_crc32, self._threads)

    def verify(self, transfers: Sequence[Transfer], staging: Tensor, fresh: Sequence[Transfer] = ()) -> None:
        parts = [(part, False) for part in self.parts_of(transfers)] + [(part, True) for part in self.parts_of(fresh)]
        parts.sort(key=lambda pair: pair[0].position_bytes)
        parts.sort(key=lambda pair: pair[0].window, reverse=True)  # stable
        for part, is_fresh in parts:
            file = self.file(part.file)
            assert isinstance(file, DataFile)
            if is_fresh:
                file.read_checked(part.key, part.start, part.into, staging)
            else:
                file.check(part.key, part.start, part.start + part.into.numel(), staging)

    def beside(self, rank: int, world: int, staging: Tensor) -> dict[str, Any]:
        shared = self.file(0 if self.manifest.extra == "shared" else self._own)
        assert isinstance(shared, DataFile)
        found = {what: _decoded(shared, what, staging) for what in ("extra", "modules")}
        if self.manifest.random and world == self.manifest.world:
            own = self.file(rank)
            assert isinstance(own, DataFile)
            found["random"] = _decoded(own, "random", staging)
        return found


def _decoded(file: DataFile, what: str, staging: Tensor) -> Any:
    """Raises what is damaged under its name; so too what pickle cannot make without the user's own classes."""
    try:
        return decode(json.loads(file.texts[what]), lambda number: file.tensor(f"{what}/{number}", staging))
    except LaminaError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file.path}: what was saved as `{what}` cannot be read: {type(error).__name__}: {error}"
        ) from error
