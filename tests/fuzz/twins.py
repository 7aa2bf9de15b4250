"""Copies of the model that a job trains: one that trains by itself, averages of its weights, and a way back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fuzz.plain import Plain
from parity.reference import difference, gradient_deviation, parameter_deviation

if TYPE_CHECKING:
    from fuzz.play import Job

DECAY = 0.7
KINDS = ("clones", "copy", "torch's")


def twin(job: Job) -> None:
    """A deep copy trains for a step; the original goes on as if there was none."""
    case = job.case
    own, reference = copy.deepcopy(job.model), Plain(case.seed, case.scheme, job.device)
    with torch.no_grad():
        for mine, master in zip(reference.masters.parameters(), job.plain.parameters(), strict=True):
            mine.copy_(master)
            mine.requires_grad_(master.requires_grad)
    own.zero_grad()
    job.scale()  # the original's weights, not the copy's
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (own, reference.masters)]
    reference.refresh()
    for rank in range(case.world):
        reference.backward(_loss(job, reference.model, rank, reference.input_dtype), 1 / case.world)
    _loss(job, own, job.rank, case.scheme.born).backward()
    if not job.rounds:
        wanted = {name: p.grad for name, p in reference.masters.named_parameters()}
        job.compare("twin's gradients", gradient_deviation(own, wanted))
        for optimizer in optimizers:
            optimizer.step()
        named = {name: p.detach() for name, p in reference.masters.named_parameters()}
        job.compare("twin's parameters", parameter_deviation(own, named))
    job.compare("parameters beside a twin", job.parameters())


def _loss(job: Job, model: nn.Module, rank: int, dtype: torch.dtype) -> Tensor:
    return model(job.data(94, rank, 0, 0).to(dtype), rank).double().pow(2).mean()


def kind_of_average(seed: int) -> str:
    return KINDS[seed // 4 % len(KINDS)]


class Average:
    """Of the weights, over some steps: by hand, in a deep copy, or torch's own."""

    def __init__(self, job: Job) -> None:
        self.kind = kind_of_average(job.case.seed)
        self.plain = [param.detach().clone() for param in _averaged(job.plain)]
        self.clones = [param.detach().clone() for param in _averaged(job.model)] if self.kind == "clones" else []
        self.model: Any = copy.deepcopy(job.model) if self.kind == "copy" else None
        if self.kind == "torch's":
            self.model = AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            self.model.update_parameters(job.model)

    @torch.no_grad()
    def update(self, job: Job) -> None:
        for mine, param in zip(self.plain, _averaged(job.plain), strict=True):
            mine.lerp_(param, 1 - DECAY)
        if self.kind == "torch's":
            self.model.update_parameters(job.model)
            return
        own = self.clones if self.kind == "clones" else _averaged(self.model)
        for mine, param in zip(own, _averaged(job.model), strict=True):
            mine.lerp_(param.detach(), 1 - DECAY)

    @torch.no_grad()
    def evaluate(self, job: Job) -> None:
        """With the averages in the place of the weights."""
        before = [param.detach().clone() for param in _averaged(job.plain)]
        own = [param.detach().clone() for param in _averaged(job.model)]
        model = job.model if self.kind == "clones" else self.model
        _put(job.plain, self.plain)
        if self.kind == "clones":
            _put(job.model, self.clones)
        job.refresh()
        if job.case.patience and self.kind != "clones":
            job.reference.halved = set()  # nothing steps the copy
            job.reference.refresh()
        data = job.data(93, job.rank, 0, 0)
        wanted = job.output(job.reference.model, data, job.rank)
        job.compare(f"average: {self.kind}", difference(job.output(model, data, job.rank), wanted))
        _put(job.plain, before)
        if self.kind == "clones":
            _put(job.model, own)
        job.compare("parameters beside an average", job.parameters())


def average(job: Job) -> None:
    if job.average_of is None:
        job.average_of = Average(job)
    job.average_of.update(job)
    job.average_of.evaluate(job)


def rewind(job: Job) -> None:
    """What was taken down at the first call, state dicts of all, is taken up again at the second."""
    pairs = list(zip((job.model, job.plain), job.trainers, strict=True))
    if job.snapshot is None:
        job.snapshot = [
            copy.deepcopy((m.state_dict(), [o.state_dict() for o in t.optimizers], t.beside())) for m, t in pairs
        ]
        return
    for (model, trainer), (weights, states, beside) in zip(pairs, job.snapshot, strict=True):
        model.load_state_dict(weights)
        for optimizer, state in zip(trainer.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        trainer.load_beside(beside)
    job.compare("rewound parameters", job.parameters())
    job.compare("rewound optimizer state", job.states())


def _averaged(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.dtype is not torch.int8]


def _put(model: nn.Module, values: list[Tensor]) -> None:
    for param, value in zip(_averaged(model), values, strict=True):
        param.copy_(value)
