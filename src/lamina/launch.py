"""`launch(fn)`: run a function on every device of this machine, from a script or a notebook cell.

`torchrun` starts scripts, not functions; `torch.multiprocessing.spawn` needs an import guard, cannot see what a
notebook defined, and shows one traceback per rank; `nn.DataParallel` keeps one interpreter for all devices and copies
the model at every forward. `launch` starts one fresh process per device with torchrun's variables set, sends it the
function by value (ship.py), prints what the ranks print as it comes, and returns rank 0's result. If a rank fails or
dies, or on Ctrl-C, the others are ended and there is one error. The rank's half is launched.py.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

from . import ship
from .core.start_up import say_returned
from .errors import LaunchError, UsageError
from .launched import Ask, Failed, Report, Returned, Started

CPU_RANKS = 2  # without a GPU, two ranks show what the same code does on many devices
POLITE_S = 1.0  # from SIGINT to SIGKILL: `finally` blocks may run; well under the three seconds that are promised
START_S = 10.0  # imports that other ranks may still be busy with when one has failed
SAME_ERROR_S = 1.5  # a mistake of the user is raised on every rank at nearly the same time: wait to say it once
EXIT_S = 5.0  # how long a rank that has returned may take to exit


def launch(
    fn: Callable[..., Any], nprocs: int | None = None, args: Sequence[Any] = (), *, grace_s: float = POLITE_S
) -> Any:
    """Run `fn(*args)` on `nprocs` processes, one a device, and return what rank 0 returned.

    `nprocs` is the number of GPUs, or 2 CPU processes on a machine without one. The ranks find torchrun's variables
    (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, ...), so `lamina.shard` in `fn` needs no further set-up. Functions and classes
    of the script or notebook are sent by value, with the globals that they read. Output comes line by line; lines of
    other ranks than 0 begin with `[rank i]`.

    Inside a rank (under torchrun, or in a function that is launched already) `fn(*args)` is simply called, and every
    rank gets its own result.

    `grace_s` is how long ranks may go on after Ctrl-C, to save what they have; then they are killed.

    Raises `LaunchError` once, whatever number of ranks failed, and `UsageError` for arguments that mean nothing.
    """
    _check(fn, nprocs, args)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        started = int(os.environ["WORLD_SIZE"])
        if nprocs is not None and nprocs != started:
            raise UsageError(
                f"launch: nprocs={nprocs}, but this process is one of {started} ranks that run already (started by"
                f" torchrun or by launch). Leave nprocs out to run on these, or start {nprocs} of them."
            )
        return fn(*args)
    gpus = torch.cuda.device_count()
    count = nprocs if nprocs is not None else gpus or CPU_RANKS
    if gpus and count > gpus:
        raise UsageError(
            f"launch: nprocs={count}, but this machine has {gpus} GPUs. Type nprocs={gpus} or leave it out."
        )
    label = _label(fn)
    if nprocs is None:
        where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else f"{CPU_RANKS} CPU processes (no GPU was found)"
        print(f"lamina.launch: {label} on {where}", flush=True)
    run = _Run(label, count, _pack(fn, args, label), on_cpu=not gpus, grace_s=grace_s)
    try:
        return run.result()
    except LaunchError as error:
        raise error.with_traceback(None) from None  # what happened in here is nothing to the user


def _check(fn: Any, nprocs: Any, args: Any) -> None:
    if not callable(fn):
        raise UsageError(
            f"launch: fn must be a function, got {type(fn).__name__}. Type launch(train), without calling it."
        )
    if nprocs is not None and (not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1):
        raise UsageError(f"launch: nprocs must be a positive number of processes or None, got {nprocs!r}.")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"launch: args must be a tuple of arguments, got {type(args).__name__}. Type args=(value,).")


def _label(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return f"`{getattr(fn, '__name__', type(fn).__name__)}`"


def _pack(fn: Callable[..., Any], args: Sequence[Any], label: str) -> bytes:
    try:
        return ship.dumps((fn, tuple(args)))
    except Exception as problem:
        culprits = [f"argument {index}" for index, value in enumerate(args) if not _can_be_sent(value)]
        culprits += [f"the global `{name}`" for name, value in ship.globals_of(fn).items() if not _can_be_sent(value)]
        raise LaunchError(
            f"{label} cannot be sent to other processes because of {' and '.join(culprits) or 'what it refers to'}:"
            f" {problem}. Make it inside the function, or pass what is needed to make it in args."
        ) from None


def _can_be_sent(value: Any) -> bool:
    try:
        ship.dumps(value)
    except Exception:
        return False
    return True


class _Rank:
    """One process, the pipe over which it reports, and its output as far as it has come."""

    def __init__(self, index: int, ask: Ask, environment: dict[str, str]) -> None:
        self.index = index
        self.has_started = False
        self.report: Report | None = None
        ours, theirs = Pipe()
        # lamina and the function's modules must be found as they are found here; `__main__` must stay empty.
        code = f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; del gc, sys; "
        code += f"__import__('lamina.launched').launched.main({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C reaches the launcher only, and data workers of the rank end with its group
        )
        theirs.close()
        self.pipe: Connection | None = ours
        assert self.process.stdout is not None
        self.output: int | None = self.process.stdout.fileno()
        self._line = b""
        with suppress(OSError):  # a process that died at once is reported when its output ends
            ours.send_bytes(pickle.dumps(ask))

    def read_output(self) -> str:
        """The lines that are complete, to be printed."""
        assert self.output is not None
        data = os.read(self.output, 1 << 16)
        if not data:
            self.output = None
        *lines, self._line = (self._line + data).split(b"\n")
        if not data and self._line:
            lines, self._line = [self._line], b""
        prefix = f"[rank {self.index}] " if self.index else ""
        return "".join(f"{prefix}{line.decode(errors='replace')}\n" for line in lines)

    def read_report(self) -> None:
        assert self.pipe is not None
        try:
            said = pickle.loads(self.pipe.recv_bytes())
            if isinstance(said, Started):
                self.has_started = True
            else:
                self.report = said
        except (EOFError, OSError):
            self.pipe = None

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class _Run:
    """The ranks of one call, from start to end."""

    def __init__(self, label: str, count: int, payload: bytes, *, on_cpu: bool, grace_s: float) -> None:
        self._label, self._grace_s = label, grace_s
        # Held here as torchrun's agent does: no rank has to bind a port that was free a moment ago.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[_Rank] = []
        self._unwritten: OSError | ValueError | None = None  # why nobody can read what the ranks print
        try:
            for index in range(count):
                ask = Ask(payload, list(sys.argv), os.getcwd())
                self._ranks.append(_Rank(index, ask, _environment(index, count, self._store.port, on_cpu)))
        except BaseException:
            self._end()
            raise

    def result(self) -> Any:
        try:
            while any(rank.report is None for rank in self._ranks) and not self._failed():
                self._read(timeout_s=None)
                if self._unwritten is not None:
                    raise self._unwritten
            if self._failed():
                self._read_for(START_S, until=lambda rank: rank.has_started)
                self._read_for(SAME_ERROR_S, until=lambda rank: rank.report is not None)
                raise LaunchError(self._message()) from None
            self._read_for(EXIT_S)
        finally:
            self._end()
        report = self._ranks[0].report
        assert isinstance(report, Returned) and report.result is not None
        return pickle.loads(report.result)

    def _failed(self) -> bool:
        return any(
            isinstance(rank.report, Failed) or (rank.report is None and rank.pipe is None) for rank in self._ranks
        )

    def _read(self, timeout_s: float | None) -> bool:
        """Take what the ranks have to say; False if nothing is left to be said."""
        outputs = {rank.output: rank for rank in self._ranks if rank.output is not None}
        pipes = {rank.pipe: rank for rank in self._ranks if rank.pipe is not None}
        if not outputs and not pipes:
            return False
        for ready in wait([*outputs, *pipes], timeout_s):
            if isinstance(ready, Connection):
                rank = pipes[ready]
                rank.read_report()
                if isinstance(rank.report, Returned):
                    say_returned(self._store, rank.index)
            else:
                assert isinstance(ready, int)
                self._show(outputs[ready].read_output())
        return True

    def _show(self, text: str) -> None:
        """After a reader that has gone (`| head`, a `tee` that Ctrl-C ended as well) or a full disk nothing is shown.

        It is no reason to cut short the ranks' time to save: so nothing is raised here.
        """
        if not text or self._unwritten is not None or sys.stdout is None:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            self._unwritten = error

    def _read_for(self, seconds: float, until: Callable[[_Rank], bool] | None = None) -> None:
        """`until` holds for every rank that lives, if it is given."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            if until is not None and all(rank.pipe is None or until(rank) for rank in self._ranks):
                return
            if not self._read(left_s):
                return

    def _end(self) -> None:
        """End every rank that still lives, and whatever it has started."""
        try:
            for rank in self._ranks:
                if rank.process.poll() is None:
                    rank.signal(signal.SIGINT)
            deadline = time.monotonic() + self._grace_s
            while any(rank.process.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
                self._read(timeout_s=0.05)
        finally:  # also at a second Ctrl-C
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)
            for rank in self._ranks:
                rank.process.wait()
        self._read_for(POLITE_S)
        for rank in self._ranks:
            if rank.process.stdout is not None:
                rank.process.stdout.close()

    def _message(self) -> str:
        """A death explains the others' errors; else the first error does, said once for all ranks that share it."""
        count = len(self._ranks)
        failed = {rank.index: rank.report for rank in self._ranks if isinstance(rank.report, Failed)}
        for rank in self._ranks:
            if rank.report is None and rank.pipe is None:
                rank.process.wait()
                died = f"{self._label} died on rank {rank.index} of {count}: {_cause(rank.process.returncode)}"
                seen = [failure.error for failure in failed.values() if f"rank {rank.index} has died" in failure.error]
                return "\n\n".join([died, *seen[:1]])
        first = min(failed.values(), key=lambda failure: failure.at)
        sharing = [index for index, failure in failed.items() if failure.error == first.error]
        who = f"all {count} ranks" if len(sharing) == count > 1 else f"rank {sharing[0]} of {count}"
        if 1 < len(sharing) < count:
            who = f"ranks {', '.join(map(str, sharing))} of {count}"
        return f"{self._label} failed on {who}: {first.error}\n\n{first.traceback}"


def _environment(index: int, count: int, port: int, on_cpu: bool) -> dict[str, str]:
    """What torchrun would set."""
    environment = dict(os.environ)
    environment.update(
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    environment.setdefault("OMP_NUM_THREADS", str(threads) if on_cpu else "1")
    return environment


def _cause(exit_code: int) -> str:
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code} before `fn` had returned"
    name = signal.Signals(-exit_code).name
    hint = " (out of memory, if nobody sent it)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
