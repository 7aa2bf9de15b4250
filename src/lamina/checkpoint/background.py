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
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import nn

from lamina.checkpoint.datafile import Item
from lamina.checkpoint.host_copy import HostCopy
from lamina.core.control import Control, Position
from lamina.core.groups import GroupMaker
from lamina.errors import CheckpointError, LaminaError
from lamina.runtime.assemble import Runtime

PATIENCE = datetime.timedelta(days=1)  # with a slow disk of another rank


class Work(Protocol):
    """What a thread is given to do with the staged data."""

    def run(self, control: Control) -> None: ...


class Background:
    """The background saves of one model; at most one at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self._control: Control | None = None  # made by the first save
        self._lease = runtime.mesh.share.lease  # of its group
        self.own, self.common = HostCopy(runtime.device), HostCopy(runtime.device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def stage(self, items: Sequence[Item]) -> list[Item]:
        """Copies of this rank's parts of split tensors: whatever the others say, this rank writes them. Local."""
        return self.own.take(items)

    def stage_common(self, items: Sequence[Item]) -> list[Item]:
        """Copies of what else this rank writes: which of it, the ranks have agreed on. Local."""
        return self.common.take(items)

    def start(self, runtime: Runtime, work: Work) -> None:
        """Write what was staged. Returns at once, except for the first time: that is collective."""
        assert self._thread is None, "the save before it was not waited for"
        control = self._control = self._control or _own_control(runtime)

        returned = threading.Event()  # else the thread, once it has the interpreter, keeps it for a while

        def run() -> None:
            returned.wait()
            try:
                self.own.wait()
                self.common.wait()
                work.run(control)
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
        returned.set()

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
    if mesh.share.lease is not None:
        whole_world = mesh.world == dist.get_world_size()
        maker = GroupMaker(mesh.share.lease.groups, mesh.rank, whole_world, None)
        control.group = maker.on_host("save", PATIENCE)
    return control


@atexit.register
def _finish_at_exit() -> None:
    try:
        finish()
    except BaseException as error:
        print(f"lamina: a checkpoint was not saved: {error}", file=sys.stderr)
