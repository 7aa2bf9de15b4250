"""Things that a user does behind the runtime's back: a named error on every rank, or the right result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
from harness import RankFailure, expect_error, run_ranks
from parity.reference import TOLERANCE, gradient_deviation, parameter_deviation
from parity.structures import WIDTH, Chain
from parity.test_outputs import data_of, grads, linears, own_step, reference_step, seeded, values


def sharded(strategy: str = "zero3", **options: object) -> nn.Module:
    return lamina.shard(seeded(linears), strategy, units=["blocks.*"], **options)  # type: ignore[arg-type]


def replaced() -> None:
    model = sharded()
    own_step(model)
    model.blocks[1].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    own_step(model)


def assigned() -> None:
    model = sharded()
    model.load_state_dict(seeded(linears).state_dict(), assign=True)
    own_step(model)


def tied() -> None:
    model = sharded()
    model.blocks[1].weight = model.blocks[0].weight
    own_step(model)


def cast() -> None:
    model = sharded()
    own_step(model)
    model.to(torch.bfloat16)
    own_step(model)


def twice() -> None:
    lamina.shard(sharded())


def part_twice() -> None:
    model = seeded(linears)
    lamina.shard(model.blocks[0])
    lamina.shard(model)


def create_graph() -> None:
    model = sharded()
    x = data_of(dist.get_rank()).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


def gradient_of_parameters() -> None:
    model = sharded()
    torch.autograd.grad(model(data_of(0)).sum(), list(model.parameters()), allow_unused=True)


def thawed_in_16_bit() -> None:
    """What is frozen keeps no wide master, so it cannot begin to train."""
    model = seeded(linears)
    model.blocks[0].requires_grad_(False).to(torch.bfloat16)
    model = lamina.shard(model, units=["blocks.*"], precision=lamina.Precision(compute=torch.float64, keep=()))
    model.blocks[0].requires_grad_(True)
    own_step(model)


def report_of_a_copy() -> None:
    lamina.report(copy.deepcopy(sharded()))


def report_of_a_part() -> None:
    lamina.report(sharded().blocks[0])


def report_of_a_wrapper() -> None:
    lamina.report(nn.Sequential(sharded()))


def resized_in_gathered(write: bool, rows: int) -> None:
    """As transformers' `resize_token_embeddings` does; of the first rows each is what it was."""
    model = sharded()
    with lamina.gathered(model, write=write):
        weight = model.blocks[1].weight
        weight.data = torch.cat([weight.data, torch.ones(rows, WIDTH)])


def resized_and_dropped() -> None:
    resized_in_gathered(False, 3)


def resized_and_kept() -> None:
    resized_in_gathered(True, 3)


def broadcast_in_gathered() -> None:
    model = sharded()
    with lamina.gathered([model.blocks[1].weight], write=True) as (weight,):
        weight.data = torch.zeros(1)


def cast_in_gathered() -> None:
    """Written back, the values would have the precision of the cast."""
    model = sharded()
    with lamina.gathered(model.blocks[1].bias, write=True) as bias:
        bias.data = bias.data.half()


def read_outside() -> None:
    model = sharded()
    torch.nn.functional.linear(data_of(0), model.blocks[0].weight)


def returned_weight() -> None:
    class Leaky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    model = lamina.shard(Chain(Leaky(WIDTH, WIDTH)), units=["blocks.*"])
    model(data_of(0).float())


