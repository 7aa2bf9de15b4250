"""The watch: a thread that finds out why a rank waits, and ends the wait when it can never end by itself.

torch gives up after minutes and says which collective timed out on this rank, not which rank is elsewhere and where.
Here every process reports where it is (watch_board.py), from facts read off its threads and groups
(watch_evidence.py), and a rank that waits asks for a verdict (watch_judge.py). The step itself writes plain attributes
and nothing else: reports are made and sent once a second by two threads that sleep in between.

Note [How a verdict arrives]
    1. A host wait of lamina's looks up every quarter of a second and raises the verdict.
    2. A thread inside a call of torch.distributed, or blocked behind the device, cannot look up: the verdict is set as
       its pending exception, raised when the call returns. It returns when peers that have raised exit. If it does not,
       the process's groups are aborted; if that does not help either, the message is printed and the process ends.
    3. A model whose ranks have parted stays broken: its later waits raise the same verdict.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import multiprocessing.util
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Protocol

import torch.distributed as dist

from lamina.core import teardown
from lamina.core.watch_board import Board, answers, is_held_by_launcher
from lamina.core.watch_evidence import Frames, Identity, Neighbours, frames_of, group_counts
from lamina.core.watch_judge import DIED, STOPPED, GroupCount, Limits, Report, Verdict, Wait, describe
from lamina.core.watch_sever import abort_groups, connections, raise_in, sever

FIRST_POLL = datetime.timedelta(seconds=1.0)  # waits shorter than this leave no trace
BEATS_TO_MEET = 30  # after so many reports all ranks of this host have registered
SHORT_PAUSE_S = 0.05
TEARDOWN_S = 5  # that a process whose ranks have parted may take to end
NAMING_S = 5.0  # how long to look for the rank that broke a connection
# of it: rank 0, if it holds the store, may be about to end, and torch would print the stack of a word to it
QUIET_S = 1.0
NEXT_POLL = datetime.timedelta(seconds=0.25)


class Watched(Protocol):
    """What the watch reads of a control: see control.py."""

    key: str

    def place(self) -> str: ...
    def doing(self) -> str: ...
    def history(self) -> dict[int, str]: ...
    def device_is_busy(self) -> bool: ...


class Waitable(Protocol):
    """A collective's handle, or something like one."""

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Raise RuntimeError with "timed out" in its text when the time is over."""


@dataclass
class Waiting:
    """A host wait of lamina's that has lasted for a while."""

    number: int
    since: float  # monotonic
    control: str
    doing: str  # "" : what the control says
    missing: Callable[[], tuple[int, ...]]
    lost: str = ""


@dataclass
class Blocked:
    """A thread that has not moved since."""

    number: int
    since: float
    frames: Frames
    groups: dict[str, GroupCount]


