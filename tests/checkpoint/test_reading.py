"""In which order files are read, and how often: what is read twice must come from the page cache as far as it can."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from torch import Tensor

import lamina
from checkpoint.training import UNITS, build, make_optimizer, train
from harness import run_ranks
from lamina.checkpoint import source
from lamina.checkpoint.datafile import DataFile

WINDOW_BYTES = 1024


def save_there(path: str) -> None:
    model = lamina.shard(build(), "zero3", units=UNITS)
    optimizer = make_optimizer("torch", model)
    train(model, optimizer, range(1))
    lamina.save(path, model, optimizer)


Call = tuple[str, str, int, int]


def read_recorded(path: str, is_new: bool) -> tuple[list[Call], int, int]:
    """The calls of a load (which, file, first and last byte), how often a block was read whole, and how many there are.

    Args:
        is_new: whether the optimizer has no states yet.
    """
    model = lamina.shard(build(), "zero3", units=UNITS)
    optimizer = make_optimizer("torch", model)
    if not is_new:
        train(model, optimizer, range(1))
    calls: list[Call] = []
    files, whole = dict[str, DataFile](), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "WINDOW_BYTES", WINDOW_BYTES)
        read_block = DataFile._read_block
        patch.setattr(
            DataFile, "_read_block", lambda file, *a, **k: (whole.append(file.path), read_block(file, *a, **k))
        )
        inside = []  # one of these calls another one

        def record(name: str) -> None:
            method = getattr(DataFile, name)

            def act(file: DataFile, key: str, start: int, wanted: int | Tensor, *rest: object) -> None:
                files[file.path.name] = file
                count = wanted.numel() if isinstance(wanted, Tensor) else wanted - start
                if not inside and key.startswith(("model/", "optimizer/")):
                    begin, end = file.position(key, start), file.position(key, start + count)
                    calls.append((name, file.path.name, begin, end))
                inside.append(name)
                try:
                    method(file, key, start, wanted, *rest)
                finally:
                    inside.pop()

            patch.setattr(DataFile, name, act)

        for name in ("check", "read_checked", "read"):
            record(name)
        lamina.load(path, model, optimizer)
    return calls, len(whole), sum(len(file._crcs) for file in files.values())


def test_verified_from_the_end_and_read_from_the_beginning(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    run_ranks(2, save_there, path)
    for is_new in (False, True):
        calls, read_whole, blocks = run_ranks(1, read_recorded, path, is_new)[0]
        first = [(file, begin) for name, file, begin, _ in calls if name != "read"]
        second = [(file, begin) for name, file, begin, _ in calls if name == "read"]
        windows = [(file, begin // WINDOW_BYTES) for file, begin in first]
        assert windows == sorted(windows, reverse=True) and len(set(windows)) > 5
        assert all(a < b for a, b in pairwise(first) if a[1] // WINDOW_BYTES == b[1] // WINDOW_BYTES)
        assert second == sorted(second)
        assert all(begin // WINDOW_BYTES == (end - 1) // WINDOW_BYTES for _, _, begin, end in calls)
        assert (len(second) < len(first)) is is_new  # states that nobody has yet are read once
        assert read_whole == blocks  # each once, however many tensors lie in it
