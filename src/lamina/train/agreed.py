"""Work of rank 0 alone, whose failure is everybody's: the other ranks would wait for one that has left."""

from __future__ import annotations

from collections.abc import Callable

from lamina.core.control import Control
from lamina.errors import LaminaError, UsageError


def on_rank_0(control: Control, act: Callable[[], object]) -> None:
    """Collective. An error there, of lamina or of the disk, is a `UsageError` with the same text on every rank."""
    problem = None
    if control.rank == 0:
        try:
            act()
        except LaminaError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
    message = control.agree_on_error(problem)
    if message is not None:
        raise UsageError(message)
