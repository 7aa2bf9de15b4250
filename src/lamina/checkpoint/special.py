"""What stands in the place of a file and is none: a pipe that nobody writes to would be waited for without an end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lamina.errors import CheckpointError

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def refuse_special(path: Path) -> None:
    """Call it before a file of somebody else's making is opened. What is not there is named by whoever opens it.

    Raises:
        CheckpointError: a pipe, a socket or a device, or a link to one.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except (OSError, ValueError):
        return
    if kind is not None:
        raise CheckpointError(f"{path} cannot be read: it is {kind} and no file")


def refuse_special_inside(folder: Path) -> None:
    """The same for everything in a folder."""
    if folder.is_dir():
        for path in folder.iterdir():
            refuse_special(path)
