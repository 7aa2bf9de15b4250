"""Checksums are CRC-32, whoever computes them."""

from __future__ import annotations

import importlib
import random
import sys
import zlib

import pytest

from lamina.checkpoint import checksums


@pytest.mark.parametrize("has_isal", [True, False])
def test_the_sum_is_zlibs(has_isal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_isal:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    module = importlib.reload(checksums)
    assert (module.crc32 is zlib.crc32) != has_isal
    data = memoryview(random.Random(0).randbytes(200_000))
    for length in (0, 1, 5, 4096, 65_537, 200_000):
        for begin in (0, 1, 0xFFFFFFFF):
            assert module.crc32(data[:length], begin) == zlib.crc32(data[:length], begin)
    monkeypatch.undo()
    importlib.reload(checksums)
