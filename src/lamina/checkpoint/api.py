"""Names of checkpoints in the public API: `save`, `load`, `latest`, and keeping the last few."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from lamina.checkpoint import folders
from lamina.checkpoint.background import finish
from lamina.checkpoint.exporting import export
from lamina.checkpoint.loading import load
from lamina.checkpoint.saving import save
from lamina.errors import CheckpointError

__all__ = ["export", "finish", "keep_last", "latest", "load", "save"]


def latest(folder: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in a folder; None if there is none yet. Local.

    Complete: its manifest is whole, and all of its files are there in full length. A folder that is a checkpoint itself
    is its own answer. Waits for saves of this process that go on in the background, and raises their errors.

    Raises:
        CheckpointError: the system does not let us look.
    """
    folder = folders.given(folder, "latest(folder)")
    finish()
    try:
        found = folders.newest(Path(os.path.abspath(folder)))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be looked at: {error.strerror}") from error
    return None if found is None else str(found)


def keep_last(folder: str | os.PathLike[str], count: int) -> None:
    """Delete all but the newest `count` complete checkpoints in a folder. Every rank may call it; rank 0 acts.

    What is no complete checkpoint is left alone and does not count, so the last good one is never deleted.

    What the system does not let go is told in a warning: training goes on.

    Raises:
        UsageError: a count below 1, on every rank.
    """
    folder = folders.given(folder, "keep_last(folder, count)")
    folders.check_count(count)
    finish()
    if not dist.is_initialized() or dist.get_rank() == 0:
        folders.prune(Path(os.path.abspath(folder)), count)