MISUSE: dict[Callable[[], None], tuple[str, list[str]]] = {
    replaced: ("ParameterChanged", ["blocks.1.weight"]),
    assigned: ("ParameterChanged", ["weight"]),
    tied: ("ParameterChanged", ["blocks.1.weight", "parameter `blocks.0.weight`", "tie weights before"]),
    cast: ("ParameterChanged", ["bfloat16", "weight"]),
    twice: ("StateError", ["already"]),
    part_twice: ("StateError", ["already"]),
    create_graph: ("StateError", ["keep"]),
    gradient_of_parameters: ("ShardOpError", ["weight"]),
    thawed_in_16_bit: ("ParameterChanged", ["blocks.0", "bfloat16"]),
    report_of_a_copy: ("StateError", ["copy", "once"]),
    report_of_a_part: ("StateError", ["part", "whole model"]),
    report_of_a_wrapper: ("StateError", ["Sequential", "`0`"]),
    resized_and_dropped: ("StateError", ["blocks.1.weight", "lamina.shard()"]),
    resized_and_kept: ("StateError", ["blocks.1.weight", "lamina.shard()"]),
    broadcast_in_gathered: ("StateError", ["blocks.1.weight", "lamina.shard()"]),
    cast_in_gathered: ("StateError", ["blocks.1.bias", "float16"]),
    read_outside: ("ShardOpError", ["blocks.0.weight"]),
    returned_weight: ("StateError", ["weight", "clone"]),
}


@pytest.mark.parametrize("misuse", list(MISUSE), ids=lambda fn: fn.__name__)
def test_misuse_is_a_named_error(misuse: Callable[[], None]) -> None:
    error, words = MISUSE[misuse]
    expect_error(2, misuse, error=error, contains=words, timeout=15)


def different_models() -> None:
    torch.manual_seed(0)
    lamina.shard(Chain(*(nn.Linear(WIDTH, WIDTH + dist.get_rank()) for _ in range(2))))


def different_weights() -> None:
    torch.manual_seed(dist.get_rank())
    lamina.shard(linears())


def different_arguments() -> None:
    sharded("zero3" if dist.get_rank() else "zero2")


def error_on_one() -> None:
    sharded() if dist.get_rank() else lamina.shard(seeded(linears), units=["nothing.*"])


def test_ranks_that_disagree_at_the_start_are_named() -> None:
    expect_error(2, different_models, error="Disagreement", contains=["blocks.0.weight", "rank"], timeout=15)
    words = ["first.weight", "rank 1", "broadcast"]
    expect_error(2, different_weights, error="Disagreement", contains=words, timeout=15)
    expect_error(2, different_arguments, error="Disagreement", contains=["zero2", "zero3"], timeout=15)


def test_an_error_of_one_rank_is_an_error_on_all() -> None:
    with pytest.raises(Exception, match="nothing") as caught:
        run_ranks(2, error_on_one, timeout=15)
    assert sorted(caught.value.errors) == [0, 1]  # type: ignore[attr-defined]
    assert all("nothing" in error.message for error in caught.value.errors.values())  # type: ignore[attr-defined]


def uneven_steps() -> None:
    model = sharded()
    for step in range(3 - dist.get_rank()):
        own_step(model, step)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model(data_of(1))
        own_step(model)


def test_uneven_steps_are_named_on_every_rank() -> None:
    expect_error(2, uneven_steps, error="Disagreement", contains=["rank 0", "rank 1"], timeout=15)


