"""requires_grad changed at any time equals one process: between steps, around one call of several, inside a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import RankFailure, expect_error, run_ranks
from parity.models import UNITS, build, language_batch, language_loss
from parity.reference import TOLERANCE, gradient_deviation, parameter_deviation

Toggle = Callable[[nn.Module], None]


def freeze(model: nn.Module, *patterns: str, frozen: bool = True) -> None:
    for name, param in model.named_parameters():
        if any(name.startswith(pattern) or name.endswith(pattern) for pattern in patterns):
            param.requires_grad_(not frozen)


def layer_by_layer(step: int) -> Toggle:
    """All but the head frozen at first; every second step one more block trains."""
    if step == 0:
        return lambda model: freeze(model, "embedding", "blocks")
    return lambda model: freeze(model, f"blocks.{3 - step // 2}", frozen=False) if step % 2 == 0 else None


def biases_first(step: int) -> Toggle:
    """One unit holds both kinds: biases train, then weights beside them, then weights alone."""
    if step == 0:
        return lambda model: freeze(model, "weight")
    if step == 2:
        return lambda model: freeze(model, "weight", frozen=False)
    return lambda model: freeze(model, "bias") if step == 4 else None


def on_and_off(step: int) -> Toggle:
    """A block that comes and goes; its optimizer state stays."""
    return lambda model: freeze(model, "blocks.1", frozen=step % 2 == 0)


SCHEDULES = {"layer by layer": layer_by_layer, "biases first": biases_first, "on and off": on_and_off}
STEPS = 7


def train(name: str, strategy: str, slots: int) -> float:
    world, rank = dist.get_world_size(), dist.get_rank()
    plain, model = build(), build()
    for each in (plain, model):
        SCHEDULES[name](0)(each)
    model = lamina.shard(model, strategy, units=UNITS, slots=slots)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3, foreach=True) for each in (plain, model)]
    worst = 0.0
    for step in range(STEPS):
        for each in (plain, model):
            SCHEDULES[name](step)(each)
        for other in range(world):
            (language_loss(plain, language_batch(10 * step + other, 2)) / world).backward()
        language_loss(model, language_batch(10 * step + rank, 2)).backward()
        expected: dict[str, Tensor | None] = {key: p.grad for key, p in plain.named_parameters()}
        worst = max(worst, gradient_deviation(model, expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, parameter_deviation(model, {key: p.detach() for key, p in plain.named_parameters()}))
    return worst


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("strategy", "slots"), [("zero3", 3), ("zero3", 1), ("zero1", 2), ("ddp", 3)])
def test_toggled_parameters_equal_one_process(name: str, strategy: str, slots: int) -> None:
    assert max(run_ranks(2, train, name, strategy, slots)) <= TOLERANCE


def thawed_before(mode: Callable[[], Any] | None, strategy: str) -> list[Tensor]:
    """Gradients of a model with copies in 16 bits that has begun to train, and was evaluated before its first step."""
    model = build().float()
    freeze(model, "blocks")
    model = lamina.shard(model, strategy, units=UNITS, precision="bf16")
    freeze(model, "blocks", frozen=False)
    if mode is not None:
        with mode():
            model(language_batch(1, 2)[:, :-1])
    language_loss(model, language_batch(2, 2)).backward()
    grads = [p.grad for p in model.parameters()]
    return [grad.full() if isinstance(grad, lamina.Shard) else grad for grad in grads if grad is not None]


@pytest.mark.parametrize(("world", "strategy"), [(1, "zero3"), (2, "ddp"), (2, "zero1"), (2, "zero3")])
def test_thawed_parameters_may_be_evaluated_first(world: int, strategy: str) -> None:
    expected = run_ranks(world, thawed_before, None, strategy)[0]
    assert len(expected) == len(list(build().parameters()))
    for mode in (torch.no_grad, torch.inference_mode):
        found = run_ranks(world, thawed_before, mode, strategy)[0]
        assert all(map(torch.equal, found, expected))


def thawed_at_once(strategy: str, transport: str, slots: int) -> float:
    """Frozen when it was sharded, and trained from the first step on."""
    world, rank = dist.get_world_size(), dist.get_rank()
    plain, model = build(), build()
    freeze(model, "blocks", "weight")
    model = lamina.shard(model, strategy, units=UNITS, transport=transport, slots=slots)
    freeze(model, "", frozen=False)
    for other in range(world):
        (language_loss(plain, language_batch(other, 2)) / world).backward()
    language_loss(model, language_batch(rank, 2)).backward()
    return gradient_deviation(model, {key: p.grad for key, p in plain.named_parameters()})


@pytest.mark.parametrize(
    ("strategy", "transport", "slots"), [("zero3", "c10d", 3), ("zero3", "peer", 1), ("zero1", "c10d", 2)]
)
def test_parameters_thawed_before_the_first_step_train(strategy: str, transport: str, slots: int) -> None:
    assert max(run_ranks(2, thawed_at_once, strategy, transport, slots)) <= TOLERANCE


def frozen_on_one(strategy: str, transport: str, at: int, when: str) -> None:
    model = lamina.shard(build(), strategy, units=UNITS, transport=transport)
    is_mine = dist.get_rank() == 1
    for step in range(at + 3):
        if step == at and is_mine and when == "before":
            model.blocks[1].requires_grad_(False)
        loss = language_loss(model, language_batch(step, 2))
        if step == at and is_mine and when == "behind":
            model.blocks[1].requires_grad_(False)
        loss.backward()


@pytest.mark.parametrize(
    ("world", "strategy", "transport", "at"), [(3, "zero3", "c10d", 2), (2, "ddp", "c10d", 0), (2, "zero1", "peer", 1)]
)
def test_frozen_on_one_rank_is_named_on_all(world: int, strategy: str, transport: str, at: int) -> None:
    words = ["`blocks.1.", f"frozen on rank 1 of {world} only", "alike on every rank"]
    arguments = (strategy, transport, at, "before")
    expect_error(world, frozen_on_one, *arguments, error="ParameterChanged", contains=words, timeout=15)


@pytest.mark.parametrize(("at", "when"), [(20, "before"), (1, "behind")])
def test_frozen_on_one_rank_once_nobody_compares_is_named(at: int, when: str) -> None:
    """Where ranks compare nothing any more: by the rank itself in this step, by the others as they wait for it."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, frozen_on_one, "zero3", "peer", at, when, timeout=15)
    other, own = failure.value.errors[0], failure.value.errors[1]
    assert own.type_name == "ParameterChanged" and "`blocks.1." in own.message and "rank 1" in own.message
    assert other.type_name == "Disagreement" and "rank 1" in other.message


