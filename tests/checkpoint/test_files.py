"""The format without a model: values, manifests, data files, folders."""

from __future__ import annotations

import json
import os
import shutil
import time
import unittest.mock
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import lamina
from lamina.checkpoint import folders
from lamina.checkpoint.datafile import BLOCK_BYTES, STAGING_BYTES, DataFile, Item, lay_out, stream, write_file
from lamina.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    GroupEntry,
    Manifest,
    Moments,
    OptimizerEntry,
    ParameterEntry,
    Piece,
    StateEntry,
    WholeEntry,
    from_json,
    to_json,
)
from lamina.checkpoint.source import Stored, StoredPiece
from lamina.checkpoint.values import decode, encode

# -- values


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
KEYS = st.one_of(st.text(), st.just("$"), st.integers(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner), st.frozensets(st.integers())
    ),
    max_leaves=12,
)


def identical(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


def there_and_back(value: Any) -> Any:
    encoded = encode(value, "extra")
    return decode(json.loads(json.dumps(encoded.json)), encoded.tensors)


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_python_values_come_back(value: Any) -> None:
    assert identical(there_and_back(value), value)
    assert not encode(value, "extra").pickled


def test_other_values_come_back() -> None:
    value = {
        "tensors": (torch.arange(6.0).view(2, 3), torch.tensor(2 + 1j), torch.empty(0, 3, dtype=torch.bfloat16)),
        "numpy": [np.arange(4, dtype=np.uint32), np.float64(0.1), np.int8(3), np.array(5)],
        "infinite": [float("inf"), float("-inf")],
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "dtype": torch.float16,
        "set": {1, 2},
    }
    assert identical(there_and_back(value), value)
    assert encode(value, "extra").pickled == []
    assert there_and_back(float("nan")) != there_and_back(float("nan"))


def test_what_needs_pickle_is_named_and_what_it_cannot_do_is_refused() -> None:
    encoded = encode({"counts": Counter("aab")}, "extra")
    assert encoded.pickled == ["extra['counts']"] and decode(encoded.json) == {"counts": Counter("aab")}
    with pytest.raises(lamina.UsageError, match=r"extra\['f'\]\[0\] is a function"):
        encode({"f": [lambda: 0]}, "extra")


def test_small_tensors_inline_exactly() -> None:
    for value in (
        torch.tensor(0.1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([3, 2**62]),
        torch.tensor(True),
    ):
        encoded = encode(value, "lr", inline_tensors=True)
        assert not encoded.tensors and identical(decode(json.loads(json.dumps(encoded.json))), value)


# -- manifests


def manifest(created_ns: int = 1, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "world": 2,
        "strategy": "zero3",
        "created_ns": created_ns,
        "writer": {"lamina": "0", "torch": "2"},
        "files": (FileEntry("a.safetensors", 3, "00000000"), FileEntry("b.safetensors", 0, "00000000")),
        "parameters": {"w": ParameterEntry((2, 3), "float32", True, (Piece(0, 0, 4), Piece(1, 4, 6)))},
        "ties": {"v": "w"},
        "buffers": {"b": WholeEntry((), "int64", None)},
        "optimizer": OptimizerEntry(
            "AdamW", (GroupEntry(("w",), {"lr": 0.1}),), {"w": StateEntry({"exp_avg": "float32"}, {}, {"step": 3})}
        ),
        "extra": "shared",
        "random": True,
    }
    return Manifest(**{**fields, **changes})


def test_a_manifest_comes_back() -> None:
    assert from_json(to_json(manifest()), "m") == manifest()
    assert from_json(to_json(manifest(optimizer=None)), "m").optimizer is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            {"parameters": {"w": ParameterEntry((2, 3), "float32", True, (Piece(0, 0, 4),))}},
            "4 of the 6 elements of `w`",
        ),
        (
            {"parameters": {"w": ParameterEntry((6,), "float32", True, (Piece(0, 0, 4), Piece(1, 3, 6)))}},
            "at element 4",
        ),
        ({"parameters": {"w": ParameterEntry((6,), "float32", True, (Piece(2, 0, 6),))}}, "at element 0"),
        ({"ties": {"v": "u"}}, "ties `v` to `u`"),
        ({"buffers": {"b": WholeEntry((), "int64", 2)}}, "file 2 of 2"),
    ],
)
def test_the_law_of_manifests(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(lamina.CheckpointError, match=word):
        from_json(to_json(manifest(**changes)), "m")


def test_a_damaged_manifest_is_named() -> None:
    text = to_json(manifest())
    for wrong, word in [
        (text[: len(text) // 2], "runs/m is damaged"),
        (text.replace('"world": 2', '"world": 3'), "runs/m is damaged: its checksum"),
        (text.replace('"version": 1', '"version": 2'), "has version 2"),
        ("{}", "no manifest"),
        ("[]", "no manifest"),
    ]:
        with pytest.raises(lamina.CheckpointError, match=word):
            from_json(wrong, "runs/m")


# -- data files

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.uint16, torch.float8_e4m3fn]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"t/{d}": torch.randint(0, 2, (3, 5), generator=generator).to(d) for d in DTYPES}
    made["big"] = torch.randn(2 * STAGING_BYTES // 4 + 12345, generator=generator)  # no multiple of a block
    made["number"] = torch.tensor(4)
    return made


def write(path: Path, values: dict[str, torch.Tensor], staging_bytes: int = STAGING_BYTES) -> Any:
    draft = lay_out([Item(key, value, flat=False) for key, value in values.items()], {"extra": "ä"})
    return write_file(path, draft, stream(draft.items, torch.empty(staging_bytes, dtype=torch.uint8)))


@pytest.mark.parametrize("staging_bytes", [STAGING_BYTES, BLOCK_BYTES])
def test_data_files_are_safetensors_and_read_by_ranges(tmp_path: Path, staging_bytes: int) -> None:
    values, staging = tensors(), torch.empty(STAGING_BYTES, dtype=torch.uint8)
    path = tmp_path / "f.safetensors"
    written = write(path, values, staging_bytes)
    assert written.size_bytes == path.stat().st_size
    theirs = load_file(path)
    assert theirs.keys() == values.keys()
    assert all(identical(theirs[key], value) for key, value in values.items() if "float8" not in key)
    file = DataFile(path, written.size_bytes, f"{written.header_crc32:08x}")
    assert file.texts["extra"] == "ä"
    assert all(place.start_byte % place.dtype.itemsize == 0 for place in file.placed.values())
    into = torch.empty(1000, dtype=torch.float64)  # cast on the way
    for start in (0, 7, STAGING_BYTES // 4 - 500):
        file.check("big", start, start + 1000, staging)
        file.read("big", start, into, staging)
        assert torch.equal(into, values["big"][start : start + 1000].double())
    assert torch.equal(file.tensor("big", staging), values["big"])
    for threads in (1, 3):
        file = DataFile(path, written.size_bytes, f"{written.header_crc32:08x}", threads)
        for start, numel in ((0, values["big"].numel()), (77, 3 * BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES), (5, 0)):
            for dtype in (torch.float32, torch.float64):
                made = torch.empty(numel, dtype=dtype)
                file.read_checked("big", start, made, staging)
                assert torch.equal(made, values["big"][start : start + numel].to(dtype))


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    values, staging = tensors(), torch.empty(STAGING_BYTES, dtype=torch.uint8)
    values["big"] = values["big"][: 8 * BLOCK_BYTES // 4 + 77]  # as few blocks as two threads are started for
    path = tmp_path / "f.safetensors"
    written = write(path, values)
    size, crc = written.size_bytes, f"{written.header_crc32:08x}"

    def read_all(threads: int = 2, at_once: bool = True) -> None:
        file = DataFile(path, size, crc, threads)
        for key, place in file.placed.items():
            numel = torch.Size(place.shape).numel()
            if at_once:
                file.read_checked(key, 0, torch.empty(numel, dtype=place.dtype), staging)
            else:
                file.check(key, 0, numel, staging)

    read_all()
    for at in (0, 9, 200, size - 1, size // 2, size - BLOCK_BYTES - 1):
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)
        for threads, at_once in ((1, False), (2, False), (1, True), (2, True)):
            with pytest.raises(lamina.CheckpointError, match=str(path)):
                read_all(threads, at_once)
        data[at] ^= 4
        path.write_bytes(data)
    for length in (0, 5, 100, size - 1):
        os.truncate(path, length)
        with pytest.raises(lamina.CheckpointError, match=f"{path} has {length} bytes"):
            read_all()
        with pytest.raises(lamina.CheckpointError, match=str(path)):
            DataFile(path)  # no manifest knows its size, and its own header does
        path.write_bytes(bytes(data))
    read_all()


def test_only_blocks_that_are_needed_are_verified(tmp_path: Path) -> None:
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    path = tmp_path / "f.safetensors"
    write(path, {"big": torch.arange(BLOCK_BYTES)})  # 8 blocks
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    file = DataFile(path)
    file.check("big", 0, 7 * BLOCK_BYTES // 8, staging)
    with pytest.raises(lamina.CheckpointError, match="is damaged: bytes"):
        file.check("big", 0, 7 * BLOCK_BYTES // 8 + 1, staging)


@given(st.lists(st.integers(1, 9), max_size=8), st.data())
@settings(max_examples=100, deadline=None)
def test_the_pieces_of_a_range(lengths: list[int], data: st.DataObject) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    pieces = tuple(StoredPiece(i, "k", end - n, end) for i, (n, end) in enumerate(zip(lengths, ends, strict=True)))
    total = sum(lengths)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = [list(range(a, b)) for _, a, b in Stored((total,), torch.float32, pieces).between(start, stop)]
    assert [at for run in found for at in run] == list(range(start, stop)) and all(found)


# -- folders


def checkpoint(path: Path, created_ns: int) -> Path:
    folder = folders.prepare(path)
    (folder / "a.safetensors").write_text("abc")
    (folder / "b.safetensors").touch()
    folders.publish(path, manifest(created_ns))
    return path


def test_latest_sees_only_complete_checkpoints(tmp_path: Path) -> None:
    assert lamina.latest(tmp_path / "none") is None and lamina.latest(tmp_path) is None
    first, second, third = (checkpoint(tmp_path / name, n) for n, name in enumerate(("z", "y", "x")))
    assert lamina.latest(str(tmp_path)) == str(third)
    assert lamina.latest(third) == str(third)
    os.truncate(third / "a.safetensors", 2)
    assert lamina.latest(tmp_path) == str(second)
    (second / MANIFEST_NAME).unlink()
    assert lamina.latest(tmp_path) == str(first)
    (tmp_path / "w").mkdir()
    checkpoint(tmp_path / "v", 9)
    (tmp_path / "v").rename(tmp_path / ".v.partial")  # complete, and never published
    assert lamina.latest(tmp_path) == str(first)


def test_a_crash_between_the_renames_of_a_replacement(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a", 1)
    path.rename(tmp_path / ".a.replaced")
    assert lamina.latest(tmp_path) == str(path)
    assert folders.find(path) == tmp_path / ".a.replaced"
    folders.prepare(path)
    assert folders.find(path) == path and folders.complete(path) is not None
    checkpoint(path, 2)
    assert folders.read_manifest(path).created_ns == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a"]


def test_an_error_between_the_renames(tmp_path: Path) -> None:
    """The second rename is refused: the earlier checkpoint gets its name back."""
    path, rename = checkpoint(tmp_path / "a", 1), os.rename

    def once(source: Any, target: Any) -> None:
        if str(source).endswith(".partial"):
            raise OSError("refused")
        rename(source, target)

    with unittest.mock.patch.object(folders.os, "rename", once), pytest.raises(OSError, match="refused"):
        checkpoint(path, 2)
    folders.abandon(path)
    assert folders.read_manifest(path).created_ns == 1 and [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_keep_last(tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path / f"step-{n}", n) for n in range(5)]
    os.truncate(paths[4] / "a.safetensors", 0)  # not complete: it must not push out a good one
    (tmp_path / "notes").mkdir()
    lamina.checkpoint.keep_last(tmp_path, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes", "step-2", "step-3", "step-4"]
    lamina.checkpoint.keep_last(tmp_path, 1)
    assert lamina.latest(tmp_path) == str(paths[3])
    with pytest.raises(lamina.UsageError, match="at least 1"):
        lamina.checkpoint.keep_last(tmp_path, 0)


def test_a_clock_that_is_set_back_makes_no_old_checkpoint_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, and in the next one, on another machine: `latest()` has shown it how late it was."""
    for number, (now, made_ns) in enumerate([(100, 100), (7, 101), (8, 102), (500, 500)]):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        if number in (0, 2):
            monkeypatch.setattr(Moments, "newest_ns", 0)
            lamina.latest(tmp_path)
        newest = checkpoint(tmp_path / f"step-{number}", Moments.next_ns())
        assert folders.read_manifest(newest).created_ns == made_ns
        lamina.checkpoint.keep_last(tmp_path, 2)
        assert lamina.latest(tmp_path) == str(newest)


def test_what_cannot_be_deleted_yet_does_not_spoil_a_save(tmp_path: Path) -> None:
    """As on a network file system, where another process has a file of the earlier checkpoint open."""
    path = checkpoint(tmp_path / "a", 1)
    with unittest.mock.patch.object(folders.shutil, "rmtree"):
        checkpoint(path, 2)
    assert folders.read_manifest(path).created_ns == 2 and len(list(tmp_path.glob(".a.*.deleted"))) == 1
    rename = os.rename

    def stale(source: Any, target: Any) -> None:
        if str(source).endswith(".replaced"):
            raise OSError("stale")
        rename(source, target)

    with unittest.mock.patch.object(folders.os, "rename", stale):
        checkpoint(path, 3)
    assert folders.read_manifest(path).created_ns == 3 and (tmp_path / ".a.replaced").exists()
    checkpoint(path, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"] and lamina.latest(tmp_path) == str(path)


def test_two_jobs_that_keep_the_last(tmp_path: Path) -> None:
    """What another job has deleted meanwhile is gone, as wanted; what cannot be deleted is said."""
    paths = [checkpoint(tmp_path / f"step-{n}", n) for n in range(3)]
    rename = os.rename

    def slower(source: Any, target: Any) -> None:
        shutil.rmtree(source)
        rename(source, target)

    with unittest.mock.patch.object(folders.os, "rename", slower):
        lamina.checkpoint.keep_last(tmp_path, 2)
    with unittest.mock.patch.object(folders.shutil, "rmtree"), pytest.warns(UserWarning, match="could not be deleted"):
        lamina.checkpoint.keep_last(tmp_path, 1)
    lamina.checkpoint.keep_last(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [paths[2]]


def test_links_do_not_count(tmp_path: Path) -> None:
    first, second = (checkpoint(tmp_path / f"step-{n}", n) for n in range(2))
    (tmp_path / "latest").symlink_to(second)
    lamina.checkpoint.keep_last(tmp_path, 2)
    assert first.exists() and lamina.latest(tmp_path) == str(second)
    assert lamina.latest(tmp_path / "latest") == str(tmp_path / "latest")
    second.rename(tmp_path / ".step-1.replaced")  # a crash between two renames: the link is one of it, too
    assert folders.find(tmp_path / "latest") == tmp_path / ".step-1.replaced"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").touch()
    with pytest.raises(lamina.UsageError, match="is not a checkpoint"):
        folders.check_target(tmp_path / "data")
    with pytest.raises(lamina.UsageError, match="is not a checkpoint"):
        folders.check_target(tmp_path / "data" / "x")
    (tmp_path / "empty").mkdir()
    folders.check_target(tmp_path / "empty")
    assert folders.complete(checkpoint(tmp_path / "empty", time.time_ns())) is not None
    with pytest.raises(lamina.CheckpointError, match=r"holds checkpoints \(empty\)"):
        folders.read_manifest(tmp_path)
    with pytest.raises(lamina.CheckpointError, match="there is no checkpoint at"):
        folders.read_manifest(tmp_path / "gone")
