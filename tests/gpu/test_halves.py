"""Masters in halves on GPUs: the kernel that updates both, and steps of two ranks whose lanes drift apart."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lamina
from gpu.cards import most_ranks, run_on_cards, take_card
from gpu.test_nccl import Block, build
from lamina.core.halves import halve, join
from lamina.optim import adamw, capture
from lamina.runtime.access import runtime_of
from runtime.test_halves import publish_ties_away

pytestmark = pytest.mark.gpu
SPECIAL_BITS = [0, 1, 0x7FFFFF, 0x8000, 0x18000, 0x7FFF, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x3F808000, 0x3F818000]


def numbers(numel: int) -> Tensor:
    """Random ones, behind zeros, denormals, ties, the largest, infinity and NaN of both signs."""
    bits = torch.tensor([*SPECIAL_BITS, *(at - 2**31 for at in SPECIAL_BITS)], dtype=torch.int32, device="cuda")
    made = torch.randn(numel, device="cuda")
    made[: len(bits)] = bits.view(torch.float32)[:numel]
    return made


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("maximize", [False, True])
def test_the_kernel_updates_both_halves(shift: int, maximize: bool) -> None:
    """Bit for bit what it makes of the numbers themselves. The first elements get no gradient: they stay special."""
    from lamina.optim import adamw_kernel  # Triton is there on GPUs only

    torch.manual_seed(0)
    params = [numbers(shift + numel)[shift:] for numel in (22, 4096, 600_003)]  # the last takes three rows of the table
    grads, means, squares = ([torch.randn_like(p) for p in params] for _ in range(3))
    for tensors in (grads, means, squares):
        for tensor in tensors:
            tensor.abs_()[:22] = 0
    others = [[m.clone() for m in moments] for moments in (means, squares)]
    steps = list(torch.zeros(len(params), device="cuda").unbind())
    weights, remainders = ([torch.empty_like(p, dtype=d) for p in params] for d in (torch.bfloat16, torch.int16))
    copies = [torch.empty_like(weight) for weight in weights]
    for number, weight, remainder in zip(params, weights, remainders, strict=True):
        halve(number, weight, remainder)
    whole = adamw_kernel.Table((params, grads, means, squares, steps), copies)
    halved = adamw_kernel.Table((others[0], grads, *others, steps), weights, remainders)
    for _ in range(4):
        torch._foreach_add_(steps, 1)
        for table in (whole, halved):
            adamw_kernel.launch(table, 1e-2, None, None, (0.9, 0.99), 1e-8, 0.0, maximize, True)
        for number, weight, remainder, copy in zip(params, weights, remainders, copies, strict=True):
            back = torch.empty_like(number)
            join(weight, remainder, back)
            nan, is_tie = number.isnan(), (number.view(torch.int32) & 0xFFFF) == 0x8000
            assert torch.equal(back.isnan(), nan) and torch.equal(weight.isnan(), nan)
            assert torch.equal(back.view(torch.int32)[~nan], number.view(torch.int32)[~nan])
            assert torch.equal(weight[~nan & ~is_tie], copy[~nan & ~is_tie]), "else torch's rounding"
    for ours, theirs in zip((*means, *squares), (*others[0], *others[1]), strict=True):
        assert torch.equal(ours, theirs)


def let_ties_go_away(model: Any) -> None:
    """What a model with whole masters publishes is rounded as halves are."""
    units, gatherer = runtime_of(model).units, runtime_of(model).engine.gatherer
    before = gatherer.publish

    def publish(units_of_step: Any) -> None:
        for unit in units:
            unit.dirty.published = False  # what the step wrote is rounded as torch does it
        before(units_of_step)

    publish_ties_away(model)
    gatherer.publish = publish


def train(rank: int, world: int, folder: str, max_norm: float | None) -> None:
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ends = []
    if max_norm is None:  # halves are then updated by torch's kernel, which rounds elsewhere than ours
        adamw.by_own_kernel = lambda *args, **choices: False  # type: ignore[attr-defined]
    for halves in (False, True) if max_norm is None else (False, True, None):
        precision = lamina.Precision(compute=torch.bfloat16, halves=halves)
        model = lamina.shard(build().float(), units=[Block], precision=precision, transport="peer")
        if halves is False:
            let_ties_go_away(model)
        optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=max_norm)
        weight, held = next(model.parameters()), torch.empty(0)
        for step in range(8):
            data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).cuda() + rank
            if (step + rank) % 2:  # ranks drift apart, on the device
                torch.cuda._sleep(20_000_000)
            model(data).pow(2).mean().backward()
            with torch.no_grad():
                if step == 2:
                    weight.mul_(0.5)
                optimizer.step()
                if halves is not False and step == 1:
                    whole = any(unit.has_whole_masters for unit in runtime_of(model).units)
                    assert whole == (max_norm is None), "the kernel writes both halves where they lie"
                optimizer.zero_grad()
                if step == 3 and max_norm is None:  # else torch's kernel would update what is held, and ours the rest
                    held = weight.local
                if step in (4, 5) and held.numel():
                    held.add_(0.01)
                    lamina.sync(model)
                if step == 5:
                    held = torch.empty(0)
                if step == 6:
                    weight.norm()
                    model(data)
        ends.append([master.clone() for unit in runtime_of(model).units for master in unit.read_masters()])
        model(data)
        assert not any(unit.has_whole_masters for unit in runtime_of(model).units)
        assert all(bool(unit.halved) is (halves is not False) for unit in runtime_of(model).units)
    for masters in zip(*ends, strict=True):
        assert all(torch.equal(masters[0], halved) for halved in masters[1:])
    dist.destroy_process_group()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_steps_are_those_of_whole_masters(max_norm: float | None) -> None:
    assert most_ranks() >= 2, "this test needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(2, train, 2, folder, max_norm)


def average_and_capture(rank: int, world: int, folder: str) -> None:
    """Masters that lamina has halved, and puts together for good: for an average, and for a graph."""
    take_card(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ends = []
    for way in ("eager", "captured"):
        model = lamina.shard(build().float(), units=[Block], precision="bf16", transport="peer")
        optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=0.5)
        units = runtime_of(model).units

        def step(data: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            model(data).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        def data_of(number: int) -> Tensor:
            return torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).cuda() + rank

        for number in range(2):
            step(data_of(number))
        assert all(unit.halved for unit in units) and "in halves" in str(lamina.report(model))
        before = [master.clone() for unit in units for master in unit.read_masters()]
        capture.keep_masters_whole()
        assert not any(unit.halved for unit in units)
        assert all(map(torch.equal, before, (master for unit in units for master in unit.masters)))
        call = lamina.capture(step) if way == "captured" else step
        for number in range(2, 10):
            call(data_of(number))
        assert not any(unit.halved for unit in units)
        ends.append([master.clone() for unit in units for master in unit.masters])
        if way == "captured":
            call.release()
    for eager, captured in zip(*ends, strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-5, atol=1e-6)
    model = lamina.shard(build().float(), units=[Block], precision="bf16", transport="peer")
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=0.5)
    with torch.no_grad():
        average = [p.detach().clone() for p in model.parameters()]
    forms = []
    for number in range(6):
        if (number + rank) % 2:  # ranks drift apart, on the device
            torch.cuda._sleep(20_000_000)
        step(data_of(number), model, optimizer)
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)
        forms.append(all(unit.halved for unit in runtime_of(model).units))
    assert forms == [True] * 3 + [False] * 3, forms
    with torch.no_grad():
        model(data_of(9))
    for unit in runtime_of(model).units:
        for master, published in zip(unit.masters, unit.published, strict=True):
            assert torch.equal(published, master.to(published.dtype))
    dist.destroy_process_group()


def test_masters_are_put_together_for_good() -> None:
    assert most_ranks() >= 2, "this test needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        run_on_cards(2, average_and_capture, 2, folder)
