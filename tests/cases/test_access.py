"""Copies of a sharded model, moving averages, parameters that come late, and other libraries' wrappers.

Optimizers made at any time, edits and replaced parameters are in tests/parity/test_misuse.py.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lamina
from cases.training import TOLERANCE, WIDTH, Way, batch_of
from cases.training import WAYS as CASE_WAYS
from harness import expect_error, run_ranks
from parity.reference import gradient_deviation, parameter_deviation
from parity.structures import Chain
from parity.test_misuse import sharded
from parity.test_outputs import grads, linears, own_step, reference_step, seeded, values

WAYS = [("zero3", "c10d"), ("zero1", "c10d"), ("zero3", "peer"), ("ddp", "c10d")]


def train(pair: tuple[nn.Module, nn.Module], step: int, lr: float = 0.1) -> None:
    for model, take in zip(pair, (reference_step, own_step), strict=True):
        model.zero_grad()
        take(model, step)
        torch.optim.SGD(model.parameters(), lr=lr).step()
        model.zero_grad()


def ema_by_hand(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for e, p in zip(average.parameters(), model.parameters(), strict=True):
            e.lerp_(p, 0.25)


def averages(strategy: str, transport: str) -> float:
    """By zip(parameters()), and by torch's AveragedModel; copied before the first step, updated after each."""
    pair = seeded(linears), sharded(strategy, transport=transport)
    by_hand = tuple(copy.deepcopy(m) for m in pair)
    by_torch = tuple(AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in pair)
    for step in range(2):
        train(pair, step)
        with torch.no_grad():
            pair[1](batch_of(0, step))  # the weights are gathered when the average is taken
        for m, hand, average in zip(pair, by_hand, by_torch, strict=True):
            ema_by_hand(hand, m)
            average.update_parameters(m)
    worst = parameter_deviation(by_hand[1], values(by_hand[0]))
    with torch.no_grad():
        for ours, plain in ((by_hand[1], by_hand[0]), (by_torch[1], by_torch[0])):
            worst = max(worst, (ours(batch_of(0, 9)) - plain(batch_of(0, 9))).abs().max().item())
            assert (plain(batch_of(0, 9)) - pair[0](batch_of(0, 9))).abs().max() > 1e-3
    return max(worst, parameter_deviation(pair[1], values(pair[0])))


@pytest.mark.parametrize(("strategy", "transport"), WAYS)
def test_moving_averages(strategy: str, transport: str) -> None:
    assert max(run_ranks(2, averages, strategy, transport)) <= TOLERANCE


def plain_copies(way: Way) -> float:
    """Copies made while gathered are plain modules: whole, without ranks, also parts of them and copies of copies."""
    plain, model = seeded(encoding), seeded(encoding)
    lamina.shard(
        model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots, entry_points=("encode",)
    )
    train((plain, model), 0)
    with lamina.gathered(model):
        whole, part = copy.deepcopy(model), copy.deepcopy(model.blocks[0])
        twin = copy.deepcopy(model)
    then = copy.deepcopy(plain)
    train((plain, model), 1)
    x, worst = batch_of(0, 9), 0.0
    calls: list[Callable[[nn.Module], Tensor]] = [
        lambda m: m.encode(x),  # type: ignore[operator]
        lambda m: m.blocks[0](x),  # type: ignore[index, operator]
        lambda m: m(x),
    ]
    if dist.get_rank() == 0:  # nobody else is needed
        for order in (calls, calls[::-1]):
            for call in order:
                again = copy.deepcopy(twin)
                worst = max(worst, *((call(each) - call(then)).abs().max().item() for each in (whole, again)))
            whole = copy.deepcopy(twin)
        worst = max(worst, (part(x) - then.blocks[0](x)).abs().max().item())  # type: ignore[index, operator]
        optimizer = torch.optim.SGD(twin.requires_grad_(True).parameters(), lr=0.1)  # before its first forward
        for each in (twin, then):
            each(x).sum().backward()
        worst = max(worst, gradient_deviation(twin, grads(then)))
        optimizer.step()
        torch.optim.SGD(then.parameters(), lr=0.1).step()
        worst = max(worst, (twin(x) - then(x)).abs().max().item())
        assert all(type(param) is nn.Parameter for param in twin.float().parameters())
    train((plain, model), 2)
    return max(worst, parameter_deviation(model, values(plain)))


@pytest.mark.parametrize("way", CASE_WAYS)
def test_copies_made_while_gathered_are_plain(way: Way) -> None:
    assert max(run_ranks(2, plain_copies, way)) <= TOLERANCE


