"""One error, printed once: what a terminal shows when ranks end by an exception.

Python prints a traceback in every process, so that a mistake made on eight ranks is eight tracebacks through each
other, followed by those of the ranks that lost a peer. Here the ranks settle in the store who speaks: one rank for all
that raise the same, and none for an error that only follows from another rank's. The user's frames are shown, runs of
torch's and ours are folded into a line. The others wait until it has been printed, so that a launcher that ends
everybody at the first exit does not cut it off.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from lamina.core import watch
from lamina.core.watch_board import Line
from lamina.core.watch_evidence import innermost_site, is_folded
from lamina.core.watch_judge import Verdict, name_ranks
from lamina.core.watch_sever import disagreement
from lamina.errors import LaminaError

TOGETHER_S = 1.5  # the same error reaches all ranks within this time
SPOKEN_S = 3.0  # how long a silent rank waits for the one that speaks
ANSWER_S = 2.0  # of the store, which answers in milliseconds
PAUSE_S = 0.02

Said = TypeVar("Said")
Note = Callable[[BaseException], str]
_notes: list[Note] = []  # what parts above know of errors that are not lamina's
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


# ---- words ---------------------------------------------------------------------------------------------------------


def tell(error: BaseException, ranks: Sequence[int], world: int, stack: traceback.StackSummary | None = None) -> str:
    """The whole message, as it stands in the terminal."""
    frames = traceback.extract_tb(error.__traceback__) if stack is None else stack
    return f"{frames_text(frames, error)}{words_of(error)}\n{_footer(error, ranks, world)}"


def frames_text(frames: traceback.StackSummary, error: BaseException) -> str:
    """Lines of a traceback, with what is not the user's folded; the innermost frame of a foreign error stays."""
    kept = [not is_folded(frame.filename) for frame in frames]
    if kept and not isinstance(error, LaminaError):
        kept[-1] = True
    if not any(kept):
        kept = [True] * len(kept)
    lines, folded = ["Traceback (most recent call last):\n"], 0
    for frame, is_kept in zip(frames, kept, strict=True):
        if is_kept:
            lines += _fold(folded)
            lines += traceback.format_list([frame])
        folded = 0 if is_kept else folded + 1
    return "".join([*lines, *_fold(folded)])


def _fold(count: int) -> list[str]:
    return [f"  ... {count} frame{'s' if count > 1 else ''} of torch and lamina\n"] if count else []


def words_of(error: BaseException) -> str:
    """ "lamina.errors.UnitError: ...", without frames."""
    return "".join(traceback.format_exception_only(error)).strip()


def _footer(error: BaseException, ranks: Sequence[int], world: int) -> str:
    who = f"on all {world} ranks" if len(ranks) == world > 1 else f"on {name_ranks(ranks)} of {world}"
    return f"[{who}; {error.code}: see docs/errors.md]" if isinstance(error, LaminaError) else f"[{who}]"


def note_with(note: Note) -> None:
    """Ask `note` about errors that nobody caught; what it says is printed below them."""
    if note not in _notes:
        _notes.append(note)


def add_notes(error: BaseException) -> None:
    for note in _notes:
        with contextlib.suppress(Exception):  # nothing may stand in the way of the error itself
            text = note(error)
            if text and text not in getattr(error, "__notes__", ()):
                error.add_note(text)


# ---- who speaks ----------------------------------------------------------------------------------------------------


