"""What is no argument, moment or model for the public calls: a named error on every rank, and nothing half-done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def sharded() -> nn.Module:
    return lamina.shard(model())


def on(values: list[Any], call: Callable[[Any], Any]) -> Iterator[tuple[Callable[[], Any], str]]:
    """One call for each of the values; the error has to show it or its type."""
    for value in values:
        items = [repr(item) for item in value] if isinstance(value, list) else []
        yield lambda value=value: call(value), "|".join([repr(value), type(value).__name__, *items])


def arguments_of_shard() -> Iterator[tuple[Callable[[], Any], str]]:
    names: list[Any] = [None, 3, "0", [3], [None], [nn.Linear]]
    wrong: dict[str, list[Any]] = {
        "mesh": [1, "cpu", [0, 1], (2,)],
        "units": [None, 3, b"0", nn.Linear],
        "precision": [torch.bfloat16, "BF16", 16, lamina.Precision],
        "compile": ["yes", None, 1],
        "slots": [0, -1, 2.5, "3", True],
        "seed": [-1.5, "x", 2**70],
        "transport": [None, "nccl"],
        "recompute": [None, True, -1, "FULL"],
        "start": [None, "CHECK"],
        "entry_points": [*names, ["missing"], ["0"], ["training"]],
        "replicate": [*names, ["missing"]],
        "ignore": [*names, ["missing"]],
    }
    for argument, values in wrong.items():
        yield from on(values, lambda value, argument=argument: lamina.shard(model(), **{argument: value}))
    yield lambda: lamina.shard(model(), units=[[]]), "empty list"
    for field, values in {
        "compute": ["bf16", torch.int8, torch.complex64, torch.float8_e4m3fn],
        "output": ["fp32", torch.int64],
        "wire": [torch.int32],
        "master": [None, torch.float8_e4m3fn, torch.bfloat16, torch.float16],
        "keep": ["norm", 3, (3,)],
    }.items():
        yield from on(
            values, lambda value, field=field: lamina.shard(model(), precision=lamina.Precision(**{field: value}))
        )
    yield from on([None, 3, [nn.Linear(2, 2)], nn.Linear(2, 2).weight], lamina.shard)


def arguments_of_others() -> Iterator[tuple[Callable[[], Any], str]]:
    no_list = [None, 3, model]
    yield from on(no_list, lambda value: lamina.gathered(value).__enter__())
    yield from on(no_list, lambda value: lamina.keep(value).__enter__())
    yield from on([*no_list, ["x"]], lambda value: lamina.clip_grad_norm_(value, 1.0))
    yield from on(["x", None], lambda value: lamina.clip_grad_norm_(sharded(), value))
    yield from on(no_list, lambda value: next(lamina.even(value)))
    yield from on(no_list, lambda value: lamina.trace(value).__enter__())
    yield from on([None, "3", 1j, [1, 2], -1, float("nan")], lamina.total)
    loss = torch.ones(())
    yield from on([None, "3", 1j, torch.ones(2), -1], lambda value: lamina.token_mean(loss, value))
    yield from on(["3", 1j, -1], lambda value: lamina.token_mean(loss, 3, total=value))
    yield lambda: lamina.token_mean(torch.ones(2), 3), "shape (2,)"
    yield lambda: lamina.token_mean(1.0, 3), "float"
    world, weight = dist.group.WORLD, nn.Parameter(torch.ones(4, 4))
    yield from on([None, 3, torch.ones(2)], lambda value: lamina.split_parameter(value, 0, world))
    yield from on([None, 2, 0.0], lambda value: lamina.split_parameter(weight, value, world))
    yield from on([None, "tensor"], lambda value: lamina.split_parameter(weight, 0, value))
    yield lambda: lamina.split_parameter(sharded()[0].weight, 0, world), "after lamina.shard()"


class Overlapping(nn.Module):
    """Two parameters, or a parameter and a buffer, in the same memory."""

    def __init__(self, other: Callable[[Tensor], Tensor], buffer: bool = False) -> None:
        super().__init__()
        memory = torch.arange(24.0).view(4, 6)
        self.first = nn.Parameter(memory[:, :4])
        if buffer:
            self.register_buffer("other", other(memory))
        else:
            self.other = nn.Parameter(other(memory))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first + self.other.sum()


def models_and_moments() -> Iterator[tuple[Callable[[], Any], str]]:
    yield lambda: lamina.shard(Overlapping(lambda memory: memory[:, 2:])), "`first` and `other`"
    yield lambda: lamina.shard(Overlapping(lambda memory: memory[:, :4].t())), "`first` and `other`"
    yield lambda: lamina.shard(Overlapping(lambda memory: memory[1, :2], buffer=True), "ddp"), "`first` and `other`"
    whole = sharded()
    yield lambda: lamina.shard(whole[0]), "`weight` belongs to a Sequential"
    yield lambda: lamina.shard(nn.Sequential(nn.Linear(4, 4), whole[2])), "`1.weight` belongs to a Sequential"
    tied = nn.Linear(4, 4)
    tied.weight = whole[0].weight
    yield lambda: lamina.shard(tied), "`weight` belongs to a Sequential"
    with torch.inference_mode():
        frozen = model()
    yield lambda: lamina.shard(frozen), "`0.weight` was made inside torch.inference_mode()"
    for moment, words in (
        (torch.inference_mode, "inside torch.inference_mode()"),
        (lambda: torch.device("meta"), "the default device is meta"),
        (lamina.deferred, "inside lamina.deferred()"),
    ):
        yield lambda moment=moment: within(moment(), lambda: lamina.shard(model())), words


def within(scope: Any, act: Callable[[], Any]) -> Any:
    with scope:
        return act()


def refused(attempts: Callable[[], Iterator[tuple[Callable[[], Any], str]]]) -> list[str]:
    """What was not refused, or by an error that is none of ours, or without its words; and whether a model trains."""
    left = []
    for number, (act, words) in enumerate(attempts()):
        try:
            act()
        except lamina.LaminaError as error:
            if not any(word in str(error) for word in words.split("|")):
                left.append(f"{number}: {words} is not in {error}")
        except Exception as error:
            left.append(f"{number}: {words}: {type(error).__name__}: {error}")
        else:
            left.append(f"{number}: {words} was taken")
    after = sharded()
    after(torch.ones(2, 4)).sum().backward()
    if after[2].bias.grad.full().tolist() != [2.0] * 4:
        left.append("a model that is sharded afterwards is wrong")
    return left


def test_arguments_that_cannot_be_meant_are_named_on_every_rank() -> None:
    for attempts in (arguments_of_shard, arguments_of_others, models_and_moments):
        for left in run_ranks(2, refused, attempts):
            assert not left, "\n".join(left)


def disjoint() -> float:
    """Columns of one packed matrix reach over each other in memory and share no element."""
    model = Overlapping(lambda memory: memory[:, 4:])
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    lamina.shard(model)
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    counts = {"first": 1.0, "other": 4.0}  # how often the sum of the output holds each element
    return max(float((model.get_parameter(n).full() - (v - counts[n])).abs().max()) for n, v in expected.items())


def test_parameters_of_one_memory_that_share_nothing_are_taken() -> None:
    assert max(run_ranks(2, disjoint)) == 0.0


def weighted(counts: tuple[float, float], inside: bool) -> float:
    """Gradients of a mean over weights whose sum is below one, against what they are."""
    mine = counts[dist.get_rank()]
    model = lamina.shard(nn.Linear(1, 1, bias=False).double(), start="broadcast")
    x = torch.full((1, 1), float(dist.get_rank() + 1), dtype=torch.float64)
    loss = model(x).sum() * mine
    if inside:
        with lamina.accumulate(model, last=True):
            shown = lamina.token_mean(loss, mine)
            shown.backward()
    else:
        shown = lamina.token_mean(loss, mine)
        shown.backward()
    assert abs(float((shown - model(x).sum()).detach())) < 1e-12 or mine == 0
    wanted = (counts[0] + 2 * counts[1]) / sum(counts)
    return abs(float(model.weight.grad.full()) - wanted)


def test_counts_may_be_weights_below_one() -> None:
    for counts in ((0.25, 0.125), (0.5, 0.0)):
        for inside in (False, True):
            assert max(run_ranks(2, weighted, counts, inside)) < 1e-10
