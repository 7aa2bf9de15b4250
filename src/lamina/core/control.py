"""How ranks agree and how they learn that they cannot.

Collectives in the wrong order do not fail: they pair different units and return mixed weights, or wait for ever. Here
everything that is not fixed by the program is agreed over a host-side Gloo group, and every wait on the host can be
ended: while it lasts, the watch (watch.py) finds out whether it ever will. A rank that is merely slow says nothing, and
nobody raises.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from lamina.core import terminal, watch
from lamina.core.forked import refuse_in_fork
from lamina.core.group_sets import refuse_destroyed
from lamina.core.watch_evidence import call_site, is_folded
from lamina.core.watch_judge import cure_of, name_ranks
from lamina.core.watch_sever import disagreement
from lamina.errors import Disagreement, LaminaError

_MAXIMA = AllreduceOptions()
_MAXIMA.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

__all__ = ["Control", "Flags", "Position", "finish", "name_ranks"]

watch.on_start(terminal.listen)

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 deprecates the latter

PHASES_KEPT = 16
_ONES = 0xFFFFFFFF
LAST_WAIT_S = 1.0  # for flags that nobody reads, when the process ends
SHORTEST_WAIT_S = 0.001


# Note [Rows]
#     The ranks' exchanges meet in the order in which they are made. A rank that saves would meet one that begins a
#     forward, and read its numbers as an answer, or wait for more of them than are sent. So every exchange travels in
#     rows of one length, which begin with what it is about and how many numbers follow.
ROW_VALUES = 62


@dataclass
class Position:
    """Where a rank is: written at every step, read by the watch."""

    phase: int = 0
    mode: str = "start"
    kind: str = "start"
    verb: str = ""
    unit: str = ""
    step: int = 1
    is_over: bool = False

    @property
    def place(self) -> str:
        if self.phase == 0:
            return "lamina.shard" if self.kind == "start" else f"{self.kind} before step 1"
        return f"step {self.step}, after its {self.kind}," if self.is_over else f"step {self.step} {self.kind}"

    @property
    def doing(self) -> str:
        verb = {"gather": "gathers", "reduce": "reduces", "": "waits"}.get(self.verb, self.verb)
        return f"{verb} `{self.unit}`" if self.unit else verb

    @property
    def words(self) -> str:
        return f"{self.place}: {self.doing}"


class Control:
    """Agreement over the control group; a world of one agrees with itself."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int, name: str) -> None:
        self.group, self.rank, self.world, self.name = group, rank, world, name
        self.position = Position()
        self.exchanges = 0
        self.about = ""  # what exchanges are about that do not say so themselves
        self.device_is_busy: Callable[[], bool] = _never  # lanes that run by themselves say whether they have work left
        self.phases: deque[tuple[int, str, bool, str]] = deque(maxlen=PHASES_KEPT)
        self._step, self._is_stepped = 1, False
        self.key = name
        self._reference = weakref.ref(self)
        self._watch: watch.Watch | None = None
        if group is not None and dist.get_backend(group) != "fake":
            members = name_ranks(sorted(dist.get_process_group_ranks(group)))
            self.key = f"{name} of {members}"
            self._watch = watch.start(self)

    def __del__(self) -> None:
        if self._watch is not None and not sys.is_finalizing():
            self._watch.drop(self, self._reference)

    @property
    def ranks(self) -> Sequence[int]:
        """Those that agree, in the default group's numbers; empty where this one is alone."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

    # ---- where this rank is ------------------------------------------------------------------------------------

    def begin(self, phase: int, mode: str, kind: str, grad: bool, entry: str) -> None:
        """A phase begins; `grad` as in its key: of a backward, whether gradients are complete after it."""
        refuse_in_fork()
        refuse_destroyed(self.group)
        if kind == "backward":
            self._is_stepped = grad
        elif self._is_stepped and kind == "forward":
            self._step, self._is_stepped = self._step + 1, False
        self.position = Position(phase, mode, kind, "begins", "", self._step)
        self.phases.append((phase, kind, grad, entry))
        if self._watch is not None:
            self._watch.enter(self._reference, kind == "forward")
            if self._watch.broken and self.key in self._watch.broken:
                raise disagreement(self._watch.broken[self.key])

    def place(self) -> str:
        return self.position.place

    def doing(self) -> str:
        return self.position.doing

    def words(self) -> str:
        """ "step 12 forward: agrees on `gather of 0` (train.py:88)"."""
        site = call_site(sys._getframe())
        return self.position.words + (f" ({site})" if site else "")

    def history(self) -> dict[int, str]:
        """The last phases by number; equal on ranks at the same place."""
        words = {("forward", False): " without gradients", ("backward", False): " of an earlier micro-batch"}
        return {
            number: f"a {kind}{words.get((kind, grad), '')}" + (f" ({entry})" if entry else "")
            for number, kind, grad, entry in list(self.phases)
        }

    # ---- agreement ---------------------------------------------------------------------------------------------

    def exchange(self, values: Sequence[int], about: str = "") -> list[list[int]]:
        """Every rank's values, by rank; all ranks give the same number of them.

        Args:
            values: each fits into 64 bits.
            about: what is agreed on, the same on all ranks; default: `self.about`. See Note [Rows].

        Raises:
            Disagreement: ranks have met that want different things.
        """
        return self.begin_exchange(values, about)()

    def begin_exchange(self, values: Sequence[int], about: str = "") -> Callable[[], list[list[int]]]:
        """`exchange` in two halves: up to `ROW_VALUES` values are on their way; the result, when called, waits."""
        self.exchanges += 1
        if self.group is None:
            return lambda: [list(values)]
        refuse_in_fork()
        if self._watch is not None:  # else of a save in the background: one that is under way ends
            refuse_destroyed(self.group)
        heading = [zlib.crc32((about or self.about).encode()), len(values)]

        def begin(part: Sequence[int]) -> Callable[[], Tensor]:
            mine = [*heading, *part, *[0] * (ROW_VALUES - len(part))]
            return self._begin_rows(torch.tensor(mine, dtype=torch.int64))

        first = begin(values[:ROW_VALUES])

        def finish() -> list[list[int]]:
            rows: list[list[int]] = [[] for _ in range(self.world)]
            for at in range(0, max(len(values), 1), ROW_VALUES):
                part = values[at : at + ROW_VALUES]
                found = (begin(part) if at else first)().tolist()
                if any(row[:2] != heading for row in found):
                    self._raise_parted()
                for row, more in zip(rows, found, strict=True):
                    row += more[2 : 2 + len(part)]
            return rows

        return finish

    def _begin_rows(self, mine: Tensor) -> Callable[[], Tensor]:
        everyone = torch.empty(self.world * mine.numel(), dtype=mine.dtype)
        work = _all_gather(everyone, mine, group=self.group, async_op=True)

        def finish() -> Tensor:
            self.wait(work)
            return everyone.view(self.world, -1)

        return finish

    def _gather_rows(self, mine: Tensor) -> Tensor:
        return self._begin_rows(mine)()

    def _raise_parted(self) -> NoReturn:
        """All ranks have seen that they are not at the same place: each says where it is."""
        text = self.words().encode()[: 8 * ROW_VALUES].ljust(8 * ROW_VALUES)
        words = [bytes(row.tolist()).decode(errors="ignore").strip() for row in self._gather_rows(_as_bytes(text))]
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(words))
        raise Disagreement(f"ranks disagree: {said}. {cure_of(said)}")

    def exchange_text(self, text: str) -> list[str]:
        """Every rank's text, by rank. For messages and checks, not for the step."""
        data = text.encode()
        sizes = [row[0] for row in self.exchange([len(data)])]
        width = max(max(sizes), 1)
        mine = list(data.ljust(width, b" "))
        if self.group is None:
            return [text]
        rows = self._gather_rows(torch.tensor(mine, dtype=torch.uint8))
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def agree_on_error(self, message: str | None) -> str | None:
        """The first message that any rank has, on every rank, with the ranks that have it; None if none has."""
        found = [row[0] for row in self.exchange([0 if message is None else 1])]
        if not any(found):
            return None
        texts = self.exchange_text(message or "")
        ranks = [r for r, has in enumerate(found) if has]
        first = texts[ranks[0]]
        return first if len(ranks) == self.world else f"{first} (on {name_ranks(ranks)} of {self.world})"

    def wait(self, work: dist.Work | None) -> None:
        """Wait on the host for a collective; raise the same error on every rank when it can never end."""
        if work is None:
            return
        if self._watch is None:
            work.wait()
            return
        try:
            work.wait(watch.FIRST_POLL)
        except RuntimeError as error:
            _refuse_if_foreign(error)
            _wait_long(self._watch, work, error, self.key, "", self.position)


