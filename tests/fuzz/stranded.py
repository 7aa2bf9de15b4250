"""Backwards through what forwards have left where nobody looks.

They are right, or an error on every rank; and after an error that was caught, a clean start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import lamina
from fuzz.sides import forget, take_stranded
from lamina.runtime.assemble import RUNTIMES
from parity.reference import gradient_deviation

if TYPE_CHECKING:
    from fuzz.play import Job


def strand(job: Job) -> None:
    """Of the forward before."""
    wanted, found = _leave(job)
    if wanted:
        _compare(job, _run_plain(job, wanted), found)


def outdate(job: Job) -> None:
    """Of a forward with other weights, after a forward with those of now."""
    wanted, found = _leave(job)
    if not wanted:
        return
    job.scale()
    job.refresh(trains=True)
    job.output(job.model, job.data(95, job.rank, 0, 0), job.rank)
    _compare(job, _run_plain(job, wanted), found)


def _leave(job: Job) -> tuple[list[Tensor], Tensor]:
    """Losses of what forwards have left: of all ranks in one process, and this rank's."""
    job.refresh(trains=True)
    wanted = [_loss_of(job, job.reference.model, rank) for rank in range(job.case.world)]
    return wanted if all(loss.requires_grad for loss in wanted) else [], _loss_of(job, job.model, job.rank)


def _loss_of(job: Job, model: torch.nn.Module, rank: int) -> Tensor:
    forget(model)
    job.output(model, job.data(96, rank, 0, 0), rank)
    return take_stranded()


def _run_plain(job: Job, losses: list[Tensor]) -> bool:
    """Whether torch refuses."""
    try:
        for loss in losses:
            job.reference.backward(loss, 1 / job.case.world)
    except RuntimeError:
        return True
    return False


def _compare(job: Job, torch_refuses: bool, found: Tensor) -> None:
    refused = ""
    try:
        found.backward()
    except lamina.LaminaError as error:
        refused = type(error).__name__
    except RuntimeError:  # torch's own, of weights that every rank holds
        if not torch_refuses:
            raise
        refused = "RuntimeError"
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, refused)
    # what is recomputed reads whole weights as they are now, in torch, too
    may_differ = job.case.recompute != "none" and all(unit.plain for unit in RUNTIMES[job.model].units)
    ends_well = not any(said) and (may_differ or not torch_refuses)
    assert all(said) or ends_well, f"torch refuses: {torch_refuses}, ranks: {said}"
    if not (refused or torch_refuses):
        wanted = {name: p.grad for name, p in job.plain.named_parameters()}
        job.compare("a stranded feature", gradient_deviation(job.model, wanted))
    for model in (job.model, job.plain, job.reference.model):
        model.zero_grad()
