"""Steps of a save or a load that succeed on all ranks or raise on all ranks.

`runtime.agreement.together` does this for what lamina refuses; disks fail with errors of Python's own. Here any failure
of one rank becomes the same error everywhere, with the rank in its message.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from lamina import errors
from lamina.core.control import Control
from lamina.errors import CheckpointError, LaminaError
from lamina.runtime.agreement import check_same_text

T = TypeVar("T")


def together(control: Control, act: Callable[[], T], while_doing: str) -> T:
    """Run `act`; if it fails on any rank, raise on every rank. Collective.

    Raises:
        CheckpointError, or the LaminaError that the first failing rank met.
    """
    result, error = attempt(act)
    settle(control, error, while_doing)
    return result  # type: ignore[return-value]


def attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run `act` and hold its error back until all ranks can raise it."""
    try:
        return act(), None
    except Exception as error:  # a disk may fail in any way
        return None, error


def settle(control: Control, error: Exception | None, while_doing: str) -> None:
    """If any rank has an error, raise it on every rank. Collective."""
    message = control.agree_on_error(None if error is None else _told(error, while_doing))
    if message is None:
        return
    kind, _, text = message.partition("|")
    made = getattr(errors, kind, CheckpointError)(text)
    if error is not None:
        raise made from error
    raise made


def same_everywhere(control: Control, sums: Sequence[int]) -> list[bool]:
    """For each number, whether all ranks have it. What a rank sends does not grow with the number of ranks."""
    if control.group is None or not sums:
        return [True] * len(sums)
    control.exchange([len(sums)])  # all ranks are here, and not elsewhere
    here = torch.tensor(list(sums), dtype=torch.int64)
    bounds = torch.cat([here, -here])
    control.wait(dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=control.group, async_op=True))
    highest, lowest = bounds.chunk(2)
    return (highest == -lowest).tolist()


def begin_alike(
    control: Control,
    error: Exception | None,
    while_doing: str,
    alike: dict[str, list[str]],
    further: Sequence[int] = (),
) -> Callable[[], list[bool]]:
    """One round for the usual case: nobody failed, and all ranks say the same. Collective.

    Args:
        error: what this rank met, or None.
        alike: lines that must be the same on every rank, by what they are.
        further: numbers that may differ; as many on every rank where nobody failed.

    Returns:
        what waits for the others, raises what went wrong, and says for each of `further` whether all ranks have it.
        Until it is called this rank may do something else, without any other exchange.
    """
    sums = [zlib.crc32("\n".join(lines).encode()) for lines in alike.values()]
    answer = control.begin_exchange([int(error is not None), *sums, zlib.crc32(repr(list(further)).encode())])

    def finish() -> list[bool]:
        rows = answer()
        if any(row[0] for row in rows):
            settle(control, error, while_doing)
        *same, same_further = (len(set(column)) == 1 for column in list(zip(*rows, strict=True))[1:])
        for equal, (what, lines) in zip(same, alike.items(), strict=True):
            if not equal:
                check_same_text(control, what, lines)
        return [True] * len(further) if same_further else same_everywhere(control, further)

    return finish


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