class Speaker:
    """This rank's part in settling who prints."""

    def __init__(self, running: watch.Watch, world: int) -> None:
        self.rank, self.world = running.rank, world
        self._line = Line(running.store, "lamina/terminal")

    @property
    def _store(self) -> Any:
        return self._line.store

    def speaks_for(self, error: BaseException) -> list[int]:
        """The ranks that this one speaks for; none if another one speaks."""
        cause = getattr(error, "cause", "")
        if cause and self._until(f"spoken {cause}", SPOKEN_S):
            return []
        topic = hashlib.sha1(words_of(error).encode()).hexdigest()
        self._store.set(f"raised {topic} {self.rank}", "")
        if self._store.add(f"raised {topic}", 1) > 1:
            self._until(f"spoken {topic}", TOGETHER_S + SPOKEN_S)
            return []
        deadline = time.monotonic() + TOGETHER_S
        while self._store.add(f"raised {topic}", 0) < self.world and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return [r for r in range(self.world) if self._store.check([f"raised {topic} {r}"])]

    def has_spoken(self, error: BaseException) -> None:
        topic = hashlib.sha1(words_of(error).encode()).hexdigest()
        for key in (f"spoken {topic}", f"spoken left {self.rank}"):
            self._store.set(key, "")

    def _until(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._store.check([key]):
                return True
            time.sleep(PAUSE_S)
        return False


def speak(error: BaseException, show: Callable[[list[int], int], None]) -> None:
    """Let one rank `show(ranks, world)`."""
    running = watch.current()
    if running is None:
        show([0], 1)
        return
    world = running.board.world
    try:
        speaker = _in_time(lambda: Speaker(running, world), ANSWER_S)
        ranks = _in_time(lambda: speaker.speaks_for(error), TOGETHER_S + 2 * SPOKEN_S + ANSWER_S)
    except RuntimeError:  # the store is gone, or who held it is stopped: better twice than not at all
        show([running.rank], world)
        return
    if not ranks:
        return
    show(ranks, world)
    sys.stderr.flush()
    with contextlib.suppress(RuntimeError):  # nobody is left who could hear it
        _in_time(lambda: speaker.has_spoken(error), ANSWER_S)


def _in_time(ask: Callable[[], Said], seconds: float) -> Said:
    """What is asked of the store, which blocks its caller in C++ when it has stopped answering.

    Raises:
        RuntimeError: no answer.
    """
    said: list[Said] = []
    failed: list[RuntimeError] = []

    def run() -> None:
        try:
            said.append(ask())
        except RuntimeError as error:
            failed.append(error)

    asking = threading.Thread(target=run, name="lamina-terminal", daemon=True)
    asking.start()
    asking.join(seconds)
    if said:
        return said[0]
    raise failed[0] if failed else RuntimeError("the ranks' store does not answer")


# ---- where it is hooked in -----------------------------------------------------------------------------------------


def listen(running: watch.Watch) -> None:
    """Take over what Python does with an exception that nobody caught, in a process with a watch."""
    running.last_words = _last_words
    if not isinstance(sys.excepthook, _ExceptHook):
        sys.excepthook = _ExceptHook(sys.excepthook)


class _ExceptHook:
    """`sys.excepthook` of a rank."""

    def __init__(self, before: Hook) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        running = watch.current()
        if running is None or not isinstance(error, Exception):
            self.before(kind, error, frames)
            return
        error = better_known(running, error)
        add_notes(error)
        note_failure(running, error)
        speak(error, lambda ranks, world: self._show(error, ranks, world))

    def _show(self, error: BaseException, ranks: list[int], world: int) -> None:
        is_plain = self.before is sys.__excepthook__ or self.before.__module__.startswith("torch.")
        if is_plain or isinstance(error, LaminaError):
            print(tell(error, ranks, world), file=sys.stderr)
        else:  # somebody has made tracebacks their own way
            self.before(type(error), error, error.__traceback__)
            print(_footer(error, ranks, world), file=sys.stderr)


def better_known(running: watch.Watch, error: BaseException) -> BaseException:
    """A broken connection that ends a wait of which a verdict says more."""
    verdict = running.last_verdict
    if verdict is None or isinstance(error, LaminaError) or not isinstance(error, RuntimeError):
        return error
    if "Connection" not in str(error) and "abort" not in str(error):
        return error
    return disagreement(verdict).with_traceback(error.__traceback__)


def note_failure(running: watch.Watch, error: BaseException) -> None:
    """Tell those who may wait for this rank."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    site = innermost_site(frames[-1]) if frames else ""
    words = words_of(error).splitlines()[0]
    running.leave(f"raised {words}" + (f" ({site})" if site else ""), failed=True)


def _last_words(verdict: Verdict) -> None:
    """The process is about to be ended from outside its main thread."""
    running, error = watch.current(), disagreement(verdict)
    frame = sys._current_frames().get(running.thread) if running is not None else None
    stack = traceback.StackSummary.extract(list(traceback.walk_stack(frame))[::-1]) if frame is not None else None
    speak(error, lambda ranks, world: print(tell(error, ranks, world, stack), file=sys.stderr))
    sys.stdout.flush()
    sys.stderr.flush()
