"""Ctrl-C, SIGTERM and failures of one rank: all ranks stop behind the same step, with a checkpoint.

A signal reaches ranks at different moments and some not at all; a rank that leaves alone lets the others wait for ever.
Here every step ends with a flag of each rank sent to all, without waiting; what is learned is acted on one step later.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from lamina.core.control import Control, Flags
from lamina.errors import StateError

IMPATIENT_S = 3.0  # a launcher may send the same signal twice; a second one later than this means it
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Asked by a signal or an error on this rank; agreed with the others."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.asked = ""  # the signal's name
        self.failure: str | None = None  # what went wrong on this rank, outside of what all ranks do together
        self._asked_at = 0.0
        self._flags = Flags(control, control.group) if control.world > 1 else None
        self._read: Callable[[], list[bool]] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are requests inside; where they cannot be had (another thread), they stay what they were."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and now - self._asked_at > IMPATIENT_S:
            raise KeyboardInterrupt
        if not self.asked:
            self._asked_at = now
        self.asked = signal.Signals(number).name

    def agreed(self) -> bool:
        """To be called once behind each step, by all ranks: did any rank ask before the step ended?

        Raises `StateError` on every rank if one of them has failed.
        """
        if self._flags is None:
            stop, failed = bool(self.asked), self.failure is not None
        else:
            stop, failed = self._read() if self._read is not None else [False, False]
            self._read = self._flags.start([bool(self.asked), self.failure is not None])
        if failed:
            raise StateError(self.control.agree_on_error(self.failure) or "a rank failed")
        return stop

    def settle(self) -> None:
        """Behind the last step: take in what was sent, and raise what went wrong since. Collective."""
        if self._read is not None:
            self._read()
            self._read = None
        message = self.control.agree_on_error(self.failure)
        if message is not None:
            raise StateError(message)
