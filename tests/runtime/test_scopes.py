"""`token_mean`, `total` and `even` against one process that sees all tokens of the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lamina
from hangs.training import under_short_limits
from harness import expect_error, run_ranks

COUNTS = {(0, 0): 6, (0, 1): 3, (1, 0): 2, (1, 1): 5}  # tokens of (rank, micro-batch)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def tokens_of(rank: int, micro: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randn(COUNTS[rank, micro], 5, dtype=torch.float64, generator=generator)


def loss_sum(model: nn.Module, data: Tensor) -> Tensor:
    return model(data).pow(2).sum()


def reference(micros: tuple[int, ...]) -> list[Tensor]:
    model = build()
    everything = torch.cat([tokens_of(rank, micro) for rank in (0, 1) for micro in micros])
    (loss_sum(model, everything) / len(everything)).backward()
    return [p.grad for p in model.parameters()]


def assert_gradients(model: nn.Module, wanted: list[Tensor]) -> None:
    for (name, p), grad in zip(model.named_parameters(), wanted, strict=True):
        here = p.grad.full() if isinstance(p.grad, lamina.Shard) else p.grad
        torch.testing.assert_close(here, grad, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def weigh(strategy: str, way: str, defer: bool) -> None:
    rank = torch.distributed.get_rank()
    model = lamina.shard(build(), strategy, units=[nn.Linear])
    if way == "outside":
        data = tokens_of(rank, 0)
        loss = lamina.token_mean(loss_sum(model, data), len(data))
        torch.testing.assert_close(loss.detach(), loss_sum(build(), data).detach() / len(data))
        loss.backward()
        assert_gradients(model, reference((0,)))
        return
    total = lamina.total(sum(COUNTS[rank, micro] for micro in (0, 1))) if way == "given" else None
    for micro in (0, 1):
        data = tokens_of(rank, micro)
        with lamina.accumulate(model, last=micro == 1, defer=defer):
            lamina.token_mean(loss_sum(model, data), len(data), total=total).backward()
    assert_gradients(model, reference((0, 1)))


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_token_mean_is_the_mean_over_all_tokens(strategy: str) -> None:
    run_ranks(2, weigh, strategy, "outside", False)
    for way in ("given", "settled"):
        for defer in (False, True):
            run_ranks(2, weigh, strategy, way, defer)


def chunks(strategy: str, again: bool) -> None:
    """A head called on chunks inside `keep`, a backward each; the trunk's backward at the end."""
    rank = torch.distributed.get_rank()
    model, plain = lamina.shard(build(), strategy, units=[nn.Linear]), build()
    if again:  # gradients are there already, and stay in the sum
        model(tokens_of(rank, 1)).pow(2).mean().backward()
        for r in (0, 1):
            (plain(tokens_of(r, 1)).pow(2).mean() / 2).backward()
    with lamina.keep(model[2]):
        hidden = model[1](model[0](tokens_of(rank, 0)))
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.chunk(2):
            model[2](chunk).pow(2).sum().backward()
        hidden.backward(leaf.grad)
    for r in (0, 1):
        (plain(tokens_of(r, 0)).pow(2).sum() / 2).backward()
    assert_gradients(model, [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_chunks_of_a_head_inside_keep(strategy: str) -> None:
    for again in (False, True):
        run_ranks(2, chunks, strategy, again)


def let_go_after_an_error(strategy: str) -> None:
    """Gradients from before the scope are still there when it ends by an error, and nothing of it is."""
    rank = torch.distributed.get_rank()
    model, plain = lamina.shard(build(), strategy, units=[nn.Linear]), build()
    model(tokens_of(rank, 1)).pow(2).mean().backward()
    for r in (0, 1):
        (plain(tokens_of(r, 1)).pow(2).mean() / 2).backward()
    with pytest.raises(ZeroDivisionError), lamina.keep(model):
        model(tokens_of(rank, 0)).pow(2).sum().backward()
        raise ZeroDivisionError
    assert_gradients(model, [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_error_inside_keep_leaves_earlier_gradients(strategy: str) -> None:
    run_ranks(2, let_go_after_an_error, strategy)


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def keep_after_a_failed_backward(strategy: str, transport: str) -> None:
    """The weights changed after it: `keep` must not hold what that backward had gathered."""
    rank = torch.distributed.get_rank()
    model, plain = lamina.shard(build(), strategy, units=[nn.Linear], transport=transport), build()
    with pytest.raises(ZeroDivisionError):
        handle = model[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        model(tokens_of(rank, 0)).sum().backward()
    handle.remove()
    model.zero_grad()
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(1.5)
    with lamina.keep(model[2]):
        found = model(tokens_of(rank, 0))
        found.sum().backward()
    for r in (0, 1):
        (plain(tokens_of(r, 0)).sum() / 2).backward()
    torch.testing.assert_close(found, plain(tokens_of(rank, 0)), rtol=0, atol=1e-12)
    assert_gradients(model, [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("transport", ["c10d", "peer"])
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_keep_after_a_failed_backward_holds_the_weights_of_now(strategy: str, transport: str) -> None:
    run_ranks(2, keep_after_a_failed_backward, strategy, transport)


def run_out(strategy: str) -> None:
    """Rank 0 has three batches, rank 1 two: the third is rank 0's alone."""
    rank = torch.distributed.get_rank()
    model, plain = lamina.shard(build(), strategy, units=[nn.Linear]), build()
    batches = {r: [torch.full((2, 5), 0.1 * (3 * r + i + 1)).double() for i in range(3 - r)] for r in (0, 1)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    steps = 0
    for batch in lamina.even(batches[rank]):
        model(batch).pow(2).mean().backward()
        there = [batches[r][steps] for r in (0, 1) if steps < len(batches[r])]
        plain(torch.cat(there)).pow(2).mean().backward()
        assert_gradients(model, [p.grad for p in plain.parameters()])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
    assert steps == 3
    with lamina.gathered(model):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_even_goes_on_at_weight_zero(strategy: str) -> None:
    run_ranks(2, run_out, strategy)


def one_loader_is_empty() -> None:
    model = lamina.shard(build(), "zero3", units=[nn.Linear])
    for _ in lamina.even([1, 2] if torch.distributed.get_rank() else []):
        assert model.training


def test_an_empty_loader_is_named() -> None:
    expect_error(2, one_loader_is_empty, error="UsageError", contains=("rank 0", "empty"))


def weighted_run_out() -> None:
    """Tokens and unequal numbers of batches together."""
    rank = torch.distributed.get_rank()
    model, plain = lamina.shard(build(), "zero3", units=[nn.Linear]), build()
    mine = [tokens_of(rank, micro) for micro in range(2 - rank)]
    for number, data in enumerate(lamina.even(mine)):
        lamina.token_mean(loss_sum(model, data), len(data)).backward()
        there = torch.cat([tokens_of(r, number) for r in (0, 1) if number < 2 - r])
        (loss_sum(plain, there) / len(there)).backward()
    assert_gradients(model, [p.grad for p in plain.parameters()])


def test_token_mean_with_a_rank_that_has_run_out() -> None:
    run_ranks(2, weighted_run_out)


def with_other_terms(strategy: str, term: str, scale: float) -> None:
    """A term that is no mean over tokens: in the same loss, a loss of its own, or a loss before."""
    rank, model = torch.distributed.get_rank(), lamina.shard(build(), strategy, units=[nn.Linear])
    data = tokens_of(rank, 0)
    if term == "before":
        model(data).pow(2).mean().backward()
    with lamina.accumulate(model, last=True):
        means = [lamina.token_mean(loss_sum(model, part), len(part)) for part in data.chunk(2)]
        loss = torch.stack(means).sum() * scale
        if term == "penalty":
            loss = loss + model[0].bias.pow(2).sum()
        if term == "output":
            loss = loss + model(data).abs().mean()
        loss.backward()
    if term == "none":
        assert_gradients(model, [scale * grad for grad in reference((0,))])


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_what_would_be_divided_by_tokens_as_well_is_named(strategy: str) -> None:
    run_ranks(2, with_other_terms, strategy, "none", 4.0)
    for term in ("penalty", "output"):
        expect_error(2, with_other_terms, strategy, term, 2.0, error="StateError", contains=["other terms", "total="])
    words = ["earlier losses", "total="]
    expect_error(2, with_other_terms, strategy, "before", 1.0, error="StateError", contains=words)


def on_one_rank(strategy: str) -> None:
    """Two models in turn, a micro-batch given up before its backward, two losses in one micro-batch."""
    pairs = [(build(), lamina.shard(build(), strategy, units=[nn.Linear])) for _ in range(2)]
    for step in range(2):
        for plain, model in pairs:
            with lamina.accumulate(model, last=False):
                lamina.token_mean(loss_sum(model, tokens_of(0, 0)), 6)  # not finite, say
            for micro in (0, 1):
                data = tokens_of(step, micro)
                with lamina.accumulate(model, last=micro == 1):
                    means = [lamina.token_mean(loss_sum(model, part), len(part)) for part in data.chunk(2)]
                    torch.stack(means).sum().backward()
                (loss_sum(plain, data) / (COUNTS[step, 0] + COUNTS[step, 1])).backward()
            assert_gradients(model, [p.grad for p in plain.parameters()])
            for each in (plain, model):
                each.zero_grad()


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_tokens_of_one_rank(strategy: str) -> None:
    run_ranks(1, on_one_rank, strategy)
    run_ranks(2, on_one_rank, strategy)


def tokens_on_one(strategy: str) -> None:
    """One rank weighs by tokens, the other takes its own mean."""
    rank, model = torch.distributed.get_rank(), lamina.shard(build(), strategy, units=[nn.Linear])
    for step in range(2):
        data = tokens_of(rank, 0, step)
        is_mine = rank == 0 and step == 1
        (lamina.token_mean(loss_sum(model, data), len(data)) if is_mine else model(data).pow(2).mean()).backward()


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_token_mean_on_one_rank_is_named(strategy: str) -> None:
    """Its sum must not meet a reduction: of another size, it ended the process."""
    words = ["lamina.token_mean()"]
    expect_error(2, under_short_limits, tokens_on_one, strategy, error="Disagreement", contains=words, timeout=15)
