"""CRC-32, and how much of a machine checks it.

zlib's takes longer than reading does: 150 us a MiB on the machine of benchmarks/checkpoint (reading: 35, `isal`: 17).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine; the sums are the same
    from zlib import crc32

MOST_THREADS = 4
_FEW_BLOCKS = 4  # a thread is not worth its start for less


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
