"""One rank fails: every rank raises, naming it; what was there before is untouched, and the next save works."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import unittest.mock
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lamina
from checkpoint.training import UNITS, build, make_optimizer, own_bits, own_values, train
from hangs.training import under_short_limits
from harness import expect_error, run_ranks
from lamina.checkpoint import background, datafile, folders, saving
from lamina.checkpoint.host_copy import HostCopy


def start(seed: int = 0, strategy: Any = "zero3", kind: str = "lamina") -> tuple[Any, torch.optim.Optimizer]:
    model = lamina.shard(build(seed), strategy, units=UNITS)
    optimizer = make_optimizer(kind, model)
    train(model, optimizer, range(1))
    return model, optimizer


# -- saves that fail

FAULTS = {  # what fails: where it is called, on which rank
    "look": (saving, "take", 1),
    "prepare": (folders, "prepare", 0),
    "copy": (HostCopy, "take", 1),
    "divide": (saving, "divide", 1),
    "open": (saving, "write_file", 1),
    "write": (datafile, "write_at", 1),
    "sync": (datafile.os, "fsync", 1),
    "sync of the folder": (folders, "sync_folder", 0),
    "manifest": (saving, "describe", 0),
    "rename": (folders.os, "rename", 0),
}


@contextlib.contextmanager
def fault(name: str, error: Exception) -> Iterator[None]:
    owner, attribute, rank = FAULTS[name]
    if dist.get_rank() != rank:
        yield
        return
    with unittest.mock.patch.object(owner, attribute, side_effect=error):
        yield


def fail_everywhere(folder: str) -> list[str]:
    """What went otherwise than it should, in words."""
    model, optimizer = start()
    wrong = []
    lamina.save(f"{folder}/good", model, optimizer, extra=1)
    good = {entry.name: entry.read_bytes() for entry in Path(folder, "good").iterdir()}
    for name, (_, _, rank) in FAULTS.items():
        for wait in (True, False) if name != "copy" else (False,):
            for target in ("good", "new"):
                error: Exception = RuntimeError("the dog ate it")
                if name in ("write", "sync"):
                    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/file")
                said = "no error"
                with fault(name, error):
                    try:
                        lamina.save(f"{folder}/{target}", model, optimizer, extra=2, wait=wait)
                        lamina.latest(folder)
                    except lamina.CheckpointError as caught:
                        said = str(caught)
                word = "No space left on device (a/file)" if name in ("write", "sync") else "the dog ate it"
                if not (word in said and f"(on rank {rank} of 2)" in said and target in said):
                    wrong.append(f"{name}, wait={wait}, {target}: {said}")
                dist.barrier()
                if sorted(os.listdir(folder)) != ["good"]:
                    wrong.append(f"{name}, wait={wait}, {target}: left {os.listdir(folder)}")
                dist.barrier()
    if {entry.name: entry.read_bytes() for entry in Path(folder, "good").iterdir()} != good:
        wrong.append("the good one was changed")
    dist.barrier()
    train(model, optimizer, range(1, 2))
    lamina.save(f"{folder}/good", model, optimizer, extra=3)
    if lamina.load(f"{folder}/good", model, optimizer) != 3:
        wrong.append("the next save did not work")
    return wrong


def test_a_failing_rank_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    for wrong in run_ranks(2, fail_everywhere, str(tmp_path)):
        assert not wrong, "\n".join(wrong)


def save_at(path: str, wait: bool) -> None:
    model, optimizer = start()
    lamina.save(path, model, optimizer, wait=wait)
    lamina.checkpoint.finish()


def save_beyond_a_limit(path: str, wait: bool) -> None:
    """The system refuses to let rank 1's file grow: a real error of a real write."""
    model, optimizer = start()
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        lamina.save(path, model, optimizer, wait=wait)
        lamina.checkpoint.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    for wait in (True, False):
        expect_error(2, save_at, "/proc/lamina", wait, error="CheckpointError", contains=["/proc", "rank 0 of 2"])
    (tmp_path / "file").touch()
    expect_error(2, save_at, str(tmp_path / "file" / "a"), True, error="CheckpointError", contains=["file"])
    expect_error(2, save_at, str(tmp_path), True, error="UsageError", contains=["is not a checkpoint"])


