"""A function on fresh rank processes with a hard limit, and one word for how it ended.

The tests' harness keeps its ranks; here every run gets new ones, since a run may hang or crash, and what one leaves
behind must not touch the next. A fork server has torch imported, so that a rank starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 20.0
ERROR_LIMIT_S = 10.0  # a named error has to be there on every rank by then

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"])


class Named(Exception):
    """Raised by a case: the error that it provoked came, and says what it must."""


@dataclass(frozen=True)
class Said:
    """What one rank said: a value, or an error; None for one that said nothing."""

    value: Any = None
    error: str | None = None  # "TypeName: message"
    is_named: bool = False
    after_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    word: str  # right, silently wrong, named error, crash, hang, not offered
    detail: str = ""
    deviation: float | None = None

    def __str__(self) -> str:
        return f"{self.word} ({self.detail})" if self.detail else self.word


def run(world: int, function: Callable[..., Any], *args: Any, words: Sequence[str] = ()) -> list[Said | None]:
    """What each rank said within the limit; afterwards no process of the run is left."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_rank, args=(rank, world, store.port, theirs, function, args, words))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    said: dict[int, Said | None] = {}
    waiting = dict(zip(pipes, range(world), strict=True))
    deadline = None  # the limit counts from where all ranks have started
    while waiting and (deadline is None or time.monotonic() < deadline):
        left_s = 120.0 if deadline is None else deadline - time.monotonic()
        for ready in multiprocessing.connection.wait(list(waiting), timeout=max(left_s, 0)):
            try:
                message = ready.recv()
            except (EOFError, OSError):
                message = Said(error="the process died")
            if message == "started":
                deadline = time.monotonic() + LIMIT_S
            else:
                said[waiting.pop(ready)] = message
    for process in processes:
        process.kill()
        process.join()
    return [said.get(rank) for rank in range(world)]


def _rank(rank: int, world: int, port: int, pipe: Any, function: Any, args: Any, words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(minutes=30))
    dist.barrier()
    torch.manual_seed(0)
    pipe.send("started")
    begun = time.monotonic()
    try:
        said = Said(function(*args), after_s=time.monotonic() - begun)
    except Exception as error:
        text = str(error) if isinstance(error, Named) else f"{type(error).__name__}: {error}"
        is_named = isinstance(error, Named) or (bool(words) and all(word in str(error) for word in words))
        said = Said(None, text, is_named, time.monotonic() - begun)
    pipe.send(said)
    if said.error is None:
        with contextlib.suppress(RuntimeError):  # they may be gone
            dist.barrier()  # the others may still need this rank


def judge(said: Sequence[Said | None], tolerance: float) -> Outcome:
    """One word for what all ranks said; values are deviations from one process."""
    silent = [rank for rank, each in enumerate(said) if each is None]
    errors = {rank: each.error for rank, each in enumerate(said) if each is not None and each.error is not None}
    if errors:
        first = next(iter(errors.values())).split("\n")[0]
        named = [each is not None and each.is_named and each.after_s < ERROR_LIMIT_S for each in said]
        if all(named):
            return Outcome("named error", _short(first))
        others = f"; {_ranks(silent)} hangs" if silent else ""
        alone = f" on {_ranks(list(errors))} only" if len(errors) < len(said) and not silent else ""
        return Outcome("crash", f"{_short(first)}{alone}{others}")
    if silent:
        return Outcome("hang", "" if len(silent) == len(said) else f"{_ranks(silent)} only")
    values = [each.value for each in said if each is not None]
    if any(value is None for value in values):
        return Outcome("not offered")
    worst = max(math.inf if math.isnan(value) else value for value in values)
    if worst <= tolerance:
        return Outcome("right", deviation=worst)
    return Outcome("silently wrong", "" if math.isinf(worst) else f"off by {worst:.1e}", worst)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _short(text: str, length: int = 110) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
