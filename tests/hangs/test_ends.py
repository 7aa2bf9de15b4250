"""How processes end, and begin again: whoever ends first, the others end too, and in peace.

Interpreters of their own where their end is the matter, else forks (forked_programs.py).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from forked_programs import run_warm

SOURCE = str(Path(__file__).parents[2] / "src")
# No asserts and no docstrings; what is left open is an error, and so is any warning.
STRICT = ("-OO", "-X", "dev", "-W", "error")
NOWHERE = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb", "HOME": "/nowhere", "TMPDIR": "/nowhere"}
LIMIT_S = 20.0  # of an end, on a busy machine; without the mend it takes half an hour
PROGRAM = """
import atexit, ctypes, os, signal, sys, time

rank, mode = int(os.environ["RANK"]), sys.argv[1]
if mode == "held" and rank == 0:  # registered before all others, so called last; it never gives up the interpreter
    atexit.register(ctypes.PyDLL(None).usleep, 3_000_000)

import torch, torch.distributed as dist
import lamina
from lamina.core import control, watch

torch.set_num_threads(1)
if mode != "late":
    beat_s = 5.0 if mode in ("killed", "interrupted") else 0.2  # no word is under way when rank 0 ends
    watch.configure(watch.Limits(silent_s=1.2, proof_s=0.4, stopped_s=0.8, grace_s=0.4, beat_s=beat_s))


def step(model):
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()


def one_process(steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        sum(model(torch.full((2, 8), 1.0 + r, dtype=torch.float64)).square().mean() / 2 for r in range(2)).backward()
        optimizer.step(), optimizer.zero_grad()
    return model


def fails(act):
    try:
        act()
    except lamina.errors.StateError as error:
        assert "destroy_process_group" in str(error), error
        return True
    return False


def again():
    kept = []
    for number in range(4):
        torch.manual_seed(0)
        model = lamina.shard(torch.nn.Linear(8, 8, dtype=torch.float64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.full((2, 8), 1.0 + rank, dtype=torch.float64)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        for param, plain in zip(model.parameters(), one_process(2).parameters()):
            assert torch.allclose(param.full(), plain, rtol=0, atol=1e-10)
        loss = model(x).sum()
        if number % 2:
            kept.append((model, loss))
        for old, lost in kept[:-1] if number % 2 else kept:
            uses = [lambda: old(x), lost.backward, old.weight.full, old.weight.norm, lambda: lamina.save("old", old)]
            assert all(map(fails, uses)), number
        dist.destroy_process_group()
    assert fails(lambda: kept[0][0](x))
    time.sleep(1.0 - rank)  # torch complains where a word to the store is under way as that ends


def main():
    if mode == "again":
        return again()
    torch.manual_seed(0)
    model = lamina.shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), units=[torch.nn.Linear])
    step(model), step(model)
    if mode == "held" and rank == 1:
        send = control.Flags._send
        control.Flags._send = lambda *given: (time.sleep(1.8), send(*given))[1]
    if mode in ("killed", "interrupted") and rank == 0:
        time.sleep(0.3)  # the first reports have been answered, and rank 1 does not ask for the others yet
    if mode in ("killed", "stopped") and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL if mode == "killed" else signal.SIGSTOP)
    if mode == "interrupted" and rank == 0:
        raise KeyboardInterrupt
    step(model)
    if mode == "late" and rank == 1:
        time.sleep(2.5)


