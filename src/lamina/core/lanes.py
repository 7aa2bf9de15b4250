"""Streams of work: compute, gather, reduce.

On a GPU a lane is a stream with its own communicator, and order between lanes is made by events. On the CPU a lane is
null: the same calls do nothing, and order is made by waiting for a collective's handle. The runtime is written once,
against this interface.
"""

from __future__ import annotations

import contextlib

import torch

NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Lane:
    """A null lane: work runs where it is called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Work inside is queued on this lane."""
        return NOTHING

    def mark(self) -> Mark | None:
        """The point that this lane has reached."""
        return None

    def wait(self, mark: Mark | None) -> None:
        """Work queued on this lane from now on starts after `mark`."""

    def is_busy(self) -> bool:
        """Whether it has work that is not done. Never to be asked of a stream that a graph is captured from."""
        return False


class Mark:
    """A point in a stream's work, re-used from step to step."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)


class StreamLane(Lane):
    """A lane on a CUDA stream; `stream=None` is whatever stream the user computes on."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        super().__init__(device)
        self.stream = stream

    def _current(self) -> torch.cuda.Stream:
        return self.stream or torch.cuda.current_stream(self.device)

    def running(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.stream(self._current())

    def mark(self) -> Mark:
        return Mark(self._current())

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            self._current().wait_event(mark.event)

    def is_busy(self) -> bool:
        return self.stream is not None and not self.stream.query()


class Lanes:
    """The lanes of one device."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.compute: Lane = StreamLane(device, None)
            self.gather: Lane = StreamLane(device, torch.cuda.Stream(device, priority=-1))
            self.reduce: Lane = StreamLane(device, torch.cuda.Stream(device, priority=-1))
        else:
            self.compute = self.gather = self.reduce = Lane(device)

    def are_busy(self) -> bool:
        """Whether communication is queued that has not ended."""
        return self.gather.is_busy() or self.reduce.is_busy()