def sharded_anew(way: Way) -> float:
    """A plain copy, and a part of one in a new model, sharded before they were ever called."""
    plain, model = seeded(encoding), seeded(encoding)
    lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
    with lamina.gathered(model):
        whole, block = copy.deepcopy(model), copy.deepcopy(model.blocks[1])
    whole.requires_grad_(True)
    others = seeded(linears), seeded(linears)
    others[0].blocks[0] = copy.deepcopy(plain.blocks[1])  # type: ignore[index, operator]
    others[1].blocks[0] = block.requires_grad_(True)  # type: ignore[index, operator]
    pairs = [(copy.deepcopy(plain), whole), others]
    worst = 0.0
    for reference, own in pairs:
        lamina.shard(own, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
        for step in range(2):
            train((reference, own), step)
        worst = max(worst, parameter_deviation(own, values(reference)))
    return max(worst, parameter_deviation(model, values(plain)))


@pytest.mark.parametrize("way", CASE_WAYS)
def test_copies_made_while_gathered_are_sharded_anew(way: Way) -> None:
    assert max(run_ranks(2, sharded_anew, way)) <= TOLERANCE


def grown(way: Way) -> float:
    """The last block once more, as models are made deeper in training."""
    plain, model = seeded(linears), seeded(linears)
    lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)
    train((plain, model), 0)
    plain.blocks.append(copy.deepcopy(plain.blocks[-1]))  # type: ignore[index, operator, union-attr]
    with lamina.gathered(model):
        block = copy.deepcopy(model.blocks[-1])  # type: ignore[index]
    model.blocks.append(block.requires_grad_(True))  # type: ignore[operator, union-attr]
    lamina.adopt(model, model.blocks[-1])  # type: ignore[index]
    for step in range(1, 3):
        train((plain, model), step)
    return parameter_deviation(model, values(plain))


@pytest.mark.parametrize("way", CASE_WAYS)
def test_copies_made_while_gathered_are_adopted(way: Way) -> None:
    assert max(run_ranks(2, grown, way)) <= TOLERANCE


def copy_called_while_gathered() -> None:
    twin = copy.deepcopy(sharded())
    with lamina.gathered(twin):
        twin(batch_of(0, 0))


def copied_half_gathered() -> None:
    model = sharded()
    with lamina.gathered(model.blocks[0]):
        half = copy.deepcopy(model)
    half(batch_of(0, 0))


