"""A job that is saved and goes on in another layout, on another number of data ranks perhaps."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import lamina
from fuzz.case import moved

if TYPE_CHECKING:
    from fuzz.play import Job


def move(job: Job) -> None:
    given = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(given)
    folder, (old, theirs) = Path(given[0]), job.trainers
    theirs.zero_grad()
    job.plain.zero_grad()  # gradients are not saved
    for number, optimizer in enumerate(old.optimizers):
        path = folder / f"{number} of replica {_replica(job)}"
        lamina.save(path, job.model, optimizer, extra=old.beside(), wait=number % 2 == 0)
    lamina.checkpoint.finish()
    dist.barrier()
    job.moves += 1
    job.keepers.pop(job.model, None)
    job.case = moved(job.case, job.moves, job.plain.features)
    job.model, new = job.build(job.case)
    if not old.late:
        new.take_late()
    job.scale_model(job.model, 0.5)
    with torch.no_grad():
        job.output(job.model, job.data(92, job.rank, 0, 0), job.rank)
    for param, wanted in zip(job.model.parameters(), job.plain.parameters(), strict=True):
        param.requires_grad_(wanted.requires_grad)
    for number, optimizer in enumerate(new.optimizers):
        extra = lamina.load(folder / f"{number} of replica 0", job.model, optimizer)
    new.load_beside(extra)
    job.trainers = [new, theirs]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    job.compare("moved parameters", job.parameters())
    job.compare("moved optimizer state", job.states())


def _replica(job: Job) -> int:
    """Ranks on another axis, whose data are the same, save for themselves."""
    grid = job.case.grid
    if grid is None or "other" not in grid[1]:
        return 0
    size = grid[0][grid[1].index("other")]
    inner = (
        1 if grid[1].index("other") == len(grid[1]) - 1 else torch.tensor(grid[0][grid[1].index("other") + 1 :]).prod()
    )
    return dist.get_rank() // int(inner) % size
