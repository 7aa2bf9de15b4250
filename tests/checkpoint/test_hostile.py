"""Files that are not what they say, and jobs that take each other's folder: one clear line, and nothing is changed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import unittest.mock
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lamina
from checkpoint.training import UNITS, build, make_optimizer, own_bits, train
from harness import run_ranks
from lamina.checkpoint import commands, folders, saving
from lamina.checkpoint.manifest import MANIFEST_NAME, _own_crc

DATA = "rank-00000.safetensors"
JUNK = [None, -1, 10**30, 1.5, "", "../../x", [], {}, [1, 2], {"a": 1}, True, "float31", float("nan")]
COMMANDS: list[list[str]] = [["verify"], ["convert", "--to", "torch"], ["export"]]


class Job:
    def __init__(self, seed: int = 0) -> None:
        self.model = lamina.shard(build(seed), "zero3", units=UNITS)
        self.optimizer = make_optimizer("torch", self.model)
        train(self.model, self.optimizer, range(1))

    def save(self, path: Path, **more: Any) -> None:
        lamina.save(path, self.model, self.optimizer, **more)


@pytest.fixture(scope="module")
def job() -> Job:
    return Job()


@pytest.fixture
def good(job: Job, tmp_path: Path) -> Path:
    job.save(tmp_path / "good" / "a", extra={"t": torch.arange(600.0), (1, 2): {3}})
    return tmp_path / "good" / "a"


def run(path: Path, command: list[str]) -> int:
    name, *options = command
    if name not in ("convert", "export"):
        return commands.main([name, str(path), *options])
    with tempfile.TemporaryDirectory() as folder:
        return commands.main([name, str(path), f"{folder}/out", *options])


def refused_by_all(path: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    before = own_bits(job.model, job.optimizer)
    for command in COMMANDS:
        assert run(path, command) == 1, command
        said = "".join(capsys.readouterr())
        assert 0 < len(said.strip().splitlines()) == 1 and "Traceback" not in said, said
    with pytest.raises(lamina.CheckpointError):
        lamina.load(path, job.model, job.optimizer)
    assert all(map(torch.equal, own_bits(job.model, job.optimizer), before))


def test_damaged_files_are_refused_in_one_line(good: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    for command in COMMANDS:
        assert run(good, command) == 0
    capsys.readouterr()
    for name in (MANIFEST_NAME, DATA):
        data = (good / name).read_bytes()
        header = len(data) - 200 if name == MANIFEST_NAME else 8 + int.from_bytes(data[:8], "little")
        # the last bytes of the data are random states, which an export does not read
        harms = [(draw.randrange(3, header), 1 << draw.randrange(7)) for _ in range(3)]
        for at, bit in harms:
            (good / name).write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            refused_by_all(good, job, capsys)
        for length in (0, 7, 100, len(data) - 1):
            (good / name).write_bytes(data[:length])
            refused_by_all(good, job, capsys)
            assert run(good, ["inspect"]) == 1 and "Traceback" not in "".join(capsys.readouterr())
        (good / name).unlink()
        refused_by_all(good, job, capsys)
        (good / name).write_bytes(data)
    assert lamina.load(good, job.model, job.optimizer)[(1, 2)] == {3}


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inside:
        yield (*above, key)
        yield from places(child, (*above, key))


def spoil(value: Any, draw: random.Random, known: list[tuple[Any, ...]]) -> str:
    """Put junk at one place, or take it away."""
    *above, last = draw.choice(known)
    for key in above:
        value = value[key]
    junk = draw.choice([*JUNK, "nothing"])
    if junk == "nothing":
        del value[last]
    else:
        value[last] = junk
    return f"{(*above, last)}: {junk!r}"


def write_manifest(folder: Path, body: dict[str, Any]) -> None:
    body.pop("crc32")
    (folder / MANIFEST_NAME).write_text(json.dumps({**body, "crc32": _own_crc(body)}))


def spoil_manifest(folder: Path, draw: random.Random) -> str:
    body = json.loads((folder / MANIFEST_NAME).read_text())
    what = spoil(body, draw, [place for place in places(body) if place[0] != "crc32"])
    write_manifest(folder, body)
    return what


def spoil_header(folder: Path, draw: random.Random) -> str:
    data = (folder / DATA).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    what = spoil(entries, draw, list(places(entries)))
    text = json.dumps(entries).encode()
    text = len(text).to_bytes(8, "little") + text
    (folder / DATA).write_bytes(text + data[end:])
    body = json.loads((folder / MANIFEST_NAME).read_text())
    body["files"][0] |= {"bytes": len(text) + len(data) - end, "header_crc32": f"{zlib.crc32(text):08x}"}
    write_manifest(folder, body)
    return what


@pytest.mark.parametrize("spoil_one", [spoil_manifest, spoil_header])
def test_edits_with_right_checksums_never_end_in_a_traceback(
    good: Path, job: Job, capsys: pytest.CaptureFixture[str], spoil_one: Callable[[Path, random.Random], str]
) -> None:
    """Some edits are harmless; what is refused is refused by name."""
    draw, other, refused = random.Random(1), good.parent / "other", 0
    for _ in range(9):
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(good, other)
        what = spoil_one(other, draw)
        for command in (["inspect"], *COMMANDS):
            code = run(other, command)
            assert "Traceback" not in "".join(capsys.readouterr()) and code in (0, 1), what
        try:
            lamina.load(other, job.model, job.optimizer)
        except (lamina.CheckpointError, lamina.UsageError):
            refused += 1
    assert refused >= 3


def test_a_name_outside_the_folder_is_no_file_of_a_checkpoint(good: Path, job: Job) -> None:
    shutil.copy(good / DATA, good.parent / DATA)
    body = json.loads((good / MANIFEST_NAME).read_text())
    body["files"][0]["name"] = f"../{DATA}"
    write_manifest(good, body)
    with pytest.raises(lamina.CheckpointError, match="is something else than belongs there"):
        lamina.load(good, job.model, job.optimizer)


class Gone:
    """A class of the user's that is not there when the checkpoint is read."""


