"""CRC-32, and how much of a machine checks it.

zlib's takes as long as reading does. The same sum from `isal` is four times as fast: it is used where it is installed
(`pip install isal`), and nothing depends on it.
"""

from __future__ import annotations

import importlib
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS = 4
_FEW_BLOCKS = 4  # a thread is not worth its start for less


def _fastest() -> Callable[..., int]:
    try:
        found: Callable[..., int] = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return found


crc32 = _fastest()


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
