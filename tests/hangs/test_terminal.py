"""What a user sees when ranks end by an exception: the terminal as a whole, under torchrun and under `launch`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import lamina
from forked_programs import run_warm
from lamina.core.terminal import frames_text, tell
from lamina.core.watch_evidence import call_site

SOURCE = str(Path(__file__).parents[2] / "src")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"  # torchrun's own table comes after it
SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn
import lamina
from lamina.core import watch

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def batches(mode):
    for step in range(4):
        if step == 2 and (mode == "same" or (mode == "loader" and dist.get_rank() == 1)):
            raise ValueError("batch 2 is broken")
        yield torch.ones(2, 8)


def train(mode):
    watch.configure(watch.Limits(silent_s=1.2, proof_s=0.4, grace_s=0.4, beat_s=0.2))
    torch.manual_seed(0)
    model = lamina.shard(Net(), units=["layrs.*" if mode == "misspelt" else "layers.*"])
    for step, batch in enumerate(batches(mode)):
        if mode == "evaluation" and step == 2 and dist.get_rank() == 0:
            with torch.no_grad():
                model(batch)
        model(batch).sum().backward()


if len(sys.argv) > 2:
    lamina.launch(train, 2, (sys.argv[1],))
else:
    train(sys.argv[1])
"""


def terminal_of(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> str:
    """Everything that the command prints, up to torchrun's table; it must fail."""
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *before, "train.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    ours, found, table = done.stdout.partition(ELASTIC)
    assert not before or (found and "Disagreement" not in table and "broken" not in table), "said in the table again"
    return ours


CASES = {
    "misspelt": ("lamina.errors.UnitError: units: 'layrs.*' matches no module", "[on all 2 ranks; LAM-N: see docs/"),
    "same": ("ValueError: batch 2 is broken", "[on all 2 ranks]"),
    "loader": ("ValueError: batch 2 is broken", "[on rank 1 of 2]"),
    "evaluation": ("lamina.errors.Disagreement: ranks disagree", "[on all 2 ranks; LAM-H1: see docs/errors.md]"),
}


@pytest.mark.parametrize("mode", ["misspelt", "loader", "evaluation"])
def test_torchrun_shows_one_error(mode: str, tmp_path: Path) -> None:
    words, footer = CASES[mode]
    shown = run_warm(terminal_of, tmp_path, mode, before=TORCHRUN)
    assert shown.count(words) == 1 and shown.count(footer) == 1, shown
    assert shown.count("Traceback") == 2, shown  # this one, and torchrun's own behind it
    if mode != "loader":
        assert "rank 1 raised" not in shown
        assert "of torch and lamina\n" in shown and "lamina/runtime" not in shown, shown
    assert 'train.py", line' in shown


@pytest.mark.parametrize("mode", ["same", "evaluation"])
def test_launch_shows_one_error(mode: str, tmp_path: Path) -> None:
    words, _ = CASES[mode]
    shown = run_warm(terminal_of, tmp_path, mode, "launch")
    assert shown.count(words) == 1 and "`train` failed on all 2 ranks" in shown, shown
    assert shown.count("Traceback") == 2 and "lamina/runtime" not in shown, shown  # the launcher's and the rank's
    assert "launched.py" not in shown
    last = "[LAM-H1: see docs/errors.md]" if mode == "evaluation" else 'raise ValueError("batch 2 is broken")'
    assert last in shown


# ---- words, without processes --------------------------------------------------------------------------------------


def caught(source: str, file: str) -> BaseException:
    """What a program in that file raises when it runs `source`, called from here."""
    try:
        exec(compile(source, file, "exec"), {"lamina": lamina, "torch": torch})
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


def test_a_process_ends_though_a_peer_is_stopped(tmp_path: Path) -> None:
    """torch would take the groups down by waiting for the stopped rank, after the error has been printed.

    Interpreters of their own: how they end is the matter.
    """
    program = tmp_path / "train.py"
    program.write_text(SCRIPT.replace("raise ValueError", "os.kill(os.getpid(), signal.SIGSTOP)  # ", 1))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = os.environ | {"PYTHONPATH": SOURCE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), "loader"],
            env=common | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        said, _ = ranks[0].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 1
    assert "rank 1 is stopped" in said


def test_frames_of_torch_and_lamina_are_folded() -> None:
    ours = caught("lamina.sync(torch.nn.Linear(2, 2))", "train.py")
    shown = tell(ours, [0, 1, 2], 8)
    assert "train.py" in shown and "access.py" not in shown and "  ... 2 frames of torch and lamina\n" in shown
    assert shown.endswith("[on ranks 0-2 of 8; LAM-T: see docs/errors.md]")
    foreign = caught("torch.nn.Linear(2, 2)(torch.ones(3))", "train.py")
    frames = frames_text(traceback.extract_tb(foreign.__traceback__), foreign)
    assert "linear.py" in frames and "frames of torch and lamina" in frames, (
        "torch's own error shows where it came from"
    )


def test_an_error_without_a_frame_of_the_user_is_shown_whole() -> None:
    error = caught("lamina.sync(torch.nn.Linear(2, 2))", "train.py")
    inner = traceback.extract_tb(error.__traceback__)[2:]
    assert len(inner) == 2 and "access.py" in frames_text(inner, error) and "..." not in frames_text(inner, error)


def test_the_call_site_is_where_the_model_is_called() -> None:
    """Not the line of the model's forward, which is the same for a step and an evaluation."""
    seen: list[str] = []

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(call_site(sys._getframe()))
            return x

    def inner() -> None:
        model(torch.ones(1))

    model = Model()
    inner()
    assert seen == [f"test_terminal.py:{inner.__code__.co_firstlineno + 1}"]
