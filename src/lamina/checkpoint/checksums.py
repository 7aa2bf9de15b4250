"""CRC-32, and how much of a machine checks it.

zlib's takes longer than reading does: 150 us a MiB on the machine of benchmarks/checkpoint (reading: 35). numpy gets
the same sum in 60 (Note [folding]). `isal` is faster still: it is used where it is installed (`pip
install isal`), and nothing depends on it.

Note [folding]
    A CRC is the remainder of the message, a polynomial over GF(2), by a generator P of degree 32. P divides
    x^N + x^A + 1 for each N and A below, hence also its 8th power x^8N + x^8A + 1: a byte may be taken away where it
    stands if it is added (XOR) N bytes and N - A bytes further on, and the remainder is the same. So all but the last N
    bytes go by two XORs of long runs of bytes, for which a core uses all of its width; zlib divides what is left.
    Folding is known from CRC by carry-less products (Gopal et al., Intel 2009); a trinomial needs no products.
"""

from __future__ import annotations

import importlib
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_THREADS = 4
TRINOMIALS = ((130360, 24749), (91639, 41678))  # N and A, of 114 pairs with N < 2^20: longest runs, then the least N
_FOLDED_BYTES = 1 << 20  # at a time: with its copy it stays in a core's cache
_WORTH_BYTES = 2 * TRINOMIALS[0][0]  # zlib alone is as fast for less
_FEW_BLOCKS = 4  # a thread is not worth its start for less


class _Scratch(threading.local):
    """A thread's own copy of what it folds."""

    def __init__(self) -> None:
        self.data = np.empty(_FOLDED_BYTES, dtype=np.uint8)


_SCRATCH = _Scratch()


def folded_crc32(data: memoryview | bytes, crc: int = 0) -> int:
    """`zlib.crc32(data, crc)`."""
    whole: npt.NDArray[Any] = np.frombuffer(data, dtype=np.uint8)
    for start in range(0, len(whole), _FOLDED_BYTES):
        part = whole[start : start + _FOLDED_BYTES]
        if len(part) < _WORTH_BYTES:
            return zlib.crc32(part.data, crc)
        copy = _SCRATCH.data[: len(part)]
        np.copyto(copy, part)
        crc = _fold(copy, crc)
    return crc


def _fold(data: npt.NDArray[Any], crc: int) -> int:
    """`zlib.crc32(data, crc)` of at least `_WORTH_BYTES` of 1-D uint8, which are overwritten."""
    data[:4] ^= np.frombuffer((crc ^ 0xFFFFFFFF).to_bytes(4, "little"), dtype=np.uint8)
    at = 0  # what lies before has been folded away
    for far, middle in TRINOMIALS:
        end = len(data) - far
        while at < end:
            gone = data[at : min(at + far - middle, end)]
            for distance in (far - middle, far):
                into = data[at + distance : at + distance + len(gone)]
                np.bitwise_xor(into, gone, out=into)
            at += len(gone)
    return zlib.crc32(data[at:].data, 0xFFFFFFFF)  # zlib inverts the sum as it begins, which has been done


def _fastest() -> Callable[..., int]:
    try:
        found: Callable[..., int] = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32 if "zlib-ng" in zlib.ZLIB_RUNTIME_VERSION else folded_crc32
    return found


crc32 = _fastest()


def crc32_of_spare(data: memoryview) -> int:
    """`crc32(data)`, where nobody needs the data afterwards: it may be overwritten."""
    if crc32 is not folded_crc32 or len(data) < _WORTH_BYTES:
        return crc32(data)
    return _fold(np.frombuffer(data, dtype=np.uint8), 0)


class BlockSums:
    """CRC-32 of each block of a stream that comes in chunks of any length."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._whole: list[int] = []
        self._crc, self._filled_bytes = 0, 0

    def add(self, chunk: memoryview) -> None:
        while chunk:
            part = chunk[: self._block_bytes - self._filled_bytes]
            self._crc = crc32(part, self._crc)
            self._filled_bytes += len(part)
            if self._filled_bytes == self._block_bytes:
                self._whole.append(self._crc)
                self._crc, self._filled_bytes = 0, 0
            chunk = chunk[len(part) :]

    def finish(self) -> list[int]:
        return self._whole + ([self._crc] if self._filled_bytes else [])


def threads_for(world: int) -> int:
    """This rank's part of the cores, as if all ranks were on this machine."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // max(world, 1)))


def for_each(blocks: Sequence[int], act: Callable[[int, int], None], threads: int) -> None:
    """`act(block, thread)` for every block; raises the first error. Reading and summing need no interpreter lock."""
    threads = min(threads, len(blocks) // _FEW_BLOCKS)
    if threads <= 1:
        for block in blocks:
            act(block, 0)
        return

    def run(thread: int) -> None:
        for block in blocks[thread::threads]:
            act(block, thread)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