def not_alike(strategy: str, transport: str, what: str, is_copy: bool) -> None:
    """One rank leaves out a step, steps with another learning rate, or keeps its gradients; all go on."""
    model = sharded(strategy, transport=transport)
    model = copy.deepcopy(model) if is_copy else model
    make = lamina.optim.AdamW if transport == "peer" else torch.optim.AdamW
    optimizer, is_mine = make(model.parameters(), lr=0.01), dist.get_rank() == 1
    for step in range(4):
        own_step(model, step)
        if what == "rate" and is_mine and step == 1:
            optimizer.param_groups[0]["lr"] = 0.02
        if not (what == "step" and is_mine and step == 1):
            optimizer.step()
        if not (what == "clear" and is_mine and step == 1):
            optimizer.zero_grad()


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize(
    ("strategy", "transport", "what", "words"),
    [
        ("ddp", "c10d", "step", ["rank 0: 2 steps", "rank 1: 1 steps"]),
        ("zero3", "peer", "step", ["rank 0: 2 steps", "rank 1: 1 steps"]),
        ("ddp", "c10d", "rate", ["rank 0: 2 steps, the last with lr=0.01", "rank 1: 2 steps, the last with lr=0.02"]),
        ("zero1", "c10d", "rate", ["lr=0.01", "lr=0.02", "schedulers"]),
        ("zero3", "c10d", "clear", ["`first.weight` had a gradient on rank 1 of 2 only"]),
        ("ddp", "c10d", "clear", ["`first.weight` had a gradient on rank 1 of 2 only"]),
    ],
)
def test_what_ranks_do_not_do_alike_is_named(
    strategy: str, transport: str, what: str, words: list[str], is_copy: bool
) -> None:
    """They would train apart, in the same order of collectives."""
    expect_error(2, not_alike, strategy, transport, what, is_copy, error="Disagreement", contains=words, timeout=15)


def penalty() -> float:
    """Double backward inside `keep`: a gradient penalty equals one process."""

    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        x = data_of(rank).requires_grad_()
        out = torch.tanh(model(x))
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + gradient.pow(2).sum(1).mean()

    plain, model = seeded(linears), sharded()
    worst = 0.0
    for _ in range(2):
        for rank in range(2):
            (loss_of(plain, rank) / 2).backward()
        with lamina.keep(model):
            loss_of(model, dist.get_rank()).backward()
        worst = max(worst, gradient_deviation(model, grads(plain)))
        plain.zero_grad()
        model.zero_grad()
    return worst


def test_double_backward_inside_keep_equals_one_process() -> None:
    assert max(run_ranks(2, penalty)) <= TOLERANCE


def edits() -> float:
    """Writes of every lawful kind reach the next forward (C11, C12)."""
    plain, model = seeded(linears), sharded()
    reference_step(plain)
    own_step(model)
    with torch.no_grad():
        for m in (plain, model):
            for p in m.parameters():
                p.mul_(2)
    with lamina.gathered(model.blocks[0], write=True), torch.no_grad():
        model.blocks[0].weight[1, 2] = 3.0
    with torch.no_grad():
        plain.blocks[0].weight[1, 2] = 3.0
    for m, step in ((plain, reference_step), (model, own_step)):
        m.zero_grad()
        step(m, 1)
    worst = gradient_deviation(model, grads(plain))
    other = {name: value * 0.5 for name, value in values(plain).items()}
    loss = model(data_of(dist.get_rank(), 2)).pow(2).mean()
    loss.backward()
    for m in (plain, model):
        m.load_state_dict(other)
        m.zero_grad()
    reference_step(plain, 3)
    own_step(model, 3)
    return max(worst, gradient_deviation(model, grads(plain)), parameter_deviation(model, values(plain)))


@pytest.mark.parametrize("world", [2, 3])
def test_edits_reach_the_next_forward(world: int) -> None:
    assert max(run_ranks(world, edits)) <= TOLERANCE


