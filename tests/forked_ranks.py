"""What `launch` says and returns when its ranks fail, die or return, with ranks that are forks.

Ranks begin with code of the test's around `launch`'s own. How ranks start in a fresh interpreter is shown by the tests
that start a script for true.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from forked_programs import run_warm
from lamina.errors import LaunchError
from lamina.launch import launch


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
    return run_warm(_launched, source, nprocs, before, after)


def _launched(source: str, nprocs: int | None, before: str, after: str) -> Outcome:
    popen = subprocess.Popen

    def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        return popen([*command[:-1], before + command[-1] + after], **how)

    printed = io.StringIO()
    result, failure, has_cause = None, None, False
    with (
        mock.patch.object(subprocess, "Popen", start),
        mock.patch("torch.cuda.device_count", lambda: 0),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            result = launch(define(source), nprocs)
        except LaunchError as error:
            failure, has_cause = str(error), error.__cause__ is not None
    return Outcome(result, failure, has_cause, printed.getvalue())