def finish(work: dist.Work | None, tensor: torch.Tensor, doing: str) -> None:
    """Wait for a collective that belongs to no control; `doing`: a verb and its object. On GPUs the stream waits."""
    if work is None:
        return
    running = watch.current()
    if running is None or tensor.device.type != "cpu":
        work.wait()
        return
    try:
        work.wait(watch.FIRST_POLL)
    except RuntimeError as error:
        _refuse_if_foreign(error)
        control = running.recent()
        _wait_long(running, work, error, "" if control is None else control.key, doing, None)


def _wait_long(
    running: watch.Watch, work: watch.Waitable, error: RuntimeError, key: str, doing: str, position: Position | None
) -> None:
    """The first poll is over: let the watch know, and listen to it."""
    waiting = running.begin_wait(key, doing, lambda: _missing(work))
    asked_s, waited_s = watch.FIRST_POLL.total_seconds(), watch.FIRST_POLL.total_seconds()
    try:
        while _is_timeout(error) and waited_s > asked_s / 2:
            verdict = running.verdict_on(waiting)
            if verdict is not None:
                raise disagreement(verdict) from None
            began, asked_s = time.monotonic(), watch.NEXT_POLL.total_seconds()
            try:
                work.wait(watch.NEXT_POLL)
                return
            except RuntimeError as again:
                _refuse_if_foreign(again)
                error, waited_s = again, time.monotonic() - began
        waiting.lost = str(error).splitlines()[0]
        words = position.words if position is not None else doing
        if _is_timeout(error):  # not of our poll: the group's own
            words += " for longer than its process group allows (`timeout=` of init_process_group)"
        raise disagreement(running.find_cause(waiting, words)) from error
    finally:
        running.end_wait()


