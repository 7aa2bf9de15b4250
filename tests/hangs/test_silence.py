"""Whatever is merely slow raises nothing, however much longer it takes than the limits."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hangs.training import SHORT, WIDTH, build, short_limits, step
from harness import run_ranks
from lamina.core import watch_evidence
from lamina.core.watch_evidence import Identity

LONG_S = 2.0 * SHORT.silent_s


def sleep() -> None:
    """A loader, a slow disk."""
    time.sleep(LONG_S)


def compute() -> None:
    """Python, and C that gives nobody else a turn."""
    until = time.monotonic() + LONG_S / 2
    while time.monotonic() < until:
        sum(range(1000))
    ctypes.PyDLL(None).usleep(int(LONG_S / 2 * 1e6))


def debug() -> None:
    """`breakpoint()`: the main thread reads a line that somebody types at last."""
    reader, writer = os.pipe()
    threading.Timer(LONG_S, os.write, (writer, b"continue\n")).start()
    with os.fdopen(reader) as prompt:
        assert prompt.readline() == "continue\n"
    os.close(writer)


def stop_shortly() -> None:
    """Ctrl-Z and `fg`, below the limit; the other rank waits meanwhile."""
    os.kill(os.getpid(), signal.SIGSTOP)


def wake_the_other(pid: int) -> None:
    """Let a stopped process go on before it has been stopped for too long."""
    deadline = time.monotonic() + 30
    while (stat := watch_evidence._stat(pid)) is not None and stat[0] != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(SHORT.stopped_s / 3)
    os.kill(pid, signal.SIGCONT)


SLOW: tuple[Callable[[], None], ...] = (sleep, compute, debug)


def be_slow() -> float:
    """Rank 1 is slow in every way before a step, and before a barrier of the user's that both come to."""
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    with short_limits():
        model = build()
        step(model)
        for act in SLOW:
            if dist.get_rank() == 1:
                act()
            step(model)
        if dist.get_rank() == 1:
            sleep()
        dist.barrier()
        if dist.get_rank() == 1:
            stop_shortly()
        else:
            threading.Thread(target=wake_the_other, args=(pids[1],)).start()
        step(model)
        return float(model(torch.ones(1, WIDTH)).sum().detach())


def test_slow_ranks_are_waited_for() -> None:
    first, second = run_ranks(2, be_slow, timeout=60)
    assert first == second


def be_slow_without_the_model(own: str) -> float:
    """Training is over and the model gone; rank 1 does what it alone has to do before ranks meet again."""
    with short_limits():
        model = build()
        model(torch.ones(2, WIDTH)).sum().backward()
        kept = list(model.parameters())
        del model
        gc.collect()
        if dist.get_rank() == 1:
            time.sleep(2 * LONG_S)
        if own == "barrier":
            dist.barrier()
        elif own == "parameter":
            return float(kept[0].full().sum())  # type: ignore[operator]
        else:
            step(build())
        return 0.0


@pytest.mark.parametrize("own", ["barrier", "parameter", "next model"])
def test_a_slow_rank_that_has_dropped_the_model_is_waited_for(own: str) -> None:
    first, second = run_ranks(2, be_slow_without_the_model, own, timeout=60)
    assert first == second


@pytest.mark.parametrize(
    ("state", "said"), [("R", "runs"), ("S", "runs"), ("D", "runs"), ("t", "runs"), ("T", "is stopped")]
)
def test_a_process_that_a_debugger_holds_runs(state: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [state, *("0" for _ in range(18)), "77", *("0" for _ in range(30))]
    monkeypatch.setattr(watch_evidence, "_stat", lambda pid: fields)
    assert watch_evidence.state_of(Identity("host", "node", 5, "77")) == said
    assert "has died" in watch_evidence.state_of(Identity("host", "node", 5, "76")), "another process, the same number"


def test_this_process_runs() -> None:
    own = Identity.own()
    assert own.pid == os.getpid() and watch_evidence.state_of(own) == "runs"