@pytest.mark.parametrize("wait", [True, False])
def test_a_write_that_the_system_refuses(tmp_path: Path, wait: bool) -> None:
    words = ["File too large", "on rank 1 of 2"]
    expect_error(2, save_beyond_a_limit, str(tmp_path / "a"), wait, error="CheckpointError", contains=words)
    assert list(tmp_path.iterdir()) == []


def save_on_the_first_rank(path: str) -> None:
    model, optimizer = start()
    if dist.get_rank() == 0:
        lamina.save(path, model, optimizer)
    train(model, optimizer, range(1))


def test_a_save_on_one_rank_only(tmp_path: Path) -> None:
    words = ["rank 0", "save agrees on", "rank 1", "forward"]
    path = str(tmp_path / "a")
    expect_error(2, under_short_limits, save_on_the_first_rank, path, error="Disagreement", contains=words)


def save_to_two_places(folder: str) -> None:
    model, optimizer = start()
    lamina.save(f"{folder}/{dist.get_rank()}", model, optimizer)


def save_two_rates(folder: str) -> None:
    model, optimizer = start()
    optimizer.param_groups[0]["lr"] = 0.1 * dist.get_rank()
    lamina.save(f"{folder}/a", model, optimizer)


def write_around_a_step(folder: str, export: bool) -> None:
    """As a signal's handler may: before the optimizer's step on rank 1, behind it on rank 0; and no count is given."""
    model, optimizer = start()
    before = dist.get_rank() == 1
    model(torch.zeros(2, 4, dtype=torch.long)).square().mean().backward()
    for write in (before, not before):
        if not write:
            optimizer.step()
        elif export:
            lamina.export(f"{folder}/a", model)
        else:
            lamina.save(f"{folder}/a", model)


def save_a_part(folder: str) -> None:
    model = torch.nn.Linear(8, 8)
    lamina.split_parameter(model.weight, 0, dist.group.WORLD)
    lamina.save(f"{folder}/a", lamina.shard(model))


def save_something_else(folder: str) -> None:
    model, _ = start()
    lamina.save(f"{folder}/a", model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0))


def save_a_shard(folder: str) -> None:
    model, _ = start()
    lamina.save(f"{folder}/a", model, extra={"ema": [model.blocks[0].up.weight]})


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expect_error(2, save_to_two_places, folder, error="Disagreement", contains=["rank 0", "/0", "rank 1", "/1"])
    for export in (False, True):
        expect_error(2, write_around_a_step, folder, export, error="Disagreement", contains=["optimizer steps"])
    expect_error(2, save_two_rates, folder, error="Disagreement", contains=["optimizer", "lr"])
    expect_error(2, save_a_part, folder, error="UsageError", contains=["`weight`", "split_parameter"])
    expect_error(2, save_something_else, folder, error="UsageError", contains=["group 0", "(3,)"])
    expect_error(2, save_a_shard, folder, error="UsageError", contains=["extra['ema'][0]", "`blocks.0.up.weight`"])
    assert list(tmp_path.iterdir()) == []


# -- loads that fail


