"""Saves that go on beside training: one host copy, one thread, one group of their own.

torch's `async_save` copies the whole state anew each time and hands it to a process or thread pool; an error stays in
a future that nobody reads. Here a model has one buffer, as large as what this rank writes, that is allocated once; the
training step waits for the copy only. The thread agrees with the other ranks over a group that nothing else uses, and
its error is raised by the next call about checkpoints.
"""

from __future__ import annotations

import atexit
import datetime
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lamina.checkpoint.datafile import as_bytes, slices
from lamina.checkpoint.snapshot import Division
from lamina.core.control import Control, Position
from lamina.errors import CheckpointError, LaminaError
from lamina.runtime.assemble import Runtime

PATIENCE = datetime.timedelta(days=1)  # with a slow disk of another rank


class Work(Protocol):
    """What a thread is given to do with the staged data."""

    def run(self, control: Control, chunks: Callable[[], Iterable[memoryview]]) -> None: ...


class Background:
    """The background saves of one model; at most one at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self._device = runtime.device
        self._control = _own_control(runtime)
        self._image = torch.empty(0, dtype=torch.uint8)  # 1D, what this rank writes
        self._data_bytes = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def stage(self, division: Division) -> Division:
        """Copy what the items of this rank's file hold now. Local."""
        draft = division.draft
        if self._image.numel() < draft.data_bytes:
            self._image = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._image = torch.empty(draft.data_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._data_bytes = draft.data_bytes
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for item in draft.items:
            place = draft.placed[item.key]
            into, source = self._image[place.start_byte : place.stop_byte], as_bytes(item.values)
            targets, sources = by_dtype.setdefault(place.dtype, ([], []))
            targets.append(into.view(place.dtype))
            sources.append(source.view(place.dtype))
        for targets, sources in by_dtype.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return division

    def start(self, work: Work) -> None:
        """Write what was staged. Returns at once."""
        assert self._thread is None, "the save before it was not waited for"

        def run() -> None:
            try:
                work.run(self._control, lambda: slices(self._image[: self._data_bytes]))
            except LaminaError as error:
                self._error = error
            except BaseException as error:  # of Gloo, when a peer is gone
                said = str(error).splitlines()[0] if str(error) else ""
                self._error = CheckpointError(
                    f"a save in the background failed; if a rank has ended, this is why: {type(error).__name__}: {said}"
                )

        self._thread = threading.Thread(target=run, name="lamina-save", daemon=True)
        RUNNING.append(self)
        self._thread.start()

    def finish(self) -> None:
        """Wait until nothing is being written; raise what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            RUNNING.remove(self)
        error, self._error = self._error, None
        if error is not None:
            raise error


class Backgrounds:
    """One `Background` a model."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, Background] = weakref.WeakKeyDictionary()

    def of(self, model: nn.Module, runtime: Runtime) -> Background:
        """Made at the first use, which is collective."""
        if model not in self._of:
            self._of[model] = Background(runtime)
        return self._of[model]

    def finish(self, model: nn.Module) -> None:
        """Wait for this model's save, and raise its error."""
        if model in self._of:
            self._of[model].finish()


BACKGROUND = Backgrounds()
RUNNING: list[Background] = []  # started and not waited for; also those whose model is gone


def finish() -> None:
    """Wait for all saves in the background of this process, and raise the first error. Local.

    Call it before `torch.distributed.destroy_process_group()`; the end of the program does it by itself.
    """
    while RUNNING:
        RUNNING[0].finish()


def _own_control(runtime: Runtime) -> Control:
    """An agreement for the thread. Collective.

    It is made without a group and given one: so the watch, which looks at one thread and takes for granted that ranks
    issue in one order, does not look at its waits. A peer that dies ends them, because its connections break.
    """
    mesh = runtime.mesh
    control = Control(None, mesh.rank, mesh.world, f"{runtime.control.name}-save")
    control.position = Position(0, "save", "save", "agrees on", "a checkpoint in the background")
    if mesh.world > 1:
        whole_world, ranks = mesh.world == dist.get_world_size(), sorted(mesh.global_ranks)
        control.group = dist.new_group(
            ranks, timeout=PATIENCE, backend="gloo", use_local_synchronization=not whole_world
        )
    return control


@atexit.register
def _finish_at_exit() -> None:
    try:
        finish()
    except BaseException as error:
        print(f"lamina: a checkpoint was not saved: {error}", file=sys.stderr)