def _refuse_if_foreign(error: RuntimeError) -> None:
    """Raise what is no failure of a wait: an error of ours, or of a signal's handler that Python has run inside it."""
    if isinstance(error, LaminaError) or not all(
        is_folded(frame.f_code.co_filename) for frame, _ in walk_tb(error.__traceback__)
    ):
        raise error


def _as_bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _is_timeout(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower()


def _missing(work: watch.Waitable) -> tuple[int, ...]:
    return getattr(work, "missing", lambda: ())()


def _never() -> bool:
    return False


class Flags:
    """Yes or no of every rank about many things, without a round trip for those who know: started, then read or not.

    On a group of their own: what is sent and not waited for must not meet another rank's exchange. With them travels
    a number that should be the same on all ranks; whether it was is known when the next flags start.
    """

    def __init__(self, control: Control, group: dist.ProcessGroup | None) -> None:
        self.control, self.group = control, group
        self._work: dist.Work | None = None
        self._sent = bytearray(8)  # behind a byte for each flag: the number, and what is left of it to all ones
        self.differed = False  # the number of the flags before the last
        _flags.add(self)
        _unread[:] = [work for work in _unread if not work.is_completed()]

    def __del__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Nobody will read the result that is under way; see Note [Works at exit]."""
        work, self._work = self._work, None
        if work is not None:
            _unread.append(work)

    def start(self, flags: list[bool], alike: int = 0) -> Callable[[], list[bool]]:
        """Send this rank's flags; the result, when called, waits and tells for each whether any rank said yes.

        Args:
            alike: a number of 31 bits that is the same on all ranks if all is well; see `differed`.
        """
        self.control.wait(self._work)  # of the time before: ended long ago
        largest = int.from_bytes(self._sent[-8:-4], "big") + int.from_bytes(self._sent[-4:], "big")
        self.differed = largest > _ONES  # a byte's maximum and that of what is left of it to 255: 255, or they differed
        self._sent = bytearray(flags) + alike.to_bytes(4, "big") + (alike ^ _ONES).to_bytes(4, "big")
        self._work = self._send(torch.frombuffer(self._sent, dtype=torch.uint8))  # a fifth of what torch.tensor takes

        def read() -> list[bool]:
            self.control.wait(self._work)
            self._work = None
            return list(map(bool, self._sent[:-8]))

        return read

    def _send(self, numbers: Tensor) -> dist.Work:
        """Past torch.distributed's checks, which take longer than all else here."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return group.allreduce([numbers], _MAXIMA)


# Note [Works at exit]
#     What is sent in a backward carries torch's copy of the Python context, and what is sent from a bytearray its
#     memory. If the last reference to such a work is that of Gloo's thread, it asks for the interpreter, and where that
#     is about to end the process is aborted ("terminate called without an active exception"). So works that nobody
#     waits for are never given up: they arrive, as long as that takes no time, and stay.
_flags: weakref.WeakSet[Flags] = weakref.WeakSet()
_unread: list[dist.Work] = []  # of flags that are gone


@atexit.register
def _keep_works() -> None:
    for flags in list(_flags):
        flags.drop()
    deadline = time.monotonic() + LAST_WAIT_S
    for work in _unread:
        with suppress(RuntimeError):  # a peer that was faster to end, or has not come yet
            work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), SHORTEST_WAIT_S)))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
