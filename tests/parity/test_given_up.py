"""A step of several micro-batches that is given up leaves nothing behind, and one that is not loses nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
CLEARS = ("model", "optimizer", "in place")


class Breaks(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def build(strategy: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    return model if strategy is None else lamina.shard(model, strategy, units=["0", "2"])


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + (dist.get_rank() if dist.is_initialized() else 0))
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def micro_batch(model: nn.Module, number: int, last: bool, defer: bool, breaks: str = "") -> None:
    hook = model[1].register_forward_hook(lambda *now: Breaks.apply(now[2])) if breaks == "middle" else None
    with lamina.accumulate(model, last=last, defer=defer):
        output = model(batch(number))
        if hook is not None:
            hook.remove()
        if breaks == "forward":
            raise ZeroDivisionError
        loss = (Breaks.apply(output) if breaks == "last" else output).pow(2).sum()
        lamina.token_mean(loss, 3).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    return [(g.full() if isinstance(g, lamina.Shard) else g).clone() for g in found]


def complete(model: nn.Module, defer: bool) -> list[Tensor]:
    for number in range(3):
        micro_batch(model, number, number == 2, defer)
    found = gradients(model)
    model.zero_grad()
    return found


def cleared(model: nn.Module, how: str) -> None:
    if how == "model":
        model.zero_grad()
    else:
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=how == "optimizer")


def given_up(strategy: str, defer: bool) -> Iterator[tuple[str, str, float]]:
    model = build(strategy)
    wanted = complete(model, defer)
    for breaks, how in itertools.product(("", "forward", "middle", "last"), CLEARS):
        micro_batch(model, 5, False, defer)
        if breaks:
            with pytest.raises(ZeroDivisionError):
                micro_batch(model, 6, False, defer, breaks)
        cleared(model, how)
        if how == "in place" and strategy in ("zero2", "zero3") and not defer:
            # complete gradients: nothing tells zeroing from scaling, and tokens are being counted
            with pytest.raises(lamina.StateError, match="tokens are still being counted"):
                complete(model, defer)
            cleared(model, "model")
        found = complete(model, defer)
        yield breaks, how, max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True))
    for breaks in ("forward", "last"):  # one micro-batch is left out, the step goes on
        micro_batch(model, 0, False, defer)
        micro_batch(model, 1, False, defer)
        with pytest.raises(ZeroDivisionError):
            micro_batch(model, 6, False, defer, breaks)
        if breaks == "forward":  # its tokens were not counted
            micro_batch(model, 2, True, defer)
            found = gradients(model)
            yield breaks, "goes on", max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True))
        model.zero_grad()


def run_given_up(strategy: str, defer: bool) -> list[tuple[str, str, float]]:
    return list(given_up(strategy, defer))


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cleared_sums_are_gone(strategy: str, defer: bool) -> None:
    for rows in run_ranks(2, run_given_up, strategy, defer):
        assert len(rows) == 13
        assert not [row for row in rows if not row[-1] <= 1e-12], rows


class Uneven(nn.Module):
    """Every second rank leaves the first layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.second(x if skips else torch.tanh(self.first(x)))


def micro_batches(model: nn.Module, numbers: tuple[int, ...], defer: bool, ends: bool = True) -> None:
    for number in numbers:
        with lamina.accumulate(model, last=ends and number == numbers[-1], defer=defer):
            model(batch(number), dist.get_rank() % 2 == 1).pow(2).mean().backward()


def given_up_beside_gradients(
    strategy: str | tuple[int, int, int], ways: tuple[str, ...]
) -> list[tuple[str, bool, bool, bool, float]]:
    """Sums wait where there was a gradient before, of zeros; and on ranks that contributed nothing to them."""
    torch.manual_seed(0)
    model = Uneven().double()
    lamina.shard(
        model, strategy if isinstance(strategy, str) else lamina.Strategy(*strategy), units=["first", "second"]
    )
    micro_batches(model, (0, 1, 2), defer=False)
    wanted = gradients(model)
    rows = []
    for how, stands, defers, defer in itertools.product(ways, (False, True), (False, True), (False, True)):
        model.zero_grad()
        if stands:
            micro_batches(model, (7,), defer=False)
            model.zero_grad(set_to_none=False)
        micro_batches(model, (5, 6), defers, ends=False)
        cleared(model, how)
        micro_batches(model, (0, 1, 2), defer)
        worst = max(float((a - b).abs().max()) for a, b in zip(wanted, gradients(model), strict=True))
        rows.append((how, stands, defers, defer, worst))
    return rows


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_sums_beside_gradients_are_gone(strategy: str) -> None:
    for rows in run_ranks(2, given_up_beside_gradients, strategy, CLEARS):
        assert len(rows) == 24
        assert not [row for row in rows if not row[-1] <= 1e-12], rows


def test_sums_that_ranks_hold_for_others_are_gone() -> None:
    for rows in run_ranks(4, given_up_beside_gradients, (1, 2, 4), CLEARS[:1]):
        assert len(rows) == 8
        assert not [row for row in rows if not row[-1] <= 1e-12], rows


def reads(strategy: str) -> list[str]:
    """What is said of gradients that are not complete."""
    said = []
    for use in ("norm", "step", "own step", "clip", "own clip", "print"):
        model = build(strategy)
        optimizer = (lamina.optim.AdamW if use == "own step" else torch.optim.AdamW)(model.parameters())
        micro_batch(model, 0, False, True)
        params = list(model.parameters())
        try:
            if use == "norm":
                params[0].grad.norm()
            elif use.endswith("step"):
                optimizer.step()
            elif use == "clip":
                nn.utils.clip_grad_norm_(params, 1.0)
            elif use == "own clip":
                lamina.clip_grad_norm_(model, 1.0)
            else:
                said.append(repr(params[0].grad))
        except lamina.StateError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_is_not_complete_cannot_be_used(strategy: str) -> None:
    for said in run_ranks(2, reads, strategy):
        assert len(said) == 6, said
        assert all("complete" in words and "last" in words for words in said), said
