"""What steps the parameters of one model: optimizers over parts of them, their schedulers, the scaler of the losses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

import lamina
from fuzz.case import Case

Given = Sequence[Tensor] | list[dict[str, Any]]


def make_optimizer(
    kind: str, params: Given, is_reference: bool, max_norm: float | None = None
) -> torch.optim.Optimizer:
    """`max_norm`: of lamina's own."""
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr=0.05, eps=1e-3)
    if kind == "rmsprop":
        return torch.optim.RMSprop(params, lr=1e-2, eps=1e-2, momentum=0.5)
    if kind == "nadam":
        return torch.optim.NAdam(params, lr=1e-2, eps=1e-3)
    if kind == "amsgrad":
        return torch.optim.Adam(params, lr=1e-2, eps=1e-3, amsgrad=True)
    options = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    if kind == "flat" and not is_reference:
        return lamina.optim.AdamW(params, **options, max_norm=max_norm)
    return torch.optim.AdamW(params, **options, foreach=kind == "foreach")


class Trainer:
    def __init__(self, case: Case, named: dict[str, Tensor], is_reference: bool, max_norm: float | None = None) -> None:
        """`named`: what is to be trained, of the sharded model or of the plain one (`is_reference`)."""
        self.case, self.names, params = case, list(named), list(named.values())
        self.late: list[Tensor] = []
        kind, second = case.optimizer, case.wider.second
        if case.wider.optimizers == "groups":
            matrices, others = _by_shape(params)
            groups = [{"params": matrices, "lr": 2e-2}, {"params": others}]
            self.optimizers = [make_optimizer(kind, [g for g in groups if g["params"]], is_reference, max_norm)]
        elif case.wider.optimizers in ("one", "late"):
            if case.wider.optimizers == "late":
                params, self.late = params[::2], params[1::2]
            self.optimizers = [make_optimizer(kind, params, is_reference, max_norm)]
        else:
            parts = {
                "shapes": _by_shape(params),
                "turns": (params[::2], params[1::2]),
                "ends": (params[: len(params) // 2], params[len(params) // 2 :]),
            }[case.wider.optimizers]
            kinds = zip((kind, second), parts, strict=True)
            self.optimizers = [make_optimizer(each, part, is_reference) for each, part in kinds if part]
        self.schedulers = [_schedule(case.wider.schedule, each) for each in self.optimizers if case.wider.schedule]
        device = params[0].device.type
        self.scaler = torch.amp.GradScaler(
            device, init_scale=2.0**8, growth_interval=2, enabled=case.wider.overflow is not None
        )

    @property
    def params(self) -> list[Tensor]:
        """What the optimizers hold."""
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        return [param for group in groups for param in group["params"]]

    def take_late(self) -> None:
        """Parameters that no optimizer has held so far, whose gradients of earlier steps wait."""
        if self.late:
            self.optimizers[0].add_param_group({"params": self.late, "lr": 2e-2})
            self.late = []

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def unscale(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        return next((each.state[param] for each in self.optimizers if param in each.state), {})

    def beside(self) -> dict[str, Any]:
        """What a checkpoint has of it beside the optimizers."""
        return {"schedulers": [each.state_dict() for each in self.schedulers], "scaler": self.scaler.state_dict()}

    def load_beside(self, state: dict[str, Any]) -> None:
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])


def _by_shape(params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]


def _schedule(kind: str, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    if kind == "cycle" and "betas" in optimizer.defaults:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=8)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
