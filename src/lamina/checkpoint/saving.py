"""`save()`: every rank writes its own ranges, then one rename makes them a checkpoint.

`torch.distributed.checkpoint.save` plans over all ranks, pickles an index, keeps no checksums, and leaves a folder that
looks like a checkpoint when a rank dies. Here:

    take      look at model, optimizer, extra; local
    compare   the same thing on all ranks? which values are equal everywhere?
    stage     `wait=False` only: one copy of what this rank writes; most of it while the ranks compare
    write     one file a rank, through a small buffer, until the disk has it
    publish   rank 0 writes the manifest and gives the folder its name

Between any two of these the ranks agree that all of them succeeded; the last three may run in the background.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamina.checkpoint import folders
from lamina.checkpoint.agreed import attempt, begin_alike, settle, together
from lamina.checkpoint.background import BACKGROUND, Background
from lamina.checkpoint.datafile import BLOCK_BYTES, STAGING_BYTES, Item, Written, stream, write_file
from lamina.checkpoint.manifest import FileEntry
from lamina.checkpoint.optimizer_state import check_optimizer
from lamina.checkpoint.snapshot import Division, Snapshot, describe, divide, file_name, take
from lamina.core.control import Control
from lamina.runtime.access import runtime_of
from lamina.runtime.agreement import agreeing


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    wait: bool = True,
) -> None:
    """Write a checkpoint, each rank its own ranges. Collective.

    It appears at `path` whole or not at all; an earlier checkpoint there is replaced at the end. Random states of
    Python, numpy and torch are saved for every rank.

    Args:
        path: the checkpoint's folder, on a file system that all ranks share.
        model: a model that was given to `lamina.shard()`.
        optimizer: of the model's parameters; None: none is saved.
        extra: what `load` is to return: numbers, lists, dicts, tensors, state dicts of schedulers and data loaders.
            Values that differ over ranks are saved for each.
        wait: False: return as soon as this rank's part is copied to host memory (allocated once, used again), and write
            in the background. An error there is raised by the next `save`, `load`, `latest` or `export`.

    Raises:
        CheckpointError: a rank could not write; what was at `path` before is untouched.
        UsageError: something that cannot be saved, or a path at which there is something else.
        Disagreement: ranks that save different things.
    """
    path, runtime = folders.given(path, "save(path, model)"), runtime_of(model)
    control = runtime.control
    with agreeing(control, "save", path), torch.inference_mode(False), torch.no_grad():  # buffers outlive the call
        BACKGROUND.finish(model)
        looked, error = attempt(lambda: Look.at(path, model, optimizer, extra))
        alike = {"arguments to save": [f"save({os.path.abspath(path)!r}, wait={bool(wait)})"]}
        alike["optimizer steps before they save"] = [str(runtime.mesh.share.steps)]
        alike["states to save"] = [] if looked is None else looked.lines
        agreed = begin_alike(control, error, f"saving {path}", alike, () if looked is None else looked.sums)
        if wait:
            same = agreed()
            assert looked is not None  # else all ranks have raised
            staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=runtime.device.type == "cuda")
            Job(looked.target, looked.snapshot, same, None, staging).run(control)
        else:
            _start_beside(BACKGROUND.of(model, runtime), looked, agreed)


def _start_beside(background: Background, looked: Look | None, agreed: Callable[[], list[bool]]) -> None:
    """What is this rank's in any case is copied while the ranks agree; a copy that fails is told in the background."""
    own, failure = attempt(lambda: [] if looked is None else background.stage(looked.snapshot.own_items()))
    same = agreed()
    assert looked is not None  # else all ranks have raised
    snapshot, common = looked.snapshot, None
    if failure is None:
        common, failure = attempt(lambda: background.stage_common(snapshot.common_items(same)))
    if own is None or common is None:
        assert failure is not None
        background.start(snapshot.runtime, NotCopied(looked.target, failure))
    else:
        staging = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        background.start(snapshot.runtime, Job(looked.target, snapshot, same, [*own, *common], staging))


@dataclass
class Look:
    """What this rank would save, and what of it the ranks compare."""

    target: Path
    snapshot: Snapshot
    lines: list[str]
    sums: list[int]

    @staticmethod
    def at(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> Look:
        """Local; raises what makes a save impossible."""
        target = Path(os.path.realpath(path))  # a link goes on pointing where it points
        check_optimizer(optimizer, "save(path, model, optimizer)")
        folders.check_target(target)
        snapshot = take(runtime_of(model), model, optimizer, extra)
        return Look(target, snapshot, snapshot.lines(), snapshot.sums())


@dataclass
class Job:
    """Everything after staging."""

    target: Path
    snapshot: Snapshot
    same: list[bool]  # answers `snapshot.sums()`
    copies: list[Item] | None  # of what this rank writes; None: as it lies in the model
    staging: Tensor  # 1D, bytes on the host

    def run(self, control: Control) -> None:
        """Write and publish. Collective over `control`; leaves nothing behind if it fails."""
        first = self.rank == 0
        what, number = f"saving {self.target}", draw_number(control)
        try:
            division = together(control, lambda: self._begin(number), what)
            written = together(control, lambda: self._write(division, number), what)
            rows = control.exchange([self.rank, written.size_bytes, written.header_crc32])
            files = [FileEntry(file_name(rank), size, f"{crc:08x}") for rank, size, crc in sorted(rows)]
            together(control, lambda: self._publish(division, files, number) if first else None, what)
        except BaseException:
            if first:
                folders.abandon(self.target, number)
            raise

    @property
    def rank(self) -> int:
        return self.snapshot.runtime.mesh.rank

    def _begin(self, number: int) -> Division:
        items = self.copies
        if items is None:
            items = self.snapshot.own_items() + self.snapshot.common_items(self.same)
        division = divide(self.snapshot, self.same, items)
        if self.rank == 0:
            folders.prepare(self.target, number)
        return division

    def _write(self, division: Division, number: int) -> Written:
        draft, folder = division.draft, folders.partial(self.target, number)
        return write_file(folder / file_name(self.rank), draft, stream(draft.items, self.staging))

    def _publish(self, division: Division, files: list[FileEntry], number: int) -> None:
        folders.publish(self.target, describe(division, files), number)


def draw_number(control: Control) -> int:
    """Of a save; the same on all ranks, and another one in every job. Collective."""
    return control.exchange([secrets.randbits(32)])[0][0]


@dataclass
class NotCopied:
    """In the place of a `Job`, on a rank that has nothing to write: the others learn it as they begin."""

    target: Path
    failure: Exception

    def run(self, control: Control) -> None:
        draw_number(control)
        settle(control, self.failure, f"copying for {self.target}")
