"""Programs that a test starts, as forks of a process that has imported everything already.

An interpreter that imports torch and lamina costs four seconds of CPU time; torchrun or `launch` with two ranks start
three. What a program does behind its imports is the same in a fork, which costs a tenth of a second:

    shown = run_warm(terminal_of, tmp_path, "misspelt")  # uses `subprocess` as always, and so may what it starts

Only the interpreter's start is left out, and the end of its memory: ids, parents, sessions, descriptors, signals, exit
codes, `__main__`, arguments, environment and hooks at exit are a new program's. What is about start or end themselves
(no import guard, memory, torch's groups when the interpreter ends) is started for true.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from unittest import mock

from harness import run_alone

TORCHS_SEED = 67280421310721  # of a process that has set none
_fork_exec: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
_register = atexit.register
_at_exit: list[Callable[..., Any]] = []  # registered by this program; the others are of imported modules
_warm: frozenset[str] = frozenset()  # modules that every program finds imported


class Program(NamedTuple):
    """What `python` was called with, as far as this file knows it."""

    kind: str  # "-c", "-m", "-" or "script"
    what: str
    argv: list[str]
    unbuffered: bool


def run_warm(fn: Callable[..., Any], *args: Any, timeout: float = 150, **kwargs: Any) -> Any:
    """`run_alone`, where programs that `fn` starts with this interpreter are forks."""
    return run_alone(_with_forks, fn, args, kwargs, timeout=timeout)


def _with_forks(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    global _warm
    _warm = sys.modules["harness_warm"].IMPORTED
    with mock.patch.object(subprocess, "_fork_exec", _fork), mock.patch.object(atexit, "register", _noted):
        return fn(*args, **kwargs)


def _noted(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    _at_exit.append(fn)
    return _register(fn, *args, **kwargs)


def _fork(args: Sequence[bytes | str], executables: Sequence[bytes], *how: Any) -> int:
    """`_posixsubprocess.fork_exec`: the new process's id."""
    program = program_of([os.fsdecode(arg) for arg in args])
    if program is None:
        return _fork_exec(args, executables, *how)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(program, *how[:14], how[-2])
    return pid


def program_of(args: list[str]) -> Program | None:
    """None if it is another executable, or has options that only an interpreter's start can obey."""
    if not args or args[0] != sys.executable:
        return None
    rest, unbuffered = args[1:], False
    while rest and rest[0] == "-u":
        rest, unbuffered = rest[1:], True
    if len(rest) >= 2 and rest[0] in ("-c", "-m"):
        return Program(rest[0], rest[1], [rest[0], *rest[2:]], unbuffered)
    if rest and rest[0] == "-":
        return Program("-", "<stdin>", rest, unbuffered)
    return Program("script", rest[0], rest, unbuffered) if rest and not rest[0].startswith("-") else None


def _become(
    program: Program,
    close_fds: bool,
    kept: Sequence[int],
    folder: bytes | str | None,
    environment: Sequence[bytes] | None,
    stdin: int,
    _stdin_of_parent: int,
    _stdout_of_parent: int,
    stdout: int,
    _stderr_of_parent: int,
    stderr: int,
    _errors_of_parent: int,
    errors: int,
    restore_signals: bool,
    new_session: bool,
    before: Callable[[], None] | None,
) -> NoReturn:
    """What fork, exec and the interpreter's start would do; never returns into the code that was forked."""
    status = 1
    try:
        for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            if source != -1:
                os.dup2(source, target)
        if folder is not None:
            os.chdir(folder)
        if new_session:
            os.setsid()
        if before is not None:
            before()
        _reset_signals()
        assert close_fds and restore_signals
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and (descriptor not in kept or descriptor == errors):
                with suppress(OSError):  # the listing's own
                    os.close(descriptor)
        if environment is not None:
            os.environ.clear()
            os.environ.update(os.fsdecode(line).split("=", 1) for line in environment)  # type: ignore[arg-type]
        _forget_the_parent()
        _open_streams(program.unbuffered)
        status = _run(program)
    except BaseException:
        os.write(2, f"a program was not forked as it should be: {sys.exc_info()}\n".encode())
    finally:
        os._exit(status)


def _reset_signals() -> None:
    """Handlers end with exec; what is ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _forget_the_parent() -> None:
    """The state that a new interpreter would not have: modules, hooks at exit, random numbers, helper processes."""
    while _at_exit:
        atexit.unregister(_at_exit.pop())
    for finalizer in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        finalizer.atexit = False
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.process._current_process._name = "MainProcess"  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]
    sys.excepthook = sys.__excepthook__
    for name in sys.modules.keys() - _warm:
        del sys.modules[name]
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(TORCHS_SEED)


def _open_streams(unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc] # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw: Any = io.FileIO(descriptor, "w", closefd=False)
        buffer = raw if unbuffered else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            buffer,
            "utf-8",
            "strict" if descriptor == 1 else "backslashreplace",
            line_buffering=descriptor == 2 or raw.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(program: Program) -> int:
    """The program as `__main__`, then what waits for its end; the exit code, negative for a signal."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = sys.modules["builtins"]
    sys.argv = list(program.argv)
    own = {"-m": os.getcwd(), "script": os.path.dirname(os.path.abspath(program.what))}.get(program.kind, "")
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [own, *given, *(path for path in sys.path if path not in ("", here, *given))]
    code = 0
    try:
        if program.kind == "-m":
            runpy._run_module_as_main(program.what)  # type: ignore[attr-defined]
        elif program.kind == "-c":
            exec(compile(program.what, "<string>", "exec", dont_inherit=True), vars(main))
        elif program.kind == "-":
            main.__file__ = program.what
            exec(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), vars(main))
        else:
            main.__file__ = os.path.abspath(program.what)
            with open(main.__file__, "rb") as file:
                source = file.read()
            exec(compile(source, main.__file__, "exec", dont_inherit=True), vars(main))
    except BaseException as error:
        code = _ended_by(error)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:  # uncaught, it ends the process as if nobody had listened
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


def _ended_by(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    error.__traceback__ = frames
    sys.excepthook(type(error), error, frames)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
