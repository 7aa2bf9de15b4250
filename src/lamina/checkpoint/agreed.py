"""Steps of a save or a load that succeed on all ranks or raise on all ranks.

`runtime.agreement.together` does this for what lamina refuses; disks fail with errors of Python's own. Here any failure
of one rank becomes the same error everywhere, with the rank in its message.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from lamina import errors
from lamina.core.control import Control
from lamina.errors import CheckpointError, LaminaError

T = TypeVar("T")


@contextlib.contextmanager
def at_place(control: Control, kind: str, what: str) -> Iterator[None]:
    """Inside, a rank that waits for others says that it is saving or loading."""
    before = control.position
    control.position = replace(before, mode=kind, kind=kind, verb="agrees on", unit=what)
    try:
        yield
    finally:
        control.position = before


def together(control: Control, act: Callable[[], T], while_doing: str) -> T:
    """Run `act`; if it fails on any rank, raise on every rank. Collective.

    Raises:
        CheckpointError, or the LaminaError that the first failing rank met.
    """
    result, caught = None, None
    try:
        result = act()
    except Exception as error:  # a disk may fail in any way
        caught = error
    message = control.agree_on_error(None if caught is None else _told(caught, while_doing))
    if message is None:
        return result  # type: ignore[return-value]
    kind, _, text = message.partition("|")
    made = getattr(errors, kind, CheckpointError)(text)
    if caught is not None:
        raise made from caught
    raise made


def _told(error: Exception, while_doing: str) -> str:
    if isinstance(error, LaminaError):
        return f"{type(error).__name__}|{error}"
    if isinstance(error, OSError) and error.strerror is not None:
        where = f" ({error.filename})" if error.filename is not None else ""
        return f"CheckpointError|{while_doing} failed: {error.strerror}{where}"
    return f"CheckpointError|{while_doing} failed: {type(error).__name__}: {error}"


def warn_once(control: Control, message: str) -> None:
    """A warning, printed once and not once a rank."""
    if control.rank == 0:
        warnings.warn(message, stacklevel=3)
