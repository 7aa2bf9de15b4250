"""The command as a user types it: processes, signals, exit codes, and what is on the screen."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import lamina
from forked_programs import run_warm
from lamina import cli
from lamina.core import expandable
from lamina.train import cli as train_cli
from lamina.train.cli import _cut_short
from lamina.train.folder import claimed_folder
from lamina.train.run import Request
from lamina.train.view import Plain, Progress, Relay, RelayReader, Terminal
from train.runs import losses, write_text

LAMINA = [sys.executable, "-u", "-m", "lamina.cli"]
SMALL = "--width 16 --layers 2 --heads 2 --length 16 --batch 4 --evaluate-batches 1 --sample-tokens 0 --nprocs 2"


def start(arguments: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [*LAMINA, *arguments], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(arguments: list[str], folder: Path, **variables: str) -> tuple[int, str]:
    """Exit code and output."""
    run = start(arguments, folder, **variables)
    shown, _ = run.communicate(timeout=100)
    return run.returncode, shown


def interrupted_at_its_first_step(arguments: list[str], folder: Path) -> tuple[int, str]:
    run = start(arguments, folder)
    alarm = threading.Timer(100, run.kill)  # a command that never ends fails here
    alarm.start()
    shown = []
    assert run.stdout is not None
    for line in run.stdout:
        shown.append(line)
        if "tokens/s" in line:
            run.send_signal(signal.SIGINT)
            break
    shown += run.stdout.readlines()
    code = run.wait()
    alarm.cancel()
    return code, "".join(shown)


def test_ctrl_c_ends_the_command_with_a_checkpoint(tmp_path: Path) -> None:
    """Through the launcher, whose ranks it has to reach; then again what it says to type."""
    data = write_text(tmp_path)
    arguments = ["train", "--data", data.name, *SMALL.split(), "--steps", "100000"]
    code, text = run_warm(interrupted_at_its_first_step, arguments, tmp_path)
    assert code == 130 and "stopped by SIGINT behind step" in text, text
    assert "lamina train --resume runs/1" in text and "Traceback" not in text
    assert "stopping behind this step" in text and "whole checkpoint" not in text
    checkpoint = lamina.latest(str(tmp_path / "runs" / "1" / "checkpoints"))
    assert checkpoint is not None and max(losses(tmp_path / "runs" / "1")) == int(checkpoint[-6:])


def left_by_its_reader(arguments: list[str], folder: Path, interrupt: bool) -> tuple[int, str]:
    """Exit code and errors of a command whose output goes to a `head`, or to a `tee` that Ctrl-C ends with it."""
    with open(folder / "errors", "w+") as errors:
        ours, theirs = os.pipe()
        run = subprocess.Popen([*LAMINA, *arguments], cwd=folder, stdout=theirs, stderr=errors)
        os.close(theirs)
        alarm = threading.Timer(100, run.kill)
        alarm.start()
        with open(ours) as reader:
            while "tokens/s" not in reader.readline():
                pass
        if interrupt:
            run.send_signal(signal.SIGINT)
        code = run.wait()
        alarm.cancel()
        errors.seek(0)
        return code, errors.read()


@pytest.mark.parametrize("interrupt", [False, True])
def test_a_run_whose_output_nobody_reads_ends_with_a_checkpoint(interrupt: bool, tmp_path: Path) -> None:
    data = write_text(tmp_path)
    arguments = ["train", "--data", data.name, *SMALL.split(), "--steps", "100000"]
    code, text = run_warm(left_by_its_reader, arguments, tmp_path, interrupt)
    assert code == (130 if interrupt else 1) and "Traceback" not in text, text
    checkpoint = lamina.latest(str(tmp_path / "runs" / "1" / "checkpoints"))
    assert checkpoint is not None and f"{Path(checkpoint).name}: lamina train --resume runs/1" in text, text
    assert interrupt or "standard output cannot be written" in text


def without_output(arguments: list[str], folder: Path) -> int:
    """As some services start programs: there is no standard output at all."""
    return subprocess.run(["sh", "-c", '"$@" >&-', "sh", *LAMINA, *arguments], cwd=folder, timeout=100).returncode


def test_a_run_without_standard_output_trains(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    assert run_warm(without_output, ["train", "--data", data.name, *SMALL.split(), "--steps", "2"], tmp_path) == 0
    assert max(losses(tmp_path / "runs" / "1")) == 2


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    """Found by the ranks, said once, without a traceback."""
    data = write_text(tmp_path, lines=1)
    code, out = run_warm(ended, ["train", "--data", data.name, *SMALL.split()], tmp_path)
    assert code == 1 and out.startswith("lamina train: sums.txt: ") and out.count("\n") == 1, out
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code, out = run_warm(ended, ["train", *SMALL.split()[:-2]], tmp_path, **variables)
    assert code == 1 and "the ranks cannot meet" in out and "--master-port" in out and port in out, out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "did you mean `lamina train`?"),
        (["doctor", "--ranks", "0"], "at least one rank"),
        (["train", "missing.toml"], "missing.toml"),
        (["train", "--data", "missing.txt"], "missing.txt"),
        (["train", "--device", "cuda", "--nprocs", "99"], "cuda" if not os.path.exists("/dev/nvidia0") else "99"),
        (["train", "--resume", "missing"], "run.toml"),
        (["train", "--model", "missing/folder/here"], "no such folder"),
        (["sample", "missing"], "missing"),
    ],
)
def test_mistakes_that_need_no_rank(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) in (1, 2)
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_left_of_a_run_that_was_cut_short(tmp_path: Path) -> None:
    assert _cut_short(tmp_path) == "ended without a checkpoint"
    model = lamina.shard(torch.nn.Linear(2, 2), "ddp")
    lamina.save(str(tmp_path / "checkpoints" / "step-000003"), model)
    assert f"step-000003: lamina train --resume {tmp_path}" in _cut_short(tmp_path)


def test_what_rank_0_shows_reaches_the_launching_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    def show(view: Plain | Relay | Terminal) -> None:
        view.progress(Progress(2, 10, 1.25, 4000.0, 1 << 20, 61.0))
        view.say("a line [with brackets]")
        view.table("memory", [["", "here"], ["slots", "3 B"]])
        view.progress(Progress(3, 10, 1.25, 4000.0, 1 << 20, 61.0))
        view.close()

    direct, relayed = io.StringIO(), io.StringIO()
    show(Plain(direct))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", RelayReader(Plain(relayed)))
        show(Relay())
        print("of a library")
    assert relayed.getvalue() == direct.getvalue() + "of a library\n"
    assert "step  3/10" in direct.getvalue() and "1:01 left" in direct.getvalue()
    screen = Screen()
    with monkeypatch.context() as patched:
        patched.setenv("COLUMNS", "24")
        patched.setattr(sys, "stdout", RelayReader(Terminal(screen)))
        show(Relay())  # the bar lives from its first line on
        print("a line of a library that is longer than the screen")
    for word in ("[with brackets]", "slots", "3 B", "a line of a library that is longer than the screen"):
        assert word in screen.getvalue()
    assert '"kind"' not in screen.getvalue()


def test_runs_that_start_side_by_side_take_two_folders(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with claimed_folder(runs) as first, claimed_folder(runs) as second:
        assert [Path(first).name, Path(second).name] == ["1", "2"]
        (Path(second) / "run.toml").touch()
    assert [p.name for p in runs.iterdir()] == ["2"], "one that was refused leaves nothing"
    (tmp_path / "file").touch()
    with pytest.raises(lamina.UsageError, match="Give a folder that can be written"), claimed_folder(tmp_path / "file"):
        pass


@pytest.mark.parametrize("gpus, supported, asked", [(2, True, True), (2, False, None), (0, True, None)])
def test_ranks_on_gpus_get_the_allocators_setting(
    gpus: int, supported: bool, asked: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def start_nothing(request: Request, ranks: int) -> int:
        seen.append(expandable.asked_for())
        return 0

    def plan_nothing(config: object, ranks: int, on_gpu: bool) -> str:
        seen.append(expandable.asked_for())
        return ""

    for name in expandable.NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(expandable, "is_supported", lambda: supported)
    monkeypatch.setattr(train_cli, "_launch", start_nothing)
    monkeypatch.setattr(train_cli, "dry_run", plan_nothing)
    words = ["train", *SMALL.split(), "--output", str(tmp_path / "run"), "--nprocs", "2"]
    assert cli.main(words) == 0
    assert cli.main([*words, "--dry-run"]) == 0
    assert seen == [asked, True if supported else None], "without GPUs a forecast is that of others"
    assert expandable.asked_for() is None
