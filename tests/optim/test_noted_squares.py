"""The norm from squares that reductions have noted: right whatever was done to gradients since, taken where it can be.

Each change is made in every step, between the backward and the norm, by code that a user may write.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.optim import clip

STEPS = 4
Change = Callable[[nn.Module, dict], None]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@change
def nothing(model, kept):
    pass


@change
def written_by_an_operation(model, kept):
    gradients(model)[0].mul_(3.0)


@change
def written_by_a_list_operation(model, kept):
    torch._foreach_mul_(gradients(model), 0.5)


@change
def written_locally(model, kept):
    gradients(model)[1].local.add_(1.0)


@change
def written_by_data(model, kept):
    gradients(model)[2].data.mul_(2.0)


@change
def written_through_an_alias_of_earlier(model, kept):
    """Gradients that are zeroed in place stay where they are, and so do views of them."""
    if "aliases" not in kept:
        kept["aliases"] = [grad.local.view(-1) for grad in gradients(model)]
    for alias in kept["aliases"]:
        alias.mul_(0.5)


@change
def summed_by_a_collective(model, kept):
    dist.all_reduce(gradients(model)[0].local[:3])


@change
def written_as_numpy(model, kept):
    gradients(model)[0].local.numpy()[:] = 7.0


@change
def detached(model, kept):
    gradients(model)[0].detach().zero_()


@change
def replaced(model, kept):
    first = next(model.parameters())
    first.grad = first.grad * 2.0


@change
def removed(model, kept):
    next(model.parameters()).grad = None


@change
def clipped_before(model, kept):
    lamina.clip_grad_norm_(model, 0.01)


@change
def clipped_in_part(model, kept):
    lamina.clip_grad_norm_(list(model.parameters())[:1], 0.01)


@change
def clipped_by_torch(model, kept):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@change
def clipped_by_value(model, kept):
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@change
def copied_into(model, kept):
    gradients(model)[0].copy_(torch.ones(gradients(model)[0].shape))


def norms(name: str, zeroing: str, micro_batches: int) -> tuple[list[float], list[float], int]:
    """What clipping says in each step, what the gradients say, and how often they were read for it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(3)])
    model = lamina.shard(model, units=[nn.Linear])
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2)
    kept: dict = {}
    found, wanted, reads = [], [], []
    read = clip._read_power_sum

    def counted(*args):
        reads.append(1)
        return read(*args)

    clip._read_power_sum = counted
    try:
        for step in range(STEPS):
            for micro in range(micro_batches):
                data = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + micro)) + dist.get_rank()
                with lamina.accumulate(model, last=micro == micro_batches - 1):
                    model(data).pow(2).mean().backward()
            CHANGES[name](model, kept)
            copies = [grad.clone().full() for grad in map(whole, gradients(model))] if name != "nothing" else []
            norm = lamina.clip_grad_norm_(model, 1e9)
            if name == "nothing":
                copies = [grad.full() for grad in gradients(model)] if step == STEPS - 1 else []
            if copies:
                found.append(float(norm))
                wanted.append(float(torch.stack([c.double().norm() for c in copies]).norm()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=zeroing == "none")
    finally:
        clip._read_power_sum = read
    return found, wanted, len(reads)


def whole(grad: Tensor) -> Tensor:
    """A copy that tells nobody: as a look by the test must not be what brings the right result about."""
    from lamina.core.shard_tensor import Shard

    return Shard(grad._local.clone(), grad.spec.derived) if isinstance(grad, Shard) else grad


def all_changes() -> None:
    for name in CHANGES:
        for zeroing, micro_batches in (("none", 1), ("zeros", 2)):
            found, wanted, _ = norms(name, zeroing, micro_batches)
            assert found and wanted
            for a, b in zip(found, wanted, strict=True):
                assert abs(a - b) <= 1e-6 * b, (name, zeroing, micro_batches, found, wanted)
    for micro_batches in (1, 2):
        reads = norms("nothing", "none", micro_batches)[2]
        assert reads == 1, (micro_batches, reads)  # the first time, when nobody had asked before


def in_the_step() -> list[float]:
    """`max_norm=`, with weights of tokens and with gradients that hooks change."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = lamina.shard(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)), units=[nn.Linear])
        if hooked:
            next(model.parameters()).register_hook(lambda grad: grad * 3.0)
        optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=0.1)
        for step in range(4):
            data = torch.randn(4, 24, generator=torch.Generator().manual_seed(step)) + dist.get_rank()
            loss = lamina.token_mean(model(data).pow(2).sum(), 4 + dist.get_rank())
            loss.backward()
            copies = [whole(grad).full() for grad in gradients(model)]
            optimizer.step()
            wanted = float(torch.stack([c.double().norm() for c in copies]).norm())
            assert optimizer.grad_norm is not None
            assert abs(float(optimizer.grad_norm) - wanted) <= 1e-6 * wanted, (hooked, step)
            found.append(wanted)
            optimizer.zero_grad()
    return found


def test_the_norm_is_that_of_the_gradients() -> None:
    run_ranks(2, all_changes)


def test_in_the_step() -> None:
    run_ranks(2, in_the_step)


@pytest.mark.parametrize("name", ["summed_by_a_collective", "written_through_an_alias_of_earlier"])
def test_a_look_is_remembered(name: str) -> None:
    """Who has had the memory in hand once may write there in any later step."""
    reads = run_ranks(2, norms, name, "zeros", 1)[0][2]
    assert reads == STEPS
