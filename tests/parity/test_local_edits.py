"""Parameters that are changed through `p.local`, by torch operations: the next forward reads what was written.

Where ranks read published copies, these must be made anew; where weights stay gathered, they must be gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, gradient_deviation

DIM = 8
WAYS: tuple[dict[str, object], ...] = (
    {"strategy": "zero3"},
    {"strategy": "zero3", "transport": "c10d"},
    {"strategy": "zero3", "transport": "c10d", "slots": 1},
    {"strategy": "zero2"},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
    {"strategy": lamina.Strategy(params=1, grads=2, optimizer=2), "transport": "peer"},
)
Edit = Callable[[list[Tensor]], None]


def in_place(values: list[Tensor]) -> None:
    for value in values:
        value.mul_(0.5).add_(0.1)


def in_a_list(values: list[Tensor]) -> None:
    torch._foreach_mul_(values, 0.5)


def by_copy(values: list[Tensor]) -> None:
    for value in values:
        value.copy_(torch.full_like(value, 0.3))


def by_index(values: list[Tensor]) -> None:
    for value in values:
        value.view(-1)[:] = 0.2


def by_an_optimizer(values: list[Tensor]) -> None:
    for value in values:
        value.grad = torch.ones_like(value)
    torch.optim.SGD(values, lr=0.1).step()
    for value in values:
        value.grad = None


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).double()


def locals_of(model: nn.Module) -> list[Tensor]:
    return [p.local if isinstance(p, lamina.Shard) else p.data for p in model.parameters()]


def deviations(edit: Edit, ways: Sequence[dict[str, object]]) -> list[float]:
    """Of gradients after edits behind an evaluation, a forward without a backward, and a step of lamina's optimizer."""
    found = []
    for way in ways:
        plain, model = net(), lamina.shard(net(), units=["0", "2", "3"], **way)  # type: ignore[arg-type]
        optimizers = [torch.optim.AdamW(plain.parameters()), lamina.optim.AdamW(model.parameters())]
        worst, world = 0.0, dist.get_world_size()
        for step in range(4):
            batches = [
                torch.randn(2, DIM, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)
            ]
            x = batches[dist.get_rank()].double()
            for other in batches:
                (plain(other.double()).pow(2).mean() / world).backward()
            model(x).pow(2).mean().backward()
            worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in plain.named_parameters()}))
            if step == 2:
                for optimizer in optimizers:
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if step == 0:
                with torch.no_grad():
                    model(x)
            if step == 1:
                model(x)
            for either in (plain, model):
                edit(locals_of(either))
        found.append(worst)
    return found


@pytest.mark.parametrize(
    "edit", [in_place, in_a_list, by_copy, by_index, by_an_optimizer], ids=lambda edit: edit.__name__
)
def test_the_next_forward_reads_what_was_written(edit: Edit) -> None:
    for worst in run_ranks(2, deviations, edit, WAYS):
        assert max(worst) <= TOLERANCE, worst


def edited_before_its_backward(ways: Sequence[dict[str, object]]) -> list[str]:
    said = []
    for way in ways:
        model = lamina.shard(net(), units=["0", "2", "3"], **way)  # type: ignore[arg-type]
        loss = model(torch.ones(2, DIM).double()).sum()
        in_place(locals_of(model))
        try:
            loss.backward()
            said.append("")
        except lamina.errors.StateError as error:
            said.append(str(error))
    return said


def test_an_edit_between_forward_and_backward_is_named() -> None:
    for said in run_ranks(2, edited_before_its_backward, WAYS[:3]):
        assert all("were changed between its forward and this backward" in text for text in said), said


def moved_before_the_first_forward() -> float:
    """`model.to()` and the like give parameters other memory: taking that back is no edit of the user's."""
    data, worst = torch.ones(2, 8, dtype=torch.float64), 0.0
    for way in ({"transport": "peer"}, {"transport": "c10d"}, {"strategy": "zero2"}):
        plain, model = net(), lamina.shard(net(), **way)
        for _ in range(2):
            for each in (plain, model):
                each._apply(torch.clone)  # as `.to(device)` does where it moves
                each(data).sum().backward()
        worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in plain.named_parameters()}))
    return worst


def test_memory_that_is_taken_back_is_no_edit() -> None:
    assert max(run_ranks(2, moved_before_the_first_forward)) <= TOLERANCE
