"""Data files: safetensors, written as one stream and read by ranges, with a checksum for every block.

The safetensors library writes tensors that are all in memory and keeps no checksum. Here the header is laid out first,
the data follows in chunks of any origin, and the header, whose length does not depend on the checksums in it, is
written last. So a reader verifies only the blocks that it needs, and a file is readable with nothing but safetensors.

Note [file layout]
    8 bytes      length of the header, little endian
    header       JSON: keys -> dtype, shape, place; `__metadata__` holds texts, among them the blocks' CRC-32s
    data         tensors one after the other, wide dtypes first, so that each is aligned to its dtype
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.checkpoint.checksums import BlockSums, crc32, for_each
from lamina.checkpoint.special import refuse_special
from lamina.errors import CheckpointError, UsageError

BLOCK_BYTES = 1 << 20  # has a checksum of its own
STAGING_BYTES = 8 * BLOCK_BYTES  # what a stream holds in memory
DIRECT_BYTES = 1 << 16  # from this length on a system call costs less than a copy
CRCS, CRC_LENGTH = "crc32_blocks", "crc32_block_bytes"  # texts of `__metadata__`: 8 hexadecimal digits a block
_HEADER_ALIGNMENT_BYTES = 64

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PAIRS = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # safetensors has no complex numbers


class Item(NamedTuple):
    """One tensor of a file; `values` holds its elements, on any device."""

    key: str
    values: Tensor  # contiguous
    flat: bool = True  # whether the file shows it as 1-D


class Placed(NamedTuple):
    """Where a key lies in the data of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_byte: int
    stop_byte: int


