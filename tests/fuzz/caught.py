"""Errors that the user catches, and steps that are given up: what comes after them starts clean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import lamina
from fuzz.layers import Skipped

if TYPE_CHECKING:
    from fuzz.play import Job


def fail(job: Job) -> None:
    """An error, and a new start."""
    raise_once(job)
    for model in (job.model, job.plain):
        model.zero_grad()  # what a backward leaves that ends in the middle


def give_up(job: Job) -> None:
    """Micro-batches of a step that does not come; the last of them may end in an error."""
    defer = job.failures.random() < 0.5
    for micro in range(job.failures.choice([1, 2])):
        with lamina.accumulate(job.model, last=False, defer=defer):
            job.losses(job.model, 97, micro, job.rank).own.backward()
    if job.failures.random() < 0.5:
        with lamina.accumulate(job.model, last=job.failures.random() < 0.5, defer=defer):
            raise_once(job)
    by_optimizer = job.failures.random() < 0.5
    for cleared in job.trainers if by_optimizer else (job.model, job.plain):
        cleared.zero_grad(set_to_none=True)


def raise_once(job: Job, where: str = "") -> None:
    """Before, in or after the last block, or in its backward."""
    last, where = job.model.blocks[-1], where or job.failures.choice(["before", "after", "backward"])
    if where == "before":
        handle = last.register_forward_pre_hook(_raise)
    elif where == "after" or not _reaches_all(job):
        handle = last.register_forward_hook(_raise)
    else:
        handle = last.register_forward_hook(_raise_in_backward)
    try:
        job.output(job.model, job.data(98, job.rank, 0, 0), job.rank).sum().backward()
    except ZeroDivisionError:
        pass
    finally:
        handle.remove()


def _reaches_all(job: Job) -> bool:
    """Every rank's backward comes to the end of the last block, before it has come to the block before that."""
    is_left_out = any(isinstance(part, Skipped) for part in job.plain.blocks[-1].modules())
    is_cut = bool(job.plain.features & {"Cut", "Instead"})
    is_no_unit = job.case.units == "tables" and "differs" in job.plain.features  # ranks begin with what they leave out
    return not (is_cut or is_left_out or is_no_unit) and job.plain.first.weight.requires_grad


def _raise(module: nn.Module, *args: Any) -> None:
    raise ZeroDivisionError


def _raise_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: _raise(module))
