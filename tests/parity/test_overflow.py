"""Steps whose gradients are not finite: what comes after equals one process, be they left out or gone back from."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
from harness import run_ranks
from parity.models import UNITS, build, language_batch, language_loss
from parity.reference import TOLERANCE, parameter_deviation

OVERFLOWS, STEPS, MAX_NORM = 1, 4, 0.3


def clipped(how: str, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """A step, unless gradients are not finite."""
    if how == "in the step":
        assert isinstance(optimizer, lamina.optim.AdamW)
    else:
        scaler.unscale_(optimizer)
        clip = lamina.clip_grad_norm_ if how == "lamina" else nn.utils.clip_grad_norm_
        norm = clip(model.parameters(), MAX_NORM)
        if not scaler.is_enabled() and not norm.isfinite():
            return
    scaler.step(optimizer)
    scaler.update()


def train(how: str, strategy: str, scaled: bool, set_to_none: bool) -> float:
    world, rank = dist.get_world_size(), dist.get_rank()
    plain, model = build(), lamina.shard(build(), strategy, units=UNITS)
    options = {"lr": 1e-2, "eps": 1e-3}
    own = lamina.optim.AdamW(model.parameters(), **options, max_norm=MAX_NORM if how == "in the step" else None)
    optimizers = [own, torch.optim.AdamW(plain.parameters(), **options)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled) for _ in optimizers]
    worst = 0.0
    for step in range(STEPS):
        for other in range(world):
            factor = math.nan if step == OVERFLOWS and other == 0 else 1.0
            scalers[1].scale(factor * language_loss(plain, language_batch(10 * step + other, 2)) / world).backward()
        factor = math.nan if step == OVERFLOWS and rank == 0 else 1.0
        scalers[0].scale(factor * language_loss(model, language_batch(10 * step + rank, 2))).backward()
        clipped(how, model, own, scalers[0])
        clipped("torch", plain, optimizers[1], scalers[1])
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        worst = max(worst, parameter_deviation(model, {name: p.detach() for name, p in plain.named_parameters()}))
    return worst


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
@pytest.mark.parametrize(
    ("how", "scaled"), [("lamina", True), ("lamina", False), ("torch", True), ("in the step", True)]
)
def test_a_step_that_was_left_out_leaves_nothing_behind(how: str, scaled: bool, strategy: str) -> None:
    for set_to_none in (False, True):
        assert max(run_ranks(2, train, how, strategy, scaled, set_to_none)) <= TOLERANCE, set_to_none


def go_back(how: str, strategy: str, set_to_none: bool, folder: str) -> float:
    """A step that made NaN of all weights, and a checkpoint (or state dicts, without a folder) of before."""
    world, rank = dist.get_world_size(), dist.get_rank()
    plain, model = build(), lamina.shard(build(), strategy, units=UNITS)
    options = {"lr": 1e-2, "eps": 1e-3}
    own = lamina.optim.AdamW(model.parameters(), **options, max_norm=MAX_NORM if how == "in the step" else None)
    pairs = [(model, own), (plain, torch.optim.AdamW(plain.parameters(), **options))]
    for step in range(STEPS):
        if step == OVERFLOWS:
            before = [copy.deepcopy((each.state_dict(), optimizer.state_dict())) for each, optimizer in pairs]
            if folder:
                lamina.save(folder, model, own)
        for other in range(world):
            factor = math.nan if step == OVERFLOWS and other == 0 else 1.0
            (factor * language_loss(plain, language_batch(10 * step + other, 2)) / world).backward()
        factor = math.nan if step == OVERFLOWS and rank == 0 else 1.0
        (factor * language_loss(model, language_batch(10 * step + rank, 2))).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        if how == "lamina":
            lamina.clip_grad_norm_(model, MAX_NORM)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        if step == OVERFLOWS:
            assert not next(iter(plain.parameters())).isfinite().any()
            for (each, optimizer), (weights, states) in zip(pairs, before, strict=True):
                if folder and each is model:
                    lamina.load(folder, model, own)
                    continue
                each.load_state_dict(weights)
                optimizer.load_state_dict(states)
    return parameter_deviation(model, {name: p.detach() for name, p in plain.named_parameters()})


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("how", ["lamina", "in the step"])
def test_the_way_back_from_a_step_that_was_not_finite(how: str, strategy: str, tmp_path: Path) -> None:
    for set_to_none in (False, True):
        for folder in (str(tmp_path / str(set_to_none)), ""):
            assert max(run_ranks(2, go_back, how, strategy, set_to_none, folder)) <= TOLERANCE, (set_to_none, folder)