@dataclass(frozen=True)
class Draft:
    """A file that is laid out and not written yet."""

    items: tuple[Item, ...]  # in the order of the data, none empty
    placed: dict[str, Placed]
    texts: dict[str, str]
    data_bytes: int

    def header(self, crcs: Sequence[int] | None = None) -> bytes:
        """The file's beginning; of the same length whatever the checksums are."""
        count = -(-self.data_bytes // BLOCK_BYTES)
        digits = "".join(f"{crc:08x}" for crc in (crcs if crcs is not None else [0] * count))
        return header_bytes(self.placed, {**self.texts, CRC_LENGTH: str(BLOCK_BYTES), CRCS: digits})


def header_bytes(placed: dict[str, Placed], texts: dict[str, str]) -> bytes:
    """Length and JSON header of a safetensors file, padded with spaces."""
    entries: dict[str, object] = {"__metadata__": texts}
    for key, place in placed.items():
        entries[key] = {
            "dtype": _NAMES[place.dtype],
            "shape": place.shape,
            "data_offsets": (place.start_byte, place.stop_byte),
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-(8 + len(text)) // _HEADER_ALIGNMENT_BYTES) * _HEADER_ALIGNMENT_BYTES - 8)
    return len(text).to_bytes(8, "little") + text


def lay_out(items: Iterable[Item], texts: dict[str, str]) -> Draft:
    """Place the items one after the other; empty ones are left out."""
    kept = [item for item in items if item.values.numel()]
    kept.sort(key=lambda item: -storable(item.values.dtype, item.key).itemsize)  # stable
    placed, end = {}, 0
    for item in kept:
        dtype, values = storable(item.values.dtype, item.key), item.values
        numel = values.numel() * values.element_size() // dtype.itemsize
        shape = (numel,) if item.flat or dtype is not values.dtype else tuple(values.shape)
        assert item.key not in placed, f"two tensors are named {item.key}"
        placed[item.key] = Placed(dtype, shape, end, end + numel * dtype.itemsize)
        end += numel * dtype.itemsize
    return Draft(tuple(kept), placed, texts, end)


def storable(dtype: torch.dtype, what: str) -> torch.dtype:
    """The dtype under which elements are stored."""
    dtype = _PAIRS.get(dtype, dtype)
    if dtype not in _NAMES:
        raise UsageError(f"`{what}` is {dtype}, which safetensors files cannot hold: cast it, or leave it out")
    return dtype


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 1-D uint8."""
    flat = tensor.detach().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def view_of(data: Tensor) -> memoryview:
    """The memory of a 1-D uint8 tensor on the host, for system calls."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


# -- writing


class Written(NamedTuple):
    size_bytes: int
    header_crc32: int


def write_file(path: Path, draft: Draft, chunks: Iterable[memoryview]) -> Written:
    """Write a new file and wait until the disk has it."""
    header_numel = len(draft.header())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        sums = BlockSums(BLOCK_BYTES)
        at = header_numel
        for chunk in chunks:
            for start in range(
                0, len(chunk), BLOCK_BYTES
            ):  # so long a part stays in a core's cache until it is written
                part = chunk[start : start + BLOCK_BYTES]
                sums.add(part)
                write_at(descriptor, part, at)
                at += len(part)
        assert at == header_numel + draft.data_bytes, (at, header_numel, draft.data_bytes)
        header = draft.header(sums.finish())
        write_at(descriptor, memoryview(header), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(at, crc32(header))


def write_at(descriptor: int, data: memoryview, at: int) -> None:
    """All of `data`; the system may take less at a time."""
    while data:
        done = os.pwrite(descriptor, data, at)
        data, at = data[done:], at + done


def stream(items: Sequence[Item], staging: Tensor) -> Iterator[memoryview]:
    """The data of a file; each chunk must be used before the next is asked for.

    What lies on the host is handed out as it lies. Small tensors, and those on a device, go through the buffer.
    """
    view, filled = view_of(staging), 0
    for item in items:
        source, taken = as_bytes(item.values), 0
        if source.device.type == "cpu" and source.numel() >= DIRECT_BYTES:
            if filled:
                yield view[:filled]
                filled = 0
            yield from slices(source)
            continue
        while taken < source.numel():
            step = min(source.numel() - taken, staging.numel() - filled)
            staging[filled : filled + step].copy_(source[taken : taken + step])
            taken, filled = taken + step, filled + step
            if filled == staging.numel():
                yield view
                filled = 0
    if filled:
        yield view[:filled]


def slices(image: Tensor) -> Iterator[memoryview]:
    """The data of a file that lies in memory already (1-D uint8)."""
    view = view_of(image)
    for start in range(0, len(view), STAGING_BYTES):
        yield view[start : start + STAGING_BYTES]


# -- reading


class DataFile:
    """One data file, open for reading by ranges.

    Args:
        path: the file.
        size_bytes, header_crc32: what a manifest says of it; None: the file is of another origin.
        threads: how many compare checksums.
    """

    def __init__(
        self, path: Path, size_bytes: int | None = None, header_crc32: str | None = None, threads: int = 1
    ) -> None:
        self.path, self._threads = path, threads
        refuse_special(path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. {_ANOTHER}") from error
        try:
            self._read_header(size_bytes, header_crc32)
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise
        self._verified = bytearray(len(self._crcs))

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def _read_header(self, size_bytes: int | None, header_crc32: str | None) -> None:
        actual_bytes = os.fstat(self._descriptor).st_size
        if size_bytes is not None and actual_bytes != size_bytes:
            raise CheckpointError(
                f"{self.path} has {actual_bytes} bytes, and the manifest says {size_bytes}. {_ANOTHER}"
            )
        beginning = os.pread(self._descriptor, 8, 0)
        length = int.from_bytes(beginning, "little")
        if len(beginning) < 8 or 8 + length > actual_bytes:
            raise CheckpointError(
                f"{self.path} is cut off: it has {actual_bytes} bytes and no whole header. {_ANOTHER}"
            )
        text = os.pread(self._descriptor, length, 8)
        crc = f"{crc32(beginning + text):08x}"
        if header_crc32 is not None and crc != header_crc32:
            raise CheckpointError(
                f"the header of {self.path} is damaged: its checksum is {crc}, not {header_crc32}. {_ANOTHER}"
            )
        self._data_at = 8 + length
        self._data_bytes = actual_bytes - self._data_at
        try:
            entries = json.loads(text)
            self.texts: dict[str, str] = entries.pop("__metadata__", {})
            self.placed = {
                key: Placed(_DTYPES[e["dtype"]], tuple(e["shape"]), *e["data_offsets"]) for key, e in entries.items()
            }
            self._check_header()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the header of {self.path} is damaged or unknown: {error!r}. {_ANOTHER}") from error
        end_bytes = max((place.stop_byte for place in self.placed.values()), default=0)
        if end_bytes > self._data_bytes:
            raise CheckpointError(f"{self.path} is cut off: its tensors need {end_bytes} bytes. {_ANOTHER}")

    def _check_header(self) -> None:
        """ValueError where the entries contradict one another."""
        for key, (dtype, shape, start_byte, stop_byte) in self.placed.items():
            if not all(type(size) is int and size >= 0 for size in (*shape, start_byte, stop_byte)):
                raise ValueError(f"{key}: shape {shape}, bytes {start_byte} to {stop_byte}")
            if math.prod(shape) * dtype.itemsize != stop_byte - start_byte:
                raise ValueError(f"{key}: shape {shape} of {dtype} in bytes {start_byte} to {stop_byte}")
        if not all(isinstance(text, str) for text in self.texts.values()):
            raise ValueError("texts that are no text")
        digits, self._block_bytes = self.texts.get(CRCS, ""), int(self.texts.get(CRC_LENGTH, BLOCK_BYTES))
        if not 0 < self._block_bytes <= STAGING_BYTES:
            raise ValueError(f"blocks of {self._block_bytes} bytes: a newer lamina wrote it")
        self._crcs = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
        if CRCS in self.texts and len(self._crcs) != -(-self._data_bytes // self._block_bytes):
            raise ValueError(f"{len(self._crcs)} checksums for {self._data_bytes} bytes")

    def place(self, key: str, stop: int = 0) -> Placed:
        """Where a key lies, which has at least `stop` elements."""
        if key not in self.placed:
            raise CheckpointError(f"{self.path} does not hold `{key}`, which the manifest places there. {_ANOTHER}")
        place = self.placed[key]
        if place.start_byte + stop * place.dtype.itemsize > place.stop_byte:
            raise CheckpointError(f"{self.path} holds less of `{key}` than the manifest says. {_ANOTHER}")
        return place

    def position(self, key: str, start: int) -> int:
        """Where element `start` of a stored tensor lies in the data, in bytes."""
        place = self.place(key, start)
        return place.start_byte + start * place.dtype.itemsize

    def check(self, key: str, start: int, stop: int, staging: Tensor) -> None:
        """Compare the checksums of all blocks that hold elements [start, stop) of a stored tensor; each block once.

        Files of another origin have no checksums: there, this says only that the key and the bytes exist.
        """
        place = self.place(key, stop)
        item_bytes = place.dtype.itemsize
        self._verify(place.start_byte + start * item_bytes, place.start_byte + stop * item_bytes, staging)

    def verify_all(self, staging: Tensor) -> int:
        """Compare the checksums of all blocks; returns the bytes of data."""
        self._verify(0, self._data_bytes, staging)
        return self._data_bytes

    def _verify(self, start_byte: int, stop_byte: int, staging: Tensor) -> None:
        """Block by block: one fits into a core's cache, so that it is fetched from memory once."""
        blocks = [block for block in self._blocks(start_byte, stop_byte) if not self._verified[block]]
        rooms = self._rooms(staging)
        for_each(blocks, lambda block, thread: self._read_block(block, rooms[thread]), len(rooms))

    def _blocks(self, start_byte: int, stop_byte: int) -> range:
        return range(start_byte // self._block_bytes, min(-(-stop_byte // self._block_bytes), len(self._crcs)))

    def _rooms(self, staging: Tensor) -> list[Tensor]:
        """A place for one block for each thread."""
        length = self._block_bytes
        return [staging[i * length : (i + 1) * length] for i in range(min(self._threads, staging.numel() // length))]

    def _read_block(self, block: int, into: Tensor) -> None:
        """The whole block, compared with its checksum."""
        at = block * self._block_bytes
        data = view_of(into)[: self._data_bytes - at]
        self.read_bytes(at, data)
        if crc32(data) != self._crcs[block]:
            at += self._data_at
            raise CheckpointError(
                f"{self.path} is damaged: bytes {at} to {at + len(data)} have another checksum than when they "
                f"were written. {_ANOTHER}"
            )
        self._verified[block] = 1

    def read_bytes(self, at: int, into: memoryview) -> None:
        """Fill `into` from byte `at` of the data."""
        while into:
            done = os.preadv(self._descriptor, [into], self._data_at + at)
            if done == 0:
                raise CheckpointError(f"{self.path} ends at byte {self._data_at + at} while it is read. {_ANOTHER}")
            at, into = at + done, into[done:]

    def read(self, key: str, start: int, into: Tensor, staging: Tensor) -> None:
        """Elements from `start` of a stored tensor into `into` (1-D), cast to its dtype, through the staging buffer."""
        place = self.place(key, start + into.numel())
        stored = place.dtype
        if into.dtype is stored and into.device.type == "cpu" and into.is_contiguous():
            if into.numel():
                self.read_bytes(place.start_byte + start * stored.itemsize, view_of(as_bytes(into)))
            return
        room_numel = staging.numel() // stored.itemsize
        for at in range(0, into.numel(), room_numel):
            part = into[at : at + room_numel]
            data = staging[: part.numel() * stored.itemsize]
            self.read_bytes(place.start_byte + (start + at) * stored.itemsize, view_of(data))
            part.copy_(data.view(stored))

    def read_checked(self, key: str, start: int, into: Tensor, staging: Tensor) -> None:
        """`check` and `read` in one pass: for memory that nobody has yet, and nobody gets if a checksum is wrong."""
        place = self.place(key, start + into.numel())
        stored = place.dtype
        begin = place.start_byte + start * stored.itemsize
        end, rooms = begin + into.numel() * stored.itemsize, self._rooms(staging)
        is_plain = into.dtype is stored and into.device.type == "cpu" and into.is_contiguous()
        if not is_plain:  # a copy must keep to the stream of the thread that asks
            rooms = rooms[:1]
        if not self._crcs or not into.numel():
            self.check(key, start, start + into.numel(), staging)
            self.read(key, start, into, staging)
            return

        def act(block: int, thread: int) -> None:
            at = block * self._block_bytes
            a, b = max(begin, at), min(end, at + self._block_bytes)
            part = into[(a - begin) // stored.itemsize : (b - begin) // stored.itemsize]
            if self._verified[block]:  # by another tensor in it
                self.read(key, start + (a - begin) // stored.itemsize, part, rooms[thread])
            elif is_plain and b - a == min(self._block_bytes, self._data_bytes - at):
                self._read_block(block, as_bytes(part))
            else:
                self._read_block(block, rooms[thread])
                part.copy_(rooms[thread][a - at : b - at].view(stored))

        for_each(self._blocks(begin, end), act, len(rooms))

    def tensor(self, key: str, staging: Tensor) -> Tensor:
        """A whole stored tensor, verified."""
        place = self.place(key)
        self._verify(place.start_byte, place.stop_byte, staging)
        made = torch.empty(place.shape, dtype=place.dtype)
        self.read(key, 0, made.view(-1), staging)
        return made


_ANOTHER = "Load another checkpoint: `lamina.latest(folder)` names the newest complete one"