def stepped_between(strategy: str, fused: bool, precision: lamina.Precision | None) -> str:
    """Two forwards with a step between them, then the backward of the first: its weights are gone."""
    model = lamina.shard(seeded(linears).float(), strategy, units=["blocks.*"], slots=1, precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    first = model(data_of(dist.get_rank()).float()).pow(2).mean()
    model(data_of(dist.get_rank(), 1).float()).pow(2).mean().backward()
    optimizer.step()
    model(data_of(dist.get_rank(), 2).float())
    try:
        first.backward()
    except (lamina.StateError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("fused", [False, True])
def test_a_backward_through_weights_of_before_a_step_is_refused(fused: bool) -> None:
    narrow = lamina.Precision(compute=torch.bfloat16, keep=())
    for strategy, precision in (("zero3", None), ("ddp", narrow), ("zero1", narrow)):
        for said in run_ranks(2, stepped_between, strategy, fused, precision):
            assert "were changed between its forward and this backward" in said, (strategy, said)


def loaded_between() -> float | str:
    """load_state_dict between forward and backward: used from the next forward on, or a named error."""
    plain, model = seeded(linears), sharded(slots=1)
    other = {name: value * 0.5 for name, value in values(plain).items()}
    loss = model(data_of(dist.get_rank())).pow(2).mean()
    model.load_state_dict(other)
    try:
        loss.backward()
    except lamina.LaminaError as error:
        return str(error)
    reference_step(plain)
    return gradient_deviation(model, grads(plain))


def test_weights_changed_between_forward_and_backward_are_not_mixed() -> None:
    for result in run_ranks(2, loaded_between):
        assert "between" in result or "changed" in result if isinstance(result, str) else result <= TOLERANCE, result


def optimizer_order(when: str) -> float:
    """C11: the optimizer is made before sharding, after a warm-up forward, in groups, or over a subset."""
    plain, model = seeded(linears), seeded(linears)
    optimizers = []
    if when == "before":
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3) for m in (plain, model)]
    identities = [id(p) for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    if when == "after a forward":
        model(data_of(0))
    model = lamina.shard(model, units=["blocks.*"])
    assert identities == [id(p) for p in model.parameters()] and names == [n for n, _ in model.named_parameters()]
    if when == "after a forward":
        with torch.no_grad():
            model(data_of(0))
    for m in (plain, model) if not optimizers else ():
        decay = [p for p in m.parameters() if p.ndim == 2]
        rest = [p for n, p in m.named_parameters() if n.endswith("bias")]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW(groups[:1] if when == "subset" else groups, lr=0.1, eps=1e-3))
    for step in range(3):
        for m, train, optimizer in ((plain, reference_step, optimizers[0]), (model, own_step, optimizers[1])):
            optimizer.zero_grad()
            train(m, step)
            optimizer.step()
    assert parameter_deviation(model, values(seeded(linears))) > 0.01 or dist.get_rank() == 1
    return parameter_deviation(model, values(plain))


@pytest.mark.parametrize("when", ["before", "after a forward", "groups", "subset"])
def test_the_optimizer_may_be_made_at_any_time(when: str) -> None:
    assert max(run_ranks(2, optimizer_order, when)) <= TOLERANCE


def bad_argument_on_one_rank(arguments: dict[str, Any]) -> None:
    lamina.shard(seeded(linears), **(arguments if dist.get_rank() == 1 else {}))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"strategy": "zero4"}, "strategy"),
        ({"strategy": "zero2"}, "strategy"),
        ({"transport": "pigeon"}, "transport"),
        ({"start": "hope"}, "start"),
        ({"recompute": "twice"}, "recompute"),
        ({"units": ["nothing.*"]}, "nothing.*"),
    ],
)
def test_a_bad_argument_on_one_rank_is_named_on_all(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, bad_argument_on_one_rank, arguments, timeout=20)
    assert set(failure.value.errors) == {0, 1}
    for error in failure.value.errors.values():
        assert word in error.message and "rank" in error.message


def forward_among_full_tensors() -> list[str]:
    model = lamina.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    said = []
    try:
        with lamina.gathered(model):
            model(torch.ones(1, 4))
    except lamina.errors.ParameterChanged as error:
        said.append(str(error))
    zeros = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    try:
        torch.func.functional_call(model, zeros, (torch.ones(1, 4),))
    except lamina.errors.ParameterChanged as error:
        said.append(str(error))
    model(torch.ones(1, 4)).sum().backward()
    return said


def test_a_forward_inside_gathered_says_what_to_type() -> None:
    for said in run_ranks(2, forward_among_full_tensors):
        assert len(said) == 2
        assert all("lamina.gathered" in text and "lamina.keep" in text and "`0.weight`" in text for text in said)
