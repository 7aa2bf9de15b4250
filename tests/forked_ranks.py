"""Ranks of `launch` that are forks of the process that launches them, for tests of what becomes of them later.

`launch` starts an interpreter a rank, which imports torch: three seconds of CPU time each. How that goes is shown by
tests that start a script, a cell or standard input. What `launch` says when ranks fail, die, or return needs no fresh
interpreter: here a rank begins in a fork, with a `__main__`, environment, session, descriptors and output of its own.
For a process of `run_alone`, which has imported all and has no threads that hold anything.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from unittest import mock

from lamina.errors import LaunchError
from lamina.launch import launch


class Forked:
    """As much of `subprocess.Popen` as the launcher asks for."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **how: Any) -> None:
        wanted = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        assert how == {**wanted, "start_new_session": True} and command[:-1] == [sys.executable, "-u", "-c"]
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command[-1], env, writer, {0, 1, 2, *pass_fds})
        os.close(writer)
        self.stdout = os.fdopen(reader, "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _become(code: str, environment: dict[str, str], output: int, kept: set[int]) -> NoReturn:
    """What the new interpreter would do; never returns into the code that was forked."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, descriptor)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(code, vars(main))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class Outcome(NamedTuple):
    result: Any
    failure: str | None  # the words of the LaunchError
    has_cause: bool
    printed: str


def define(source: str) -> Callable[..., Any]:
    """The function `work` as a script would have defined it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(source), namespace)
    return namespace["work"]


def launched(source: str, nprocs: int | None, before: str = "", after: str = "") -> Outcome:
    """In a process of its own: launch the `work` of `source`; ranks run `before` before anything else, `after` last."""

    def start(command: list[str], **how: Any) -> Forked:
        return Forked([*command[:-1], before + command[-1] + after], **how)

    printed = io.StringIO()
    result, failure, has_cause = None, None, False
    with (
        mock.patch.object(subprocess, "Popen", start),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            result = launch(define(source), nprocs)
        except LaunchError as error:
            failure, has_cause = str(error), error.__cause__ is not None
    return Outcome(result, failure, has_cause, printed.getvalue())
