"""Rank processes that stay alive between tests, and one call to run a function on all of them.

`torch.multiprocessing.spawn` and torch's own `MultiProcessTestCase` start new processes for every test: seconds of
imports each time, and a rank that hangs takes the test run with it. Here the ranks of a world are started once, with
Gloo on the loopback interface, and keep their default process group until the session ends:

    def work(scale):                       # at module level, so that the ranks can import it
        return dist.get_rank() * scale

    def test_work():
        assert run_ranks(2, work, 10) == [0, 10]

A rank that raises gives one `RankFailure` in the test; a rank that dies or hangs costs the pool of that world, and the
next call starts a new one. After every call the ranks run one collective on the default group: a test that left it out
of step is not allowed to spoil the next one. `run_alone` is for what must begin in a process of its own, without ranks.
The worker's half is harness_worker.py; what all processes have imported is harness_warm.py.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import harness_worker
from harness_worker import Answer, Call, Settled, Streams

START_TIMEOUT_S = 120.0  # a cold import of torch by four ranks on two busy cores
GRACE_S = 10.0  # how long the others may go on once one rank has failed: what they notice in one, on busy cores
# a Gloo group has a thread that wakes a hundred times a second; a pool that collected so many is replaced
MAX_GROUPS = 24


class RankError(NamedTuple):
    type_name: str
    message: str
    traceback: str


class RankFailure(Exception):
    """Some ranks raised, died or hung; `errors` holds what each of these said, `results` what the others returned."""

    def __init__(self, errors: dict[int, RankError], results: dict[int, Any]) -> None:
        super().__init__(_describe(errors))
        self.errors = errors
        self.results = results


class RankTimeout(RankFailure):
    """At least one rank did not end in time; its entry in `errors` has the type name "Hung" and its stack."""


class _Settings:
    debug = False
    has_server = False  # one that another process has started


_pools: dict[int, _Pool] = {}
_settings = _Settings()


def configure(*, debug: bool) -> None:
    """Session-wide settings, from pytest's options; ranks apply them at the next call."""
    _settings.debug = debug


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 180, **kwargs: Any) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world` ranks at once and return what they returned, by rank.

    `fn` lives at module level (or is any other callable that pickle takes); it finds its rank with
    `torch.distributed.get_rank()`. Results come back by value. `timeout` is in seconds and does not count the start of
    the processes. Every rank starts with seed 0, float32 as default dtype and gradients on.
    """
    payload, modules = _pack((fn, args, kwargs))
    pool = _pools.get(world)
    if pool is None:
        pool = _pools[world] = _Pool(world)
    for other in _pools.values():
        if other is not pool:
            other.rest()
    pool.wake()
    try:
        return pool.run(Call(payload, modules, _settings.debug), timeout)
    finally:
        if pool.spoiled:
            _pools.pop(world, None)
            pool.kill()


def run_alone(fn: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> Any:
    """Call `fn` in a new process that is no rank of anything and has torch imported already; return what it returns."""
    call = Call(*_pack((fn, args, kwargs)), _settings.debug)
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=harness_worker.serve_once, args=(call, theirs, Streams()), name="alone")
    process.start()
    theirs.close()
    try:
        answer: Answer | None = pickle.loads(ours.recv_bytes()) if ours.poll(timeout) else None
    except EOFError:
        process.join()
        answer = Answer(None, ("Died", f"the process ended with exit code {process.exitcode}", ""))
    finally:
        process.kill()
        process.join()
        ours.close()
    if answer is None:
        raise RankTimeout({0: RankError("Hung", f"no answer within {timeout:g} s", "")}, {})
    if answer.error is not None:
        raise RankFailure({0: RankError(*answer.error)}, {})
    assert answer.payload is not None
    return pickle.loads(answer.payload)


def expect_error(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    error: str,
    contains: Sequence[str] = (),
    timeout: float = 20,
    **kwargs: Any,
) -> dict[int, RankError]:
    """Assert that EVERY rank raises an error of the type named `error` whose message has all words of `contains`."""
    try:
        results = run_ranks(world, fn, *args, timeout=timeout, **kwargs)
    except RankFailure as failure:
        errors, returned = failure.errors, sorted(failure.results)
    else:
        raise AssertionError(f"expected {error} on all {world} ranks, but they returned {results!r}")
    if returned:
        raise AssertionError(
            f"expected {error} on all {world} ranks, but ranks {returned} returned\n{_describe(errors)}"
        )
    for rank, got in sorted(errors.items()):
        if got.type_name != error:
            raise AssertionError(f"expected {error}, but rank {rank} raised {got.type_name}\n{_describe(errors)}")
        missing = [word for word in contains if word not in got.message]
        if missing:
            raise AssertionError(f"rank {rank}: {error} without {missing} in its message: {got.message}")
    return errors


def shutdown() -> None:
    """End all ranks; called when the session ends."""
    while _pools:
        _pools.popitem()[1].kill()


atexit.register(shutdown)


def fork_server() -> ForkServerContext:
    """It has torch imported once: a new process then costs a tenth of a second instead of seconds."""
    context = multiprocessing.get_context("forkserver")
    if not _settings.has_server:
        start_fork_server()
    return context


def start_fork_server() -> str | None:
    """Where the server listens, for `use_fork_server`; None if that is known to its own process only."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["harness_warm"])
    # Python 3.11 forgets to hand the path to the server, which would pass over a module that it does not find
    path = os.environ.get("PYTHONPATH")
    folders = [str(Path(__file__).parent), *([path] if path else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    if sys.version_info >= (3, 14):
        return None  # it asks for a key
    return forkserver._forkserver._forkserver_address  # type: ignore[attr-defined, no-any-return]


def use_fork_server(address: str) -> None:
    """Have processes forked by the server that another process has started, and ends; their output stays ours."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    _, server._forkserver_alive_fd = os.pipe()  # it is sent along, for servers that ranks would start
    server.ensure_running = lambda: None
    _settings.has_server = True


class _Pool:
    """The rank processes of one world, each with a pipe to it."""

    def __init__(self, world: int) -> None:
        import torch.distributed as dist  # here, so that collecting tests does not wait for torch

        self.world = world
        self.spoiled = False
        self._calm = False  # no model lives on any rank, whose watch would miss the others
        self._resting = False
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="lamina-ranks-")
        context = fork_server()
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, self._store.port, theirs, self._stack_file(rank), Streams())
            process = context.Process(target=harness_worker.serve, args=arguments, name=f"world-{world}-rank-{rank}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        answers, silent = self._collect(START_TIMEOUT_S)
        if silent or any(not isinstance(answer, Settled) for answer in answers.values()):
            self.kill()
            raise RuntimeError(f"the ranks of world {world} did not start: {answers}, no answer from {sorted(silent)}")

    def run(self, call: Call, timeout_s: float) -> list[Any]:
        self.spoiled = True  # until all ranks have settled, also if the test is interrupted
        for pipe in self._pipes:
            try:
                pipe.send_bytes(pickle.dumps(call))
            except OSError:
                pass  # a rank that died since; _collect reports it
        answers, silent = self._collect(timeout_s)
        errors, results = self._sort(answers, silent, timeout_s)
        if not any(rank in silent or answers[rank] is None for rank in range(self.world)):
            self._settle()
        if silent:
            raise RankTimeout(errors, results)
        if errors:
            raise RankFailure(errors, results)
        return [results[rank] for rank in range(self.world)]

    def rest(self) -> None:
        """Stop the ranks until `wake`: each has a thread of Gloo's that wakes a hundred times a second."""
        if self._calm and not self._resting:
            self._signal(signal.SIGSTOP)
            self._resting = True

    def wake(self) -> None:
        if self._resting:
            self._signal(signal.SIGCONT)
            self._resting = False

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _settle(self) -> None:
        """Let the ranks meet in one collective on the default group; the pool lives on if they all do."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(None))
        answers, silent = self._collect(2 * GRACE_S)
        in_step = all(isinstance(answer, Settled) and answer.in_step for answer in answers.values())
        crowded = any(isinstance(answer, Settled) and answer.groups > MAX_GROUPS for answer in answers.values())
        self.spoiled = bool(silent) or not in_step or crowded
        self._calm = all(isinstance(answer, Settled) and answer.calm for answer in answers.values())

    def _collect(self, timeout_s: float) -> tuple[dict[int, Any], set[int]]:
        """One message from every rank (None where it died), and the ranks that were silent."""
        answers: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(self.world), strict=True))
        deadline = time.monotonic() + timeout_s
        failed = False
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            if failed and all(self._is_stopped(rank) for rank in waiting.values()):
                break  # they say nothing more
            for ready in multiprocessing.connection.wait(list(waiting), timeout=min(left_s, 1.0) if failed else left_s):
                assert isinstance(ready, multiprocessing.connection.Connection)
                rank = waiting.pop(ready)
                try:
                    answers[rank] = pickle.loads(ready.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = None
                if answers[rank] is None or (isinstance(answers[rank], Answer) and answers[rank].error is not None):
                    deadline, failed = min(deadline, time.monotonic() + GRACE_S), True
        return answers, set(waiting.values())

    def _sort(
        self, answers: dict[int, Any], silent: set[int], timeout_s: float
    ) -> tuple[dict[int, RankError], dict[int, Any]]:
        errors: dict[int, RankError] = {}
        results: dict[int, Any] = {}
        for rank, answer in answers.items():
            if answer is None:
                self._processes[rank].join(timeout=GRACE_S)
                code = self._processes[rank].exitcode
                errors[rank] = RankError("Died", f"the process ended with exit code {code}", "")
            elif answer.error is not None:
                errors[rank] = RankError(*answer.error)
            else:
                try:
                    results[rank] = pickle.loads(answer.payload)
                except Exception as problem:  # a result that only the rank can build, such as one of a class it made up
                    errors[rank] = RankError(type(problem).__name__, f"the result cannot be read: {problem}", "")
        waited = f"{timeout_s:g} s" if not errors else f"{GRACE_S:g} s after another rank had failed"
        for rank in silent:
            errors[rank] = RankError("Hung", f"no answer within {waited}", self._stack(rank))
        return errors, results

    def _is_stopped(self, rank: int) -> bool:
        try:
            stat = Path(f"/proc/{self._processes[rank].pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(") ")[2].startswith("T")

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.stack"

    def _stack(self, rank: int) -> str:
        """Where a silent rank is: its worker writes its Python stacks on SIGUSR1."""
        process, path = self._processes[rank], self._stack_file(rank)
        if process.pid is None or not process.is_alive():
            return ""
        if self._is_stopped(rank):
            return "(the process is stopped)"
        os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not path.read_text().endswith(" in <module>\n"):  # the last line of all
            multiprocessing.connection.wait([process.sentinel], timeout=0.05)
        return path.read_text()


class _Packer(pickle.Pickler):
    """Pickles, and notes the source file of every module that the pickle refers to.

    pytest imports test modules under names that a fresh interpreter could not find; the ranks load them from the file.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            module = sys.modules.get(obj.__module__)
            file = getattr(module, "__file__", None)
            if module is not None and file is not None and "site-packages" not in file:
                self.modules[obj.__module__] = file
        return NotImplemented


def _pack(message: Any) -> tuple[bytes, dict[str, str]]:
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    try:
        packer.dump(message)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise TypeError(f"run_ranks takes module-level functions and picklable arguments: {problem}") from problem
    return buffer.getvalue(), packer.modules


def _describe(errors: dict[int, RankError]) -> str:
    """Each distinct error once, with the ranks that share it and one traceback."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, error in sorted(errors.items()):
        ranks_of.setdefault((error.type_name, error.message), []).append(rank)
    parts = []
    for (type_name, message), ranks in ranks_of.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
        parts.append(f"{who}: {type_name}: {message}\n{errors[ranks[0]].traceback}".rstrip())
    return "\n\n".join(parts)