class Encoding(Chain):
    """A model that is used by its other method too."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[0](self.first(x)))


def encoding() -> nn.Module:
    return Encoding(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def copies_of_copies(strategy: str, transport: str) -> float:
    """A copy made before any forward, one of it after a step; each is entered by `encode` first, and trains alone."""
    plain = seeded(encoding)
    model = lamina.shard(
        seeded(encoding), strategy, units=["blocks.*"], entry_points=["encode"], transport=transport, slots=1
    )
    pairs = [(plain, model)]
    pairs.append((copy.deepcopy(plain), copy.deepcopy(model)))
    train(pairs[1], 0)
    pairs.append((copy.deepcopy(pairs[1][0]), copy.deepcopy(pairs[1][1])))
    worst = 0.0
    for number, pair in enumerate(pairs):
        x = batch_of(0, number)
        with torch.no_grad():
            worst = max(worst, (pair[0].encode(x) - pair[1].encode(x)).abs().max().item())
        for step in range(number + 1):
            train(pair, step)
        for other in pairs:
            worst = max(worst, parameter_deviation(other[1], values(other[0])))
    return worst


@pytest.mark.parametrize(("strategy", "transport"), WAYS)
def test_copies_of_copies_with_entry_points(strategy: str, transport: str) -> None:
    assert max(run_ranks(2, copies_of_copies, strategy, transport)) <= TOLERANCE


def full_state_dicts() -> tuple[int, float]:
    """C10: twenty full state dicts leave nothing behind."""
    plain, model = seeded(linears), sharded()
    own_step(model)

    def take() -> dict[str, Tensor]:
        with lamina.gathered(model):
            return {name: value.clone() for name, value in model.state_dict().items()}

    def live_tensors() -> dict[int, Tensor]:
        gc.collect()
        return {id(each): each for each in gc.get_objects() if isinstance(each, Tensor)}

    worst = max((value - plain.state_dict()[name]).abs().max().item() for name, value in take().items())
    before = live_tensors()  # held, so that no new one takes the place of one that an earlier test has left
    for _ in range(20):
        take()
    deadline = time.monotonic() + 10  # Gloo's thread lets go of the last collective's tensor when it is scheduled
    while (grown := len(live_tensors().keys() - before.keys())) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return grown, worst


def test_full_state_dicts_do_not_add_up() -> None:
    for grown, worst in run_ranks(2, full_state_dicts):
        assert grown == 0 and worst == 0


def frozen_newcomer() -> None:
    """A frozen one may join, and a new name for an old parameter; both train no one."""
    plain, model = seeded(linears), sharded()
    model.extra = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
    model.another = model.blocks[0]
    own_step(model)
    reference_step(plain)
    expected = grads(plain) | {name: None for name, _ in model.extra.named_parameters(prefix="extra")}
    assert gradient_deviation(model, expected) <= TOLERANCE
    model.extra.requires_grad_(True)
    with torch.no_grad():
        model(batch_of(0, 0))  # nobody needs its gradient here


def test_a_frozen_module_may_join() -> None:
    run_ranks(2, frozen_newcomer)


def adapter() -> None:
    model = sharded()
    own_step(model)
    model.blocks[1].adapter = nn.Linear(WIDTH, WIDTH).double()
    own_step(model)


def new_head() -> None:
    model = sharded("zero1")
    model.last = nn.Linear(WIDTH, 3).double()
    own_step(model)


def new_parameter() -> None:
    model = sharded("ddp")
    own_step(model)
    model.blocks[0].gate = nn.Parameter(torch.zeros(()))
    own_step(model)


def thawed_newcomer() -> None:
    model = sharded()
    model.extra = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
    own_step(model)
    model.extra.requires_grad_(True)
    own_step(model)


def ignored_but_thawed() -> None:
    model = seeded(linears)
    model.last.requires_grad_(False)
    lamina.shard(model, units=["blocks.*"], ignore=["last.*"])
    own_step(model)
    model.last.requires_grad_(True)
    own_step(model)


def newcomer_of_a_copy() -> None:
    model = sharded()
    twin = copy.deepcopy(model)
    own_step(twin)
    twin.extra = nn.Linear(WIDTH, WIDTH).double()
    own_step(model)
    own_step(twin)


def torch_ddp_around() -> None:
    DistributedDataParallel(sharded())


def torch_ddp_inside() -> None:
    lamina.shard(DistributedDataParallel(seeded(linears)))


def fsdp_after() -> None:
    from torch.distributed.fsdp import fully_shard  # two seconds, which collecting need not wait for

    fully_shard(sharded())


def fsdp_before() -> None:
    from torch.distributed.fsdp import fully_shard

    lamina.shard(fully_shard(seeded(linears)))


def functional_call() -> None:
    model = sharded()
    torch.func.functional_call(model, dict(seeded(linears).named_parameters()), (batch_of(0, 0),))


def functional_gradient() -> None:
    model = sharded()
    torch.func.grad(lambda x: model(x).sum())(batch_of(0, 0))


def one_vector() -> None:
    nn.utils.parameters_to_vector(sharded().parameters())


def backward_to_parameters() -> None:
    model = sharded()
    model(batch_of(0, 0)).sum().backward(inputs=list(model.parameters()))


def hessian() -> None:
    model = sharded()
    torch.autograd.functional.hessian(lambda x: model(x).pow(2).sum(), batch_of(0, 0)[0])


def pickled() -> None:
    pickle.dumps(sharded())


def saved_whole() -> None:
    torch.save(sharded(), io.BytesIO())


class Clamping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Renormed(nn.Module):
    """`max_norm` writes into the table in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.abs() * 10).long()[:, 0] % 11) + x


def clamped_in_forward() -> None:
    own_step(lamina.shard(seeded(lambda: Chain(Clamping(WIDTH, WIDTH))), units=["blocks.*"]))


def renormed_in_forward() -> None:
    own_step(lamina.shard(seeded(lambda: Chain(Renormed())), "zero1", units=["blocks.*"], transport="peer"))


def traced() -> None:
    torch.jit.trace(sharded(), batch_of(0, 0))


def exported() -> None:
    torch.export.export(sharded(), (batch_of(0, 0),))


def method_past_the_forward() -> None:
    lamina.shard(seeded(encoding), units=["blocks.*"]).encode(batch_of(0, 0))


def part_of_the_root() -> None:
    sharded().first(batch_of(0, 0))