class Watch:
    """One a process, started by the first control of a world of several ranks."""

    def __init__(self, store: dist.Store, rank: int, world: int, limits: Limits) -> None:
        self.store, self.rank, self.limits = store, rank, limits
        self.board = Board(store, rank, world, limits)
        self.thread = threading.get_ident()  # the one that trains
        self.waiting: Waiting | None = None
        self.recent: Callable[[], Watched | None] = lambda: None
        self.dropped: list[str] = []
        self._last_place, self._last_phases = "lamina.shard", dict[str, dict[int, str]]()  # once `recent` is gone
        self.left, self.failed = "", False
        self.broken: dict[str, Verdict] = {}  # by control
        self.ended: dict[int, Verdict] = {}  # by the number of the wait
        self.last_verdict: Verdict | None = None  # of a wait of this rank
        self.last_words: Callable[[Verdict], None] = lambda verdict: None  # before the process is ended from here
        self._process = os.getpid()
        self._identity = Identity.own()
        self.neighbours = Neighbours()
        self._quiet_until = 0.0  # monotonic; nothing is sent to the store until then
        self._still: Blocked | None = None
        self._blocked: Blocked | None = None  # the same, if it is blocked
        self._groups: dict[str, GroupCount] = {}
        self._beat, self._posted_at, self._answered_at = 0, 0.0, time.monotonic()
        self._cut: tuple[Verdict, float] | None = None
        self._abort: threading.Thread | None = None
        self._sever_now = self._store_is_gone = False
        self.problem: Exception | None = None  # the first one of our own, for tests and reports
        self._wakes, self._sent, self._closing = (threading.Event(), threading.Event()), threading.Event(), False
        self.board.register(self._identity)
        self.board.post(self.report())  # a rank that dies early has been heard of
        if parent_process() is not None:  # such a process ends without the interpreter's exit
            multiprocessing.util.Finalize(None, stop, exitpriority=0)
        self._threads = [
            threading.Thread(target=self._run, args=(turn, wake), name=f"lamina-{name}", daemon=True)
            for name, turn, wake in zip(("watch", "board"), (self._look_around, self._talk), self._wakes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _hurry(self) -> None:
        for wake in self._wakes:
            wake.set()

    # ---- called by the rank itself -----------------------------------------------------------------------------

    def enter(self, control: Callable[[], Watched | None], trains_here: bool) -> None:
        """A phase of a control begins, in the thread that trains or (a backward) in one of torch's."""
        self.recent = control
        if trains_here:
            self.thread = threading.get_ident()

    def drop(self, control: Watched, reference: Callable[[], Watched | None]) -> None:
        """Nobody has a control any more: this rank takes part in nothing more of the model, others need not wait."""
        self.dropped.append(control.key)
        if self.recent is reference:
            self._last_place, self._last_phases = control.place(), {control.key: control.history()}

    def begin_wait(self, control: str, doing: str, missing: Callable[[], tuple[int, ...]]) -> Waiting:
        """A host wait has lasted for `FIRST_POLL`."""
        began = time.monotonic() - FIRST_POLL.total_seconds()
        self.waiting = Waiting(time.time_ns(), began, control, doing, missing)
        self._hurry()
        return self.waiting

    def end_wait(self) -> None:
        self.waiting = None

    def verdict_on(self, waiting: Waiting) -> Verdict | None:
        return self.broken.get(waiting.control) or self.ended.get(waiting.number)

    def meet_neighbours(self) -> None:
        """Learn who else is on this host, while the store still answers: all ranks of a model have registered."""
        self.neighbours.known = self.board.neighbours(self._identity)

    def forget(self, controls: Sequence[str]) -> None:
        """Models that all ranks have dropped: nobody will wait for them any more."""
        for key in controls:
            if key in self.dropped:
                self.dropped.remove(key)

    def find_cause(self, waiting: Waiting, words: str) -> Verdict:
        """A connection broke: who is gone? Whoever ends says so or leaves a trace, within a moment."""
        deadline = time.monotonic() + NAMING_S
        if not is_held_by_launcher():
            self._quiet_until = time.monotonic() + QUIET_S
        while time.monotonic() < deadline:
            self._hurry()
            verdict = self.verdict_on(waiting)
            if verdict is not None:
                return verdict
            time.sleep(SHORT_PAUSE_S)
        return Verdict(f"rank {self.rank} lost a peer while waiting in {words}: {waiting.lost}", DIED)

    def leave(self, how: str, failed: bool = False) -> None:
        """The process ends its work: tell the others, before it is too late to."""
        if self.left or os.getpid() != self._process:
            return
        self._store_is_gone = self._store_is_gone or not answers(self.store)
        self.left, self.failed = how, failed
        self._sent.clear()
        self._hurry()
        self._sent.wait(self.limits.beat_s)

    def close(self) -> None:
        """Stop the threads."""
        if os.getpid() != self._process:
            return
        self._closing = True
        self._hurry()
        for thread in self._threads:
            thread.join(2 * self.limits.beat_s)

    # ---- the threads -------------------------------------------------------------------------------------------

    def _run(self, turn: Callable[[], None], wake: threading.Event) -> None:
        while not self._closing:
            try:
                turn()
            except Exception as problem:  # a watch that fails must neither end the training nor be silent about it
                self.problem = self.problem or problem
            is_busy = self.waiting is not None or self._blocked is not None or self._cut is not None
            wake.wait(self.limits.beat_s / (2 if is_busy else 1))
            wake.clear()

    def _look_around(self) -> None:
        """What needs no other rank: our own threads, and processes on this host."""
        frames, groups = frames_of(self.thread), self._count()
        before = self._still
        if before is None or frames is None or before.frames != frames or before.groups != groups:
            self._still = None if frames is None else Blocked(time.time_ns(), time.monotonic(), frames, groups)
        self._blocked = self._still if self._still is not None and self._is_blocked(self._still) else None
        if self._still is before and before is not None and before.frames.call == teardown.CALL:
            teardown.help_once(before.number)
        if self._current() is not None:
            self.neighbours.look(self.limits.stopped_s)
            self._judge_alone()
        if self._cut is not None:
            self._cut_off(*self._cut)

    def _count(self) -> dict[str, GroupCount]:
        """Collectives issued on each group, those that are gone included."""
        self._groups = {**self._groups, **group_counts()}
        return self._groups

    def _is_blocked(self, still: Blocked) -> bool:
        """In a call of torch.distributed, or unmoved for long while our lanes have work that does not get done."""
        if still.frames.call:
            return True
        control = self.recent()
        for_s = time.monotonic() - still.since  # asked late: a query from another thread would end a graph capture
        return (
            self.waiting is None and for_s > self.limits.silent_s and control is not None and control.device_is_busy()
        )

    def _current(self) -> Wait | None:
        """The wait that this rank is in, in the form of its report."""
        now, waiting, blocked = time.monotonic(), self.waiting, self._blocked
        if waiting is not None:
            missing = waiting.missing()
            return Wait(waiting.number, "lamina", now - waiting.since, waiting.control, "", missing)
        if blocked is None:
            return None
        control = self.recent()
        kind, key = ("call" if blocked.frames.call else "device"), (control.key if control is not None else "")
        return Wait(blocked.number, kind, now - blocked.since, key, blocked.frames.group)

    def report(self) -> Report:
        """This rank in one line."""
        wait, control, waiting, blocked = self._current(), self.recent(), self.waiting, self._blocked
        frames = frames_of(self.thread)
        if waiting is None and blocked is not None and blocked.frames != frames:
            wait = None  # it has moved since
        doing = "runs"
        if wait is not None and wait.kind == "lamina":
            doing = (waiting.doing if waiting is not None else "") or (control.doing() if control is not None else "")
        elif wait is not None and blocked is not None:
            call = blocked.frames.call
            doing = f"waits in torch.distributed.{call}" if call.isidentifier() else f"waits in {call or 'the device'}"
        self._beat += 1
        return Report(
            self.rank,
            self._beat,
            control.place() if control is not None else self._last_place,
            doing,
            frames.site if frames is not None else "",
            wait,
            dict(self._count()),
            {control.key: control.history()} if control is not None else self._last_phases,
            tuple(self.dropped),
            self.left,
            self.failed,
            dict(self.neighbours.ailing),
            waiting.lost if waiting is not None else "",
        )

    def _talk(self) -> None:
        """What goes over the store. That it is gone is said by `_judge_alone`."""
        if self._store_is_gone or not (dist.is_initialized() or self.left):
            self._sent.set()
            return
        try:
            if time.monotonic() < self._quiet_until:
                self.board.look_for_end()
                return
            self._exchange()
            self._answered_at = time.monotonic()
        except dist.DistNetworkError:
            self._store_is_gone = True  # for good; every further word would be a warning of torch's in the terminal
            self._sent.set()
        except RuntimeError:
            pass  # a wait in the store that took too long: look again at the next beat

    def _exchange(self) -> None:
        wait = self._current()
        if wait is not None or self._beat < BEATS_TO_MEET:
            self.meet_neighbours()
        if wait is not None or self.left or not self.board.writes_seldom or self._beat == 0:
            self.board.post(self.report())
        if self.left:
            self._sent.set()
        verdict = self.board.next_verdict()
        if verdict is None and wait is not None and wait.for_s >= self._patience_s(wait):
            found = self.board.look()
            if found is not None:
                self.board.announce(found)
                verdict = self.board.next_verdict()
        elif wait is None:
            self.board.step_down()
        if verdict is not None:
            self._receive(verdict)
        if self._sever_now:
            self._sever_now = False
            sever(connections(self.store), self.board.ends_of_others())

    def _patience_s(self, wait: Wait) -> float:
        waiting = self.waiting
        return 0.0 if waiting is not None and waiting.lost else self.limits.silent_s - self.limits.proof_s

    def _judge_alone(self) -> None:
        """The store does not answer: who on this host is to blame?"""
        wait = self._current()
        silent_s = time.monotonic() - self._answered_at
        is_known = self._store_is_gone and self.waiting is not None and self.waiting.lost != ""
        if wait is None or (min(wait.for_s, silent_s) < self.limits.silent_s and not is_known):
            return
        if self.neighbours.ailing:
            rank, how = sorted(self.neighbours.ailing.items())[0]
            said, code = f"rank {rank} {how}", STOPPED if how.startswith("is stopped") else DIED
        elif self._store_is_gone and silent_s > 2 * self.limits.silent_s:
            said, code = "the process that held the ranks' store (rank 0, or the launcher) has ended", DIED
        else:
            return
        text = f"{said}. Waiting: {describe([self.report()])}"
        self._receive(Verdict(text, code, {self.rank: wait.number}, (wait.control,) if wait.control else ()))

    # ---- verdicts ----------------------------------------------------------------------------------------------

    def _receive(self, verdict: Verdict) -> None:
        number = verdict.waits.get(self.rank)
        # the first verdict on a control holds, so that ranks which are reached by different ones say the same
        for control in verdict.controls:
            verdict = self.broken.setdefault(control, verdict)
        if number is None:
            return
        with suppress(RuntimeError):
            self.board.write_ends([connection.local for connection in connections(self.store)])
        self.ended[number] = self.last_verdict = verdict
        blocked = self._blocked
        if self.waiting is None and blocked is not None and blocked.number == number and self._cut is None:
            raise_in(self.thread, verdict)
            self._cut = (verdict, time.monotonic())

    def _cut_off(self, verdict: Verdict, since: float) -> None:
        """Note [How a verdict arrives] 2."""
        blocked = self._blocked
        if blocked is None or self.ended.get(blocked.number) is not verdict:
            self._cut = None
            return
        for_s = time.monotonic() - since
        if not blocked.frames.call or for_s > self.limits.grace_s:
            if self._abort is None:  # in a thread of its own: with a kernel in the way it may not return
                self._abort = threading.Thread(target=abort_groups, name="lamina-abort", daemon=True)
                self._abort.start()
            self._sever_now = True  # by the thread that has the store
        if for_s > 2 * self.limits.grace_s:
            self.last_words(verdict)
            os._exit(1)


# ---- the one of this process ---------------------------------------------------------------------------------------

limits = Limits()
_watch: Watch | None = None
_started: list[Callable[[Watch], None]] = []  # called with each watch that starts


def current() -> Watch | None:
    """The watch of this process, if it has one."""
    return _watch


def configure(chosen: Limits) -> None:
    """Other limits, for the watch that starts next; a running one is replaced by it."""
    global limits, _watch
    limits = chosen
    if _watch is not None:
        _watch.close()
    _watch = None


def on_start(act: Callable[[Watch], None]) -> None:
    """Call `act` with each watch that starts."""
    _started.append(act)


def start(control: Watched | None = None) -> Watch:
    """The watch, started at the first call and again when the default group is another one."""
    global _watch
    store = dist.distributed_c10d._get_default_store()
    if _watch is None or _watch.store is not store or _watch._process != os.getpid():
        if _watch is not None:
            _watch.close()
        _watch = Watch(store, dist.get_rank(), dist.get_world_size(), limits)
        for act in _started:
            act(_watch)
    if control is not None:
        _watch.recent = weakref.ref(control)
    return _watch


@atexit.register
def stop() -> None:
    """The process ends: say so, and end the threads while they can still be joined."""
    global _watch
    if _watch is not None:
        _watch.leave("has ended its program")
        _watch.close()
        if _watch.broken:
            _end_for_certain()
    _watch = None


def _end_for_certain() -> None:
    """torch takes groups down by waiting for what is under way in them, for ever if a peer is stopped: not for longer.

    By a watchdog in C, and an alarm for what comes after the interpreter: no Python runs there.
    """
    with suppress(ValueError, OSError):  # not the main thread, no file descriptors left
        faulthandler.dump_traceback_later(TEARDOWN_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2 * TEARDOWN_S)
