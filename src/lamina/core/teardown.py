"""What holds torch's groups is freed where `destroy_process_group()` does not return."""

from __future__ import annotations

import threading
from collections.abc import Callable

CALL = "destroy_process_group"  # by which the watch knows a thread that is in there
_acts: list[Callable[[], None]] = []
_helped: list[int] = []  # number of the teardown that was helped last


def on_teardown(act: Callable[[], None]) -> None:
    """Call `act`, which frees something, in a thread of its own: what it waits for may never come."""
    _acts.append(act)


def help_once(number: int) -> None:
    """A teardown, told from others by its number, has not returned for a while."""
    if _helped != [number]:
        _helped[:] = [number]
        for act in _acts:
            threading.Thread(target=act, name="lamina-teardown", daemon=True).start()