def damage_and_load(folder: str) -> list[str]:
    path, wrong = Path(folder, "a"), []
    model, optimizer = start()
    with unittest.mock.patch.object(datafile, "BLOCK_BYTES", 512):  # many blocks, of which each rank needs some
        lamina.save(path, model, optimizer)
    other, other_optimizer = start(seed=3, strategy="zero1", kind="torch")
    before = own_bits(other, other_optimizer)
    for name in ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"):
        data = (path / name).read_bytes()
        first = (
            8 + int.from_bytes(data[:8], "little") + 5 if "rank" in name else 40
        )  # in the first tensor's first element
        harm = {
            "cut": data[:-1],
            "first element": data[:first] + bytes([data[first] ^ 1]) + data[first + 1 :],
            "halved": data[: len(data) // 2],
            "flipped": data[: len(data) - 60] + bytes([data[-60] ^ 32]) + data[len(data) - 59 :],
            "flipped early": data[:30] + bytes([data[30] ^ 1]) + data[31:],
            "gone": None,
        }
        for how, damaged in harm.items():
            dist.barrier()
            if dist.get_rank() == 0:
                (path / name).unlink() if damaged is None else (path / name).write_bytes(damaged)
            dist.barrier()
            said = "no error"
            try:
                lamina.load(path, other, other_optimizer)
            except lamina.CheckpointError as error:
                said = str(error)
            if name not in said:
                wrong.append(f"{name} {how}: {said}")
            if not all(map(torch.equal, own_bits(other, other_optimizer), before)):
                wrong.append(f"{name} {how}: the model was changed")
        dist.barrier()
        if dist.get_rank() == 0:
            (path / name).write_bytes(data)
    dist.barrier()
    lamina.load(path, other, other_optimizer)
    return wrong


def test_a_damaged_file_is_named_before_anything_changes(tmp_path: Path) -> None:
    for wrong in run_ranks(2, damage_and_load, str(tmp_path)):
        assert not wrong, "\n".join(wrong)


class Other(torch.nn.Module):
    """Shares some names with `Everything`, not all of them in the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(29, 11, dtype=torch.float64)
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.added = torch.nn.Linear(2, 2, dtype=torch.float64)
        self.steps_of_frozen = torch.nn.Parameter(torch.zeros(10))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))


def load_another_model(folder: str, strict: bool) -> tuple[float, int, list[str]]:
    model, optimizer = start()
    model.scale.data.fill_(3.0)
    lamina.save(f"{folder}/a", model, optimizer)
    torch.manual_seed(1)
    other = lamina.shard(Other(), units=["embedding"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lamina.load(f"{folder}/a", other, make_optimizer("sgd", other), strict=strict)
    return (
        float(other.scale.detach().sum()),
        int(other.forwards),
        [str(w.message) for w in caught if "lamina" in str(w.message)],
    )


def test_what_does_not_fit_is_listed_once(tmp_path: Path) -> None:
    words = [
        "missing: added.weight, added.bias;",
        "shape: embedding.weight got (29, 10) want (29, 11);",
        "dtype: steps_of_frozen got torch.int8 want torch.float32",
        "blocks.1.down.bias",
        "strict=False",
    ]
    errors = expect_error(2, load_another_model, str(tmp_path), True, error="CheckpointError", contains=words)
    assert errors[0].message == errors[1].message
    (scale, forwards, said), (*same, nothing) = run_ranks(2, load_another_model, str(tmp_path), False)
    assert [scale, forwards] == same == [3.0, 1] and nothing == []
    assert len(said) == 1 and all(word in said[0] for word in (*words[:4], "AdamW, and the optimizer is SGD"))


def optimizers_that_do_not_fit(folder: str) -> list[str]:
    model, optimizer = start()
    lamina.save(f"{folder}/a", model, optimizer)
    lamina.save(f"{folder}/b", model)
    said = []
    fewer = lamina.optim.AdamW(list(model.parameters())[:3])
    regrouped = lamina.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = own_values(model)["scale"].local.clone()
    for path, other in (("a", fewer), ("a", regrouped), ("a", torch.optim.Adam(model.parameters())), ("b", optimizer)):
        try:
            lamina.load(f"{folder}/{path}", model, other)
            said.append("no error")
        except lamina.CheckpointError as error:
            said.append(str(error))
    assert torch.equal(own_values(model)["scale"].local, before)
    return said


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    first, second = run_ranks(2, optimizers_that_do_not_fit, str(tmp_path))
    assert first == second
    fewer, regrouped, other_class, none = first
    assert "unexpected: " in fewer and "blocks.1.up.weight" in fewer
    assert "group 0 of the optimizer holds parameters that were in groups 0, 1" in regrouped
    assert "state of AdamW, and the optimizer is Adam" in other_class
    assert "no optimizer state" in none


def test_the_faults_are_real() -> None:
    """The tests above patch names that the code calls."""
    assert background.HostCopy is HostCopy
    for owner, attribute, _ in FAULTS.values():
        assert callable(getattr(owner, attribute))