class Scale(nn.Module):
    """Its first operation is elementwise: the weight meets a tensor of another shape, as in most norms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def elementwise_part_of_the_root() -> None:
    model = seeded(linears)
    model.scale = Scale()
    lamina.shard(model, units=["blocks.*"]).scale(batch_of(0, 0))


def written_as_it_lies() -> None:
    safetensors.torch.save(sharded().state_dict())


NAMED: dict[Callable[[], None], tuple[str, list[str]]] = {
    adapter: ("ParameterChanged", ["blocks.1.adapter.weight", "no unit"]),
    new_head: ("ParameterChanged", ["last.weight", "no unit"]),
    new_parameter: ("ParameterChanged", ["blocks.0.gate"]),
    thawed_newcomer: ("ParameterChanged", ["extra.weight"]),
    ignored_but_thawed: ("ParameterChanged", ["last.weight", "ignored"]),
    copy_called_while_gathered: ("StateError", ["Chain", "call it once before"]),
    copied_half_gathered: ("StateError", ["Chain", "while a part of the model was gathered"]),
    newcomer_of_a_copy: ("ParameterChanged", ["extra.weight"]),
    torch_ddp_around: ("ShardOpError", ["first.weight"]),
    torch_ddp_inside: ("StateError", ["first.weight"]),
    fsdp_after: ("ShardOpError", ["first.weight"]),
    fsdp_before: ("UsageError", ["first.weight", "fully_shard"]),
    functional_call: ("ParameterChanged", ["first.weight", "replaced"]),
    functional_gradient: ("StateError", ["Chain", "torch.func.grad"]),
    traced: ("StateError", ["Chain", "torch.jit.trace"]),
    exported: ("Traced", ["first.weight", "torch.export", "before lamina.shard()"]),
    clamped_in_forward: ("StateError", ["blocks.0.weight", "in place"]),
    renormed_in_forward: ("StateError", ["blocks.0.table.weight", "max_norm"]),
    method_past_the_forward: ("ShardOpError", ["first.weight", "entry_points=('encode',)"]),
    part_of_the_root: ("ShardOpError", ["first.weight", "call the model itself"]),
    elementwise_part_of_the_root: ("ShardOpError", ["scale.weight", "call the model itself"]),
    written_as_it_lies: ("ShardOpError", ["first.weight", "lamina.export"]),
    one_vector: ("ShardOpError", ["first.weight"]),
    backward_to_parameters: ("ShardOpError", ["first.weight", "p.grad"]),
    hessian: ("StateError", ["keep"]),
    pickled: ("StateError", ["lamina.save"]),
    saved_whole: ("StateError", ["lamina.save"]),
}


@pytest.mark.parametrize("misuse", list(NAMED), ids=lambda fn: fn.__name__)
def test_is_named_on_every_rank(misuse: Callable[[], None]) -> None:
    error, words = NAMED[misuse]
    expect_error(2, misuse, error=error, contains=words, timeout=15)


def transforms_that_work() -> float:
    """vmap over samples, a Jacobian of the inputs, forward-mode derivatives, a pass-through wrapper; then a step."""
    plain, model = seeded(linears), sharded()
    x, direction = batch_of(0, 0), batch_of(1, 0)
    found = []
    for m in (plain, model):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            tangent = torch.autograd.forward_ad.unpack_dual(m(dual)).tangent
        jacobian = torch.autograd.functional.jacobian(m, x[0])
        found.append((torch.func.vmap(m)(x), jacobian, tangent.detach(), DataParallel(m)(x)))
    own_step(model)
    reference_step(plain)
    worst = max((a - b).abs().max().item() for a, b in zip(*found, strict=True))
    return max(worst, gradient_deviation(model, grads(plain)))


def test_transforms_of_inputs_equal_one_process() -> None:
    assert max(run_ranks(2, transforms_that_work)) <= TOLERANCE


def negative_control() -> float:
    """The newcomer's error is there for a reason: without it, its gradients are each rank's own."""
    model = sharded()
    model.extra = nn.Linear(3, 3).double()
    model.register_forward_hook(lambda m, args, out: m.extra(out))
    from lamina.runtime.access import runtime_of

    runtime_of(model).engine.newcomers = None
    torch.manual_seed(0)
    nn.init.normal_(model.extra.weight)
    own_step(model)
    grad = model.extra.weight.grad
    assert grad is not None
    other = grad.clone()
    dist.broadcast(other, 0)
    return (grad - other).abs().max().item()


def test_without_the_check_ranks_would_train_apart() -> None:
    assert max(run_ranks(2, negative_control)) > 1e-3