def test_classes_that_are_gone_are_named(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.save(tmp_path / "a", extra={"mine": Gone()})
    with unittest.mock.patch.dict(globals()):
        del globals()["Gone"]
        assert run(tmp_path / "a", ["inspect"]) == 0
        assert run(tmp_path / "a", ["convert", "--to", "torch"]) == 1
        with pytest.raises(lamina.CheckpointError, match="saved as `extra` cannot be read: AttributeError: .*Gone"):
            lamina.load(tmp_path / "a", job.model, job.optimizer)
    assert run(tmp_path / "a", ["convert", "--to", "torch"]) == 0


def test_a_save_through_a_link(job: Job, tmp_path: Path) -> None:
    link = tmp_path / "newest"
    for name in ("a", "not there yet"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        for number in range(2):
            job.save(link, extra=number)
            assert link.is_symlink() and lamina.load(tmp_path / name, job.model) == number
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "newest", "not there yet"]


def others(folder: Path) -> dict[str, str]:
    """Files and folders that are no checkpoints, and what is said of them."""
    torch.save([1, 2], folder / "list")
    torch.save(torch.nn.Linear(2, 2), folder / "module")
    (folder / "text").write_text("hello")
    said = {
        "list": "holds a list, and a state dict is wanted",
        "module": "save its `state_dict()`",
        "text": "cannot be",
    }
    for name, index in {"away": '{"weight_map": {"a": "../a.safetensors"}}', "no dict": "[]"}.items():
        (folder / name).mkdir()
        (folder / name / "model.safetensors.index.json").write_text(index)
        said[name] = "model.safetensors.index.json is damaged"
    return said


def test_what_is_no_checkpoint_is_named(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in others(tmp_path).items():
        with pytest.raises(lamina.CheckpointError) as caught:
            lamina.load(tmp_path / name, job.model)
        assert words in str(caught.value) and "\n" not in str(caught.value)
        for command in (["inspect"], *COMMANDS):
            assert run(tmp_path / name, command) == 1
            said = "".join(capsys.readouterr())
            assert len(said.strip().splitlines()) == 1 and (words in said or "no checksums to compare" in said), said


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What waits for longer is an error."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pipes(good: Path) -> Iterator[Path]:
    """Folders in which a named pipe, to which nobody writes, stands for a file."""
    for name in (MANIFEST_NAME, DATA):
        folder = shutil.copytree(good, good.parent.parent / f"without {name}" / "a")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        yield folder
    for name in (".metadata", "model.safetensors.index.json", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        folder = good.parent.parent / name / "a"
        folder.mkdir(parents=True)
        os.mkfifo(folder / name)
        yield folder


def test_nobody_waits_for_a_pipe(good: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in pipes(good):
        with within(5):
            assert lamina.latest(folder.parent) is None
            with pytest.raises(lamina.CheckpointError, match="is a named pipe and no file"):
                lamina.load(folder, job.model, job.optimizer)
            for command in (["inspect"], *COMMANDS):
                assert run(folder, command) == 1
                said = "".join(capsys.readouterr())
                assert "is a named pipe" in said or "no checksums to compare" in said, said


def test_what_is_no_path_model_or_optimizer_is_named(good: Path, job: Job) -> None:
    model, optimizer = job.model, job.optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: dict[str, Callable[[], object]] = {
        "a NoneType is no path": lambda: lamina.save(None, model),  # type: ignore[arg-type]
        "a list is no path": lambda: lamina.load([], model),  # type: ignore[arg-type]
        "a int is no path": lambda: lamina.latest(3),  # type: ignore[arg-type]
        "a dict is no path": lambda: lamina.checkpoint.keep_last({}, 1),  # type: ignore[arg-type]
        "a float is no path": lambda: lamina.export(0.5, model),  # type: ignore[arg-type]
        "a str is no model": lambda: lamina.save(good, "model"),  # type: ignore[arg-type]
        "StepLR is no torch.optim.Optimizer": lambda: lamina.load(good, model, schedule),  # type: ignore[arg-type]
        "give the number of checkpoints": lambda: lamina.checkpoint.keep_last(good.parent, 0),
        "a name of 238 bytes": lambda: lamina.save(good.parent / ("n" * 238), model),
        "a hidden name": lambda: lamina.save(good.parent / ".b", model),
        "is a checkpoint itself": lambda: lamina.save(good / "b", model),
    }
    for words, call in calls.items():
        with pytest.raises(lamina.UsageError, match=words):
            call()
    assert [entry.name for entry in good.parent.iterdir()] == ["a"]
    longest = good.parent / ("n" * 237)
    for wait in (True, False, True):
        job.save(longest, wait=wait)
    assert lamina.latest(good.parent) == str(longest)
    with pytest.raises(lamina.CheckpointError, match="cannot be looked at: File name too long"):
        lamina.latest(good.parent / ("n" * 256))


def test_extras_of_every_kind_come_back_or_are_refused(job: Job, tmp_path: Path) -> None:
    extra = {
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "array": np.empty((2, 0)),
        "complex": torch.empty(0, dtype=torch.complex64),
        "long": 10**5000,
    }
    job.save(tmp_path / "a", extra=extra)
    found = lamina.load(tmp_path / "a", job.model, job.optimizer)
    assert list(found) == list(extra) and found["long"] == extra["long"]
    for key in ("empty", "array", "complex"):
        assert found[key].shape == extra[key].shape and found[key].dtype == extra[key].dtype, key
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(lamina.UsageError, match="extra contains itself"):
        job.save(tmp_path / "a", extra=circle)
    with warnings.catch_warnings(action="ignore"):  # a prototype
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(lamina.UsageError, match="that is nested"):
        job.save(tmp_path / "a", extra=ragged)


def save_and_load_inside(path: str) -> bool:
    """Where parameters are whole, saves and loads are refused; in inference mode they are as always."""
    job = Job(seed=3)
    before = own_bits(job.model, job.optimizer)
    calls: list[Callable[[], object]] = [lambda: job.save(Path(path)), lambda: lamina.load(path, job.model)]
    for call in calls:
        hook = job.model.blocks[1].register_forward_hook(lambda *_, call=call: call())
        with pytest.raises(lamina.StateError, match="is a full tensor now"):
            train(job.model, job.optimizer, range(1))
        hook.remove()
        with lamina.gathered(job.model), pytest.raises(lamina.StateError, match="is a full tensor now"):
            call()
    assert not Path(path).exists() and all(map(torch.equal, own_bits(job.model, job.optimizer), before))
    for wait in (True, False):
        with torch.inference_mode():
            job.save(Path(path), wait=wait, extra=5)
        job.save(Path(path), wait=wait, extra=5)
    fresh = make_optimizer("torch", job.model)
    with torch.inference_mode():
        assert lamina.load(path, job.model, fresh) == 5
    equal = all(map(torch.equal, own_bits(job.model, fresh), before))
    train(job.model, fresh, range(1))
    for value in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        fresh.state[next(iter(fresh.state))]["odd"] = value
        with pytest.raises(lamina.UsageError, match="optimizer state 'odd' of `.*` is a tensor"):
            lamina.save(path, job.model, fresh)
    return equal


def test_inside_a_scope(tmp_path: Path) -> None:
    assert all(run_ranks(2, save_and_load_inside, str(tmp_path / "a")))


def test_tensors_without_plain_values_are_refused_by_name(job: Job, tmp_path: Path) -> None:
    for value in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(lamina.UsageError, match=r"extra\['v'\]\[0\] is a tensor (on meta|torch.sparse_coo)"):
            job.save(tmp_path / "a", extra={"v": [value]})
    assert not list(tmp_path.iterdir())
    lazy = torch.complex(torch.ones(20), torch.arange(20.0)).conj().imag  # negative by a flag
    job.save(tmp_path / "a", extra=lazy)
    assert torch.equal(lamina.load(tmp_path / "a", job.model, job.optimizer), -torch.arange(20.0))


@pytest.mark.parametrize("moment", ["written", "published"])
@pytest.mark.parametrize("far", ["prepares", "publishes"])
def test_two_jobs_in_one_folder(job: Job, tmp_path: Path, moment: str, far: str) -> None:
    """The other one does all of its save, or begins it, while ours is under way: no ruin passes for a checkpoint."""
    path = tmp_path / "a"
    job.save(path, extra="earlier")
    other, name = Job(seed=4), {"written": "write_file", "published": "describe"}[moment]
    original = getattr(saving, name)

    def disturbed(*arguments: Any) -> Any:
        result = original(*arguments)
        with unittest.mock.patch.object(saving, name, original):
            if far == "publishes":
                other.save(path, extra="other")
            else:
                folders.prepare(path, 5)
        return result

    with (
        unittest.mock.patch.object(saving, name, disturbed),
        pytest.raises(lamina.CheckpointError, match="Does another job save there, too|No such file"),
    ):
        job.save(path, extra="ours")
    reader = Job(seed=5)
    assert lamina.load(path, reader.model, reader.optimizer) == {"prepares": "earlier", "publishes": "other"}[far]
    shutil.rmtree(folders.partial(path, 5), ignore_errors=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
