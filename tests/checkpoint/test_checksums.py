"""CRC-32 by folding is zlib's, for every length, start and thread, and leaves the data alone."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lamina.checkpoint import checksums

POLYNOMIAL = 0x104C11DB7  # of CRC-32, highest power first


def power_of_x(exponent: int) -> int:
    """x^exponent modulo the polynomial."""
    value = 1
    for _ in range(exponent):
        value <<= 1
        value ^= POLYNOMIAL if value >> 32 else 0
    return value


def test_what_is_folded_away_has_no_remainder() -> None:
    for far, middle in checksums.TRINOMIALS:
        assert power_of_x(far) == power_of_x(middle) ^ 1


def test_the_sum_is_zlibs() -> None:
    draw, made = random.Random(0), np.random.default_rng(0)
    worth, block = checksums._WORTH_BYTES, checksums._FOLDED_BYTES
    lengths = [
        0,
        1,
        4,
        worth - 1,
        worth,
        worth + 1,
        checksums.TRINOMIALS[0][0] * 3,
        block - 1,
        block,
        block + 1,
        3 * block,
    ]
    lengths += [block + worth, *(draw.randrange(2 * block) for _ in range(8))]
    for length in lengths:
        data, start = made.integers(256, size=length, dtype=np.uint8), draw.getrandbits(32)
        before = data.copy()
        for begin in (0, start, 0xFFFFFFFF):
            assert checksums.folded_crc32(data, begin) == zlib.crc32(data, begin), length
        assert np.array_equal(data, before)
        assert checksums.folded_crc32(bytes(data)) == zlib.crc32(data)
        assert checksums.crc32_of_spare(memoryview(data)) == zlib.crc32(before), length


def test_threads_do_not_meet() -> None:
    blocks = np.random.default_rng(1).integers(256, size=(24, checksums._FOLDED_BYTES), dtype=np.uint8)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(checksums.folded_crc32, blocks)) == list(map(zlib.crc32, blocks))