# ---- around one call: what a graph has found is not what the next forward finds


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    module.requires_grad_(False)
    yield
    module.requires_grad_(True)


class Player(nn.Module):
    """A generator and its judge, which is frozen `when` it judges for the generator."""

    def __init__(self, when: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made, self.judge = (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        made = self.made(x)
        loss = self.judge(made.detach()).sin().mean() if self.when == "behind" else 0
        if self.when != "outside":
            with frozen(self.judge):
                loss = loss + self.judge(made).square().mean()
        return loss if self.when == "behind" else loss + self.judge(made.detach()).sin().mean()


def play(model: nn.Module, x: Tensor, share: int, step: int) -> None:
    """One rank's batch."""
    if model.when == "between":  # forward and backward
        model.judge.requires_grad_(step % 2 == 0)
    loss = model(x)
    if model.when == "outside":  # a second forward, in the same backward
        with frozen(model.judge):
            loss = loss + model(x.cos())
    if model.when == "between":
        model.judge.requires_grad_(step % 3 == 0)
    (loss / share).backward()


WAYS: tuple[dict[str, Any], ...] = (
    {"slots": 1, "transport": "c10d"},
    {"transport": "peer"},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
)


def around_calls() -> dict[str, float]:
    """Deviation of gradients over four steps, by when the judge is frozen and by way."""
    world, rank, worst = dist.get_world_size(), dist.get_rank(), {}
    for when in ("before", "behind", "outside", "between"):
        for way in WAYS:
            plain, found = Player(when).double(), 0.0
            model = lamina.shard(Player(when).double(), units=["made", "judge"], **way)
            for step in range(4):
                xs = torch.randn(world, 3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                for x in xs:
                    play(plain, x, world, step)
                play(model, xs[rank], 1, step)
                found = max(found, gradient_deviation(model, {key: p.grad for key, p in plain.named_parameters()}))
                plain.zero_grad(), model.zero_grad()
            worst[f"{when}, {way}"] = found
    return worst


def test_parameters_frozen_around_one_call_equal_one_process() -> None:
    for worst in run_ranks(2, around_calls):
        assert max(worst.values()) <= TOLERANCE, {case: found for case, found in worst.items() if found > TOLERANCE}


def thawed_inside(strategy: str) -> None:
    """For the first time: nothing is there to take its gradient."""
    plain = Player("before").double()
    plain.judge.requires_grad_(False)
    lamina.shard(plain, strategy, units=["made", "judge"])(torch.ones(1, 4, dtype=torch.float64))


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_thawed_inside_a_forward_for_the_first_time_is_named(strategy: str) -> None:
    words = ["`judge.", "since the middle of this forward", "requires_grad_()"]
    expect_error(2, thawed_inside, strategy, error="ParameterChanged", contains=words)
