"""Numbers and shapes of the twelve cases: scalers, tokens, ties under clipping, ranks that own nothing, skipped layers.

C05's means over tokens are in tests/runtime/test_scopes.py, C06 and C07 in tests/parity, C09 in tests/runtime/
test_start.py and test_initialisation.py, C10 in tests/checkpoint.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from cases.training import TOLERANCE, WIDTH, Case, Way, batch_of, seeded, worst_of
from harness import run_ranks
from parity.reference import parameter_deviation
from parity.structures import Chain, Lora, Skipping, Tied, linears, tied_loss


def tied(model: nn.Module, x: Tensor) -> Tensor:
    return tied_loss(model, x, 0)


def lone_linear() -> nn.Module:
    return nn.Linear(WIDTH, 3)


def tied_chain() -> nn.Module:
    """Three layers with one bias, and a scale that two blocks and the root share."""
    model = Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model.blocks[1].bias = model.blocks[0].bias
    model.first.bias = model.blocks[0].bias
    model.blocks[2].weight = model.first.weight
    return model


WIDE = (Way("zero3"), Way("zero1", slots=1), Way("zero3", "peer"), Way("zero2"))
CASES: dict[str, Case] = {
    "C02": Case(Tied, tied, ("emb", "mid", "head"), "foreach", steps=3, max_norm=0.01),
    "C02, four in one": Case(tied_chain, optimizer="adam", steps=3, max_norm=0.01),
    "C03": Case(lambda: Chain(Lora(int8=True), Lora(int8=True)), max_norm=0.1),
    "C08, foreach": Case(lone_linear, units=(), optimizer="foreach"),
    "C08, for-loop": Case(lone_linear, units=(), optimizer="adam", max_norm=0.05),
    "C08, many": Case(lambda: Chain(*(nn.Linear(WIDTH, WIDTH, bias=i == 1) for i in range(3))), optimizer="foreach"),
}


def run(name: str) -> dict[str, float]:
    return worst_of(CASES[name], WIDE[: {1: 1, 2: 4, 4: 3}[dist.get_world_size()]])


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_equals_one_process(world: int, name: str) -> None:
    for found in run_ranks(world, run, name):
        assert max(found.values()) <= TOLERANCE, found


def skipped(strategy: str, transport: str, slots: int) -> float:
    """C01: each rank leaves out another layer, forward only, with and without gradients on; then all again."""
    build, rank = linears(Skipping, 4), dist.get_rank()
    plain = seeded(build)
    model = lamina.shard(seeded(build), strategy, units=["blocks.*"], transport=transport, slots=slots)
    worst = 0.0
    for step, skip in enumerate((rank + 1, rank + 1, 3 - rank, None, rank)):
        x = batch_of(rank, step)
        with torch.set_grad_enabled(step % 2 == 0):
            worst = max(worst, (model(x, skip) - plain(x, skip)).abs().max().item())
    return worst


@pytest.mark.parametrize(("strategy", "transport"), [("zero3", "c10d"), ("zero3", "peer"), ("zero1", "c10d")])
def test_layers_skipped_by_rank_give_the_local_result(strategy: str, transport: str) -> None:
    for slots in (1, 3):
        assert max(run_ranks(2, skipped, strategy, transport, slots)) <= TOLERANCE


def wide() -> nn.Module:
    """Its second weight lies on both ranks; all else is small, and rank 1 has no element of it."""
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def put_inf(model: nn.Module, name: str, rank: int) -> bool:
    """Into one element of this rank's part of a gradient; whether it has one."""
    local = model.get_parameter(name).grad.local
    if dist.get_rank() == rank and local.numel():
        local[-1] = math.inf
    return bool(local.numel())


def scaled(strategy: str, transport: str, way: str, inf: tuple[str, int] | None) -> tuple[float, bool]:
    """C04: one clean step, one with an infinity, one clean step; the scale halves once, and nobody steps then."""
    plain = seeded(wide, torch.float32)
    model = lamina.shard(seeded(wide, torch.float32), strategy, units=[nn.Linear], transport=transport)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    options = {"fused": True} if way == "fused" else {"foreach": way == "foreach"}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3, **options) for m in (plain, model)]
    scales, has = [], True
    for step in range(3):
        for rank in range(2):
            x = batch_of(rank, step, torch.float32)
            scalers[0].scale(plain(x).pow(2).mean() / 2).backward()
        x = batch_of(dist.get_rank(), step, torch.float32)
        if step == 1 and inf is None and dist.get_rank() == 1:
            x[0, 0] = math.inf  # the data of one rank
        scalers[1].scale(model(x).pow(2).mean()).backward()
        if step == 1:
            plain[0].weight.grad[0, 0] = math.inf
            has = inf is None or put_inf(model, *inf)
        for m, scaler, optimizer in zip((plain, model), scalers, optimizers, strict=True):
            if way != "fused":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scalers[1].get_scale())
    assert scales == [4.0, 2.0, 2.0], scales
    return parameter_deviation(model, {n: p.detach() for n, p in plain.named_parameters()}), has


@pytest.mark.parametrize(
    ("strategy", "transport", "way"),
    [
        ("zero3", "c10d", "fused"),
        ("zero3", "c10d", "foreach"),
        ("zero3", "c10d", "for-loop"),
        ("zero1", "c10d", "foreach"),
        ("zero3", "peer", "fused"),
        ("ddp", "c10d", "for-loop"),
    ],
)
def test_a_scaler_skips_on_all_ranks(strategy: str, transport: str, way: str) -> None:
    places = [None] if strategy == "ddp" else [("2.weight", 0), ("2.weight", 1), ("0.bias", 0), None]
    for inf in places:
        results = run_ranks(2, scaled, strategy, transport, way, inf)
        assert max(worst for worst, _ in results) <= 1e-5
        if inf is not None:
            assert [has for _, has in results] == [True, inf[0] == "2.weight"]


def reductions() -> list[list[int]]:
    """C05: how often each unit is reduced in a step of three micro-batches."""
    found = []
    for strategy, defer in (("zero3", False), ("zero3", True), ("zero2", False), ("zero1", False), ("ddp", True)):
        model = lamina.shard(seeded(wide), strategy, units=[nn.Linear])
        for step in range(2):
            before = [unit.reduces for unit in lamina.report(model).units]
            for micro in range(3):
                with lamina.accumulate(model, last=micro == 2, defer=defer):
                    count = 4 if dist.get_rank() == 0 else 2
                    x = batch_of(dist.get_rank(), 10 * step + micro)[:count]
                    lamina.token_mean(model(x).pow(2).sum(), count).backward()
            model.zero_grad()
        after = [unit.reduces for unit in lamina.report(model).units]
        found.append(sorted({b - a for a, b in zip(before, after, strict=True) if b}))
    return found


def test_reductions_of_a_step_are_those_that_were_asked_for() -> None:
    for each, deferred, *rest in run_ranks(2, reductions):
        assert each == [3] and deferred == [1]
        assert rest == [[3], [1], [1]]


def plain_mean_differs() -> float:
    """What C05 is about: means over each rank's own tokens are not the mean over all tokens."""
    plain = [seeded(wide) for _ in range(2)]
    batches = [batch_of(0, 0), batch_of(1, 0)[:1]]
    for batch in batches:
        (plain[0](batch).pow(2).mean() / 2).backward()
    plain[1](torch.cat(batches)).pow(2).mean().backward()
    pairs = zip(*(m.parameters() for m in plain), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def test_the_token_case_can_tell() -> None:
    assert plain_mean_differs() > 1e-3