main()
"""


class End(NamedTuple):
    code: int
    said: str
    seconds: float  # after the first one


def ends_of(
    folder: Path,
    mode: str,
    watched: tuple[int, ...] = (0, 1),
    launcher: bool = False,
    flags: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
) -> list[End]:
    """Ranks as they end; those that are not watched are killed then.

    Args:
        flags: of the interpreter.
        variables: more of the environment's.
        launcher: this process holds the store, as torchrun does. Else rank 0 does.
    """
    (folder / "train.py").write_text(PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    held = dist.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False) if launcher else None
    common = os.environ | {"PYTHONPATH": SOURCE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    common |= variables or {}
    if held is not None:
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = []
    for rank in (0, 1):
        with open(folder / f"said {rank}", "w") as output:
            command = [sys.executable, *flags, str(folder / "train.py"), mode]
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    ended: dict[int, float] = {}
    deadline = time.monotonic() + 100
    while not ended.keys() >= set(watched) and time.monotonic() < deadline:
        for rank in watched:
            if rank not in ended and ranks[rank].poll() is not None:
                ended[rank] = time.monotonic()
        time.sleep(0.05)
    for process in ranks:
        process.kill()
        process.wait()
    said = [(folder / f"said {rank}").read_text() for rank in (0, 1)]
    assert ended.keys() >= set(watched), said
    return [End(ranks[r].returncode, said[r], ended[r] - min(ended.values())) for r in watched]


def test_a_clean_end_says_nothing_whoever_is_last(tmp_path: Path) -> None:
    for end in run_warm(ends_of, tmp_path, "late"):
        assert (end.code, end.said) == (0, "")


def test_a_result_that_arrives_while_the_interpreter_ends_does_no_harm(tmp_path: Path) -> None:
    """Flags of the last step, of a model that is gone. Of a true interpreter: forks do not take theirs down."""
    for end in ends_of(tmp_path, "held"):
        assert (end.code, end.said) == (0, "")


TORCHS_LOG = re.compile(r"\[rank\d\]:\[W\d+ [^\n]*\[c10d\] .*?\n\n", re.DOTALL)


@pytest.mark.parametrize("mode", ["late", "killed"])
def test_an_interpreter_without_asserts_docstrings_home_or_mercy(mode: str, tmp_path: Path) -> None:
    first, last = ends_of(tmp_path, mode, flags=STRICT, variables=NOWHERE)
    if mode == "late":  # the store's own log may tell that it ended in the middle of a word
        assert [(end.code, TORCHS_LOG.sub("", end.said)) for end in (first, last)] == [(0, ""), (0, "")]
    else:
        assert first.code == -signal.SIGKILL
        assert last.code == 1 and "rank 0 has died" in last.said and last.said.count("Traceback") == 1
        assert last.seconds < LIMIT_S and "frame #" not in last.said


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("killed", -signal.SIGKILL, "rank 0 has died"),
        ("interrupted", -signal.SIGINT, "rank 0 "),
    ],
)
def test_whoever_held_the_store_is_named_after_its_end(mode: str, code: int, words: str, tmp_path: Path) -> None:
    first, last = run_warm(ends_of, tmp_path, mode)
    assert first.code == code
    assert last.code == 1 and words in last.said and "LAM-H" in last.said and last.said.count("Traceback") == 1
    assert last.seconds < LIMIT_S and "frame #" not in last.said


def test_whoever_holds_the_store_is_named_while_it_is_stopped(tmp_path: Path) -> None:
    (end,) = run_warm(ends_of, tmp_path, "stopped", (1,))
    assert end.code == 1 and "rank 0 is stopped" in end.said and end.said.count("Traceback") == 1


@pytest.mark.parametrize("launcher", [False, True])
def test_a_process_trains_again(launcher: bool, tmp_path: Path) -> None:
    """In a default group after the first: torch's names begin anew, and the store has its old addresses."""
    for end in run_warm(ends_of, tmp_path, "again", (0, 1), launcher):
        assert (end.code, end.said) == (0, "")


WAITS = """
import signal, sys, torch, lamina
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background it is ignored
sys.stderr.write("asks ")
sys.stderr.flush()
lamina.shard(torch.nn.Linear(2, 2))
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_who_waits_for_ranks_that_do_not_come_hears_ctrl_c(rank: str, tmp_path: Path) -> None:
    """Without a launcher; a rank that waits in torch's own rendezvous hears nothing for half an hour."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank, "PYTHONPATH": SOURCE}
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen([sys.executable, "-c", WAITS], env=os.environ | variables, stderr=said)
        try:
            while "asks" not in (tmp_path / "said").read_text():
                time.sleep(0.05)
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=LIMIT_S) == -signal.SIGINT
        finally:
            process.kill()
    assert "KeyboardInterrupt" in (tmp_path / "said").read_text()
