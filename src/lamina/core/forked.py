"""A process forked from a rank: a copy of its memory, with its sockets and none of the threads that read them.

Whatever it sent would arrive in the place of what the rank sends, and what it waits for never comes. Data loading
forks workers as a matter of course, and they may: it is collectives that are refused, before anything is sent.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from lamina.errors import StateError


class Fork:
    """What this process was forked from, if it was a rank."""

    rank: int | None = None


def refuse_in_fork() -> None:
    """Raise in the child of a rank; called before collectives are issued."""
    if Fork.rank is not None:
        raise StateError(
            f"this process was forked from rank {Fork.rank} and has no connections of its own: call sharded models and "
            "what is collective on the rank itself, or start the process with the method 'spawn' and give it plain "
            "tensors (`p.full()`, `lamina.export`)"
        )


def refuse_shared_in_fork(what: str) -> None:
    """Raise in the child of a rank; called before memory is read that both have, and the rank goes on writing to."""
    if Fork.rank is not None:
        raise StateError(
            f"this process was forked from rank {Fork.rank}, which goes on writing to memory in which {what} lie: read "
            "them before the fork, and give the process plain tensors (`p.local.clone()`)"
        )


def _note_fork() -> None:
    if dist.is_available() and dist.is_initialized():
        Fork.rank = dist.get_rank()


os.register_at_fork(after_in_child=_note_fork)
