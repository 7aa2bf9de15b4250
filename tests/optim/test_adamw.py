"""lamina.optim.AdamW against torch.optim.AdamW in one plain process."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
from harness import expect_error, run_ranks
from lamina.core.shard_tensor import Shard
from lamina.errors import UsageError
from lamina.optim import AdamW
from lamina.runtime.access import runtime_of
from optim.training import Model, backward, batch, difference, groups_of, kernels, pair, state_difference

EXACT = 1e-12
PATTERN = (False, True, True, False, True)  # in which steps `extra` takes part


def steps_equal(strategy: Any, options: dict[str, Any], shard_options: dict[str, Any]) -> list[float]:
    """Groups, late and missing gradients, a schedule, both kinds of zero_grad; states compared at the end."""
    reference, sharded = pair(strategy, **shard_options)
    optimizers = [
        torch.optim.AdamW(groups_of(reference, **copy.deepcopy(options)), fused=True),
        AdamW(groups_of(sharded, **copy.deepcopy(options))),
    ]
    fixed = isinstance(options.get("lr"), torch.Tensor)
    schedules = [] if fixed else [torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=9) for o in optimizers]
    for step, use_extra in enumerate(PATTERN):
        backward(reference, sharded, step, use_extra)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step not in (1, 2))
        for schedule in schedules:
            schedule.step()
    return [
        difference(reference.parameters(), sharded.parameters()),
        state_difference(*optimizers),
        max(abs(float(whole_padding(unit))) for unit in runtime_of(sharded).units),
    ]


def whole_padding(unit: Any) -> float:
    """What lies in the ranges outside every parameter."""
    total = 0.0
    for segment, master in zip(unit.layout.segments, unit.masters, strict=True):
        outside = torch.ones_like(master, dtype=torch.bool)
        for i in range(len(segment.params)):
            start, stop = segment.owned(i, unit.mesh.range_index)
            offset = segment.offset_in_range(i, unit.mesh.range_index)
            outside[offset : offset + stop - start] = False
        total += float(master[outside].abs().sum())
    return total


def many(cases: list[tuple[Any, dict[str, Any], dict[str, Any]]]) -> None:
    for case in cases:
        found = steps_equal(*case)
        assert max(found) < EXACT, f"{case}: {found}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equal_to_torch(world: int) -> None:
    strategies = ["zero3", "ddp"] if world != 3 else ["zero3", "zero1", "zero2"]
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [(strategy, {}, {}) for strategy in strategies]
    if world == 2:
        cases += [
            ("zero3", {"amsgrad": True, "maximize": True}, {}),
            ("zero3", {"eps": 1e-5, "betas": (0.8, 0.95)}, {"replicate": ["blocks.0.*"]}),
            ("zero3", {"lr": torch.tensor(1e-2)}, {}),
        ]
    run_ranks(world, many, cases)


def few_ranges() -> None:
    """One kernel a group; a unit's matrices are one range and its vectors another; a missing gradient splits them."""
    reference, sharded = pair()
    optimizer = AdamW(groups_of(sharded))
    calls = []
    for step in range(2):
        backward(reference, sharded, step)
        optimizer.step()
        calls.append(optimizer._calls)
    assert calls[0] is calls[1], "made once"
    assert len(kernels(optimizer)) <= 3 and max(kernels(optimizer)) <= 3, kernels(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    optimizer.step()
    assert optimizer._calls is calls[0], "hyperparameters are read, not built in"
    optimizer.zero_grad()
    backward(reference, sharded, 2, use_extra=False)
    optimizer.step()
    assert optimizer._calls is not calls[0]
    owners = {id(v._base) for p in optimizer.state for v in optimizer.state[p].values() if not isinstance(v, Shard)}
    assert len(owners) < len(optimizer.state), "step counts lie together"


def order_of_building() -> None:
    """Built before shard(), also after steps on the plain model."""
    for warm in (False, True):
        reference = Model()
        plain = copy.deepcopy(reference)
        optimizers = [torch.optim.AdamW(groups_of(reference)), AdamW(groups_of(plain))]
        if warm:
            for model, optimizer in zip((reference, plain), optimizers, strict=True):
                model(torch.ones(3, 13, dtype=torch.float64), False).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        sharded = lamina.shard(plain)
        for step in range(2):
            backward(reference, sharded, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert difference(reference.parameters(), sharded.parameters()) < EXACT
        assert state_difference(*optimizers) < EXACT
        assert max(kernels(optimizers[1])) < 9, "flat after sharding"


def foreign_gradients() -> None:
    """Gradients that are not the unit's own: new Shards, whole tensors, with and without the unit's beside them."""
    reference, sharded = pair()
    optimizers = [torch.optim.AdamW(groups_of(reference)), AdamW(groups_of(sharded))]
    for step in range(4):
        backward(reference, sharded, step, use_extra=step < 2)  # then zeros, which are stepped, unlike no gradient
        for number, (a, b) in enumerate(zip(reference.parameters(), sharded.parameters(), strict=True)):
            if a.grad is None or step == 3:
                continue
            if number % 3 == 0:
                a.grad, b.grad = a.grad * 2, b.grad * 2
            elif number % 3 == 1:
                a.grad, b.grad = torch.ones_like(a), torch.ones(b.shape, dtype=b.dtype)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert difference(reference.parameters(), sharded.parameters()) < EXACT
    assert state_difference(*optimizers) < EXACT
    assert max(kernels(optimizers[1])) <= 3, "flat again"


def states_travel() -> None:
    """To torch's AdamW and back, through a file, into a fresh optimizer; edits and resets by hand are seen."""
    reference, sharded = pair()
    twin = lamina.shard(copy.deepcopy(reference), units="auto")
    ours: torch.optim.Optimizer = AdamW(groups_of(sharded))
    theirs: torch.optim.Optimizer = torch.optim.AdamW(groups_of(twin))
    plain = torch.optim.AdamW(groups_of(reference))
    backward(reference, sharded, 0, use_extra=False)
    twin(*_inputs(0)).pow(2).mean().backward()
    for optimizer in (ours, theirs, plain):
        optimizer.step()
        optimizer.zero_grad()
    state = ours.state_dict()
    assert state["state"].keys() == plain.state_dict()["state"].keys()
    assert state["param_groups"][0].keys() == plain.state_dict()["param_groups"][0].keys()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = AdamW(groups_of(sharded))
    fresh.load_state_dict(state)
    theirs.load_state_dict(plain.state_dict())  # whole states of one process
    back = AdamW(groups_of(twin))
    back.load_state_dict(theirs.state_dict())
    back.load_state_dict(copy.deepcopy(plain.state_dict()))
    for step in (1, 2):
        backward(reference, sharded, step)
        twin(*_inputs(step, True)).pow(2).mean().backward()
        for optimizer in (fresh, back, plain):
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:  # by hand: a moment in place, a moment replaced, one state dropped
            for optimizer in (fresh, back, plain):
                params = optimizer.param_groups[0]["params"]
                optimizer.state[params[0]]["exp_avg"].mul_(2)
                optimizer.state[params[1]]["exp_avg_sq"] = optimizer.state[params[1]]["exp_avg_sq"] + 1
                del optimizer.state[params[2]]
    for model, optimizer in ((sharded, fresh), (twin, back)):
        assert difference(reference.parameters(), model.parameters()) < EXACT
        assert state_difference(plain, optimizer) < EXACT
    plain.state.clear()
    fresh.state.clear()
    backward(reference, sharded, 3)
    plain.step()
    fresh.step()
    assert difference(reference.parameters(), sharded.parameters()) < EXACT


def _inputs(step: int, use_extra: bool = False) -> tuple[torch.Tensor, bool]:
    return batch(step, dist.get_rank()), use_extra


def groups_change() -> None:
    """add_param_group, a closure, amsgrad switched on, and a parameter list that was edited."""
    reference, sharded = pair()
    models = (reference, sharded)
    optimizers = [
        kind(model.blocks[0].up.parameters(), lr=1e-2)
        for kind, model in zip((torch.optim.AdamW, AdamW), models, strict=True)
    ]
    for step in range(5):
        backward(reference, sharded, step)
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 1:
                optimizer.add_param_group({"params": list(model.blocks[0].down.parameters()), "lr": 1e-3})
            if step == 2:
                optimizer.param_groups[1]["params"].append(model.head.bias)
            if step == 3:
                optimizer.param_groups[0]["weight_decay"] = 0.5
                optimizer.param_groups[1]["eps"] = 1e-4
            assert optimizer.step(lambda: 7.0) == 7.0
            model.zero_grad()
        assert difference(reference.parameters(), sharded.parameters()) < EXACT, step


def scaler() -> None:
    """GradScaler: scaled gradients, an overflow on one rank, unscale_ before clipping."""
    reference, sharded = pair(dtype=torch.float32)
    optimizers = [torch.optim.AdamW(groups_of(reference), fused=True), AdamW(groups_of(sharded))]
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0) for _ in optimizers]
    for step in range(4):
        factor = scalers[0].get_scale()
        backward(reference, sharded, step, factor=factor)
        if step == 1:
            reference.head.bias.grad[0] = torch.inf
            grad = sharded.head.bias.grad
            local = grad.local if isinstance(grad, Shard) else grad
            if local.numel() and getattr(grad, "start", 0) == 0:
                local[0] = torch.inf
        for model, optimizer, scaler in zip((reference, sharded), optimizers, scalers, strict=True):
            scaler.scale(torch.ones(()))  # starts the scale, as scaling the loss does
            if step == 2:
                scaler.unscale_(optimizer)
                (lamina.optim.clip_grad_norm_ if model is sharded else nn.utils.clip_grad_norm_)(
                    model.parameters(), 0.1
                )
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 8.0
    assert difference(reference.parameters(), sharded.parameters()) < 2e-6
    assert {float(state["step"]) for state in optimizers[1].state.values()} == {3.0}


def moved_parameters() -> None:
    """Weights that were given other memory between backward and step are the ones that are stepped."""
    for strategy in ("zero3", "ddp"):
        reference, sharded = pair(strategy)
        optimizers = [torch.optim.AdamW(reference.parameters()), AdamW(sharded.parameters())]
        for step in range(3):
            backward(reference, sharded, step)
            if step == 1:
                for model in (reference, sharded):
                    model.head.weight.data = torch.full((5, 13), 0.25, dtype=torch.float64)
                    model.to("cpu")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert difference(reference.parameters(), sharded.parameters()) < EXACT


def clipping_in_the_step() -> None:
    """max_norm equals clip_grad_norm_ before the step: gradients missing, foreign, below the norm, scaled; copies."""
    for strategy, dtype, tolerance in (("zero3", torch.float64, EXACT), ("ddp", torch.float32, 2e-6)):
        reference, sharded = pair(strategy, dtype=dtype)
        plain, ours = torch.optim.AdamW(groups_of(reference)), AdamW(groups_of(sharded), max_norm=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(6):
            is_scaled = dtype is torch.float32 and step > 3
            backward(reference, sharded, step, use_extra=step not in (1, 2))
            if step == 2:
                reference.head.bias.grad, sharded.head.bias.grad = torch.full((2, 5), 3.0, dtype=dtype)
            ours.max_norm = 1e4 if step == 3 else 0.1
            norm = nn.utils.clip_grad_norm_(reference.parameters(), ours.max_norm)
            plain.step()
            if is_scaled:
                for param in sharded.parameters():
                    if param.grad is not None:
                        param.grad.mul_(16.0)
                scaler.scale(torch.ones(()))
                scaler.step(ours)
                scaler.update()
            else:
                ours.step()
            assert ours.grad_norm is not None and abs(ours.grad_norm.item() / norm.item() - 1) < tolerance, step
            assert step == 3 or norm > 0.1
            plain.zero_grad()
            ours.zero_grad()
            assert difference(reference.parameters(), sharded.parameters()) < tolerance, step
        assert copy.deepcopy(ours).max_norm == 0.1


def everything() -> None:
    for check in (
        clipping_in_the_step,
        few_ranges,
        order_of_building,
        foreign_gradients,
        states_travel,
        groups_change,
        scaler,
        moved_parameters,
    ):
        torch.manual_seed(0)
        try:
            check()
        except Exception as error:
            error.add_note(f"in {check.__name__}")
            raise


@pytest.mark.parametrize("world", [2, 3])
def test_use(world: int) -> None:
    run_ranks(world, everything, timeout=120)


def memory_of_part() -> None:
    """An optimizer of the vectors only holds no moments for the matrices."""
    reference, sharded = pair()
    vectors = AdamW([p for p in sharded.parameters() if p.ndim < 2])
    backward(reference, sharded, 0)
    vectors.step()
    held = {}
    for home in vectors._homes:
        for moment in home.moments.values():
            held[moment.data_ptr()] = moment.numel()
    elements = sum(p.local.numel() for p in sharded.parameters() if p.ndim < 2 and p.requires_grad)
    assert sum(held.values()) <= 2 * (elements + 16 * len(vectors.state))


def bfloat16_compute() -> float:
    """Masters and states stay float32, whatever is computed in."""
    reference, sharded = pair(dtype=torch.float32, precision="bf16")
    ours = AdamW(sharded.parameters(), lr=1e-3)
    backward(reference, sharded, 0)
    masters = [p.full() for p in sharded.parameters() if p.requires_grad]
    grads = [p.grad.full() for p in sharded.parameters() if p.requires_grad]
    plain = [nn.Parameter(master.clone()) for master in masters]
    for param, grad in zip(plain, grads, strict=True):
        param.grad = grad
    torch.optim.AdamW(plain, lr=1e-3).step()
    ours.step()
    return difference(plain, [p for p in sharded.parameters() if p.requires_grad])


def memory_and_precision() -> None:
    memory_of_part()
    assert bfloat16_compute() < 1e-7


def test_memory_and_precision() -> None:
    run_ranks(2, memory_and_precision)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), "1", True])
def test_a_norm_that_is_none_is_refused(max_norm: Any) -> None:
    with pytest.raises(UsageError, match="max_norm"):
        AdamW([nn.Parameter(torch.ones(1))], max_norm=max_norm)


def wrong_gradient() -> None:
    _, sharded = pair()
    param = sharded.head.weight
    spec = param.spec
    ranges = ((0, 1), (1, spec.numel))
    other = lamina.core.shard_spec.ShardSpec("other", spec.shape, ranges, spec.index, spec.group)
    param.grad = Shard(torch.zeros(other.local_numel, dtype=param.dtype), other)
    AdamW(sharded.parameters()).step()


def test_mistakes() -> None:
    expect_error(2, wrong_gradient, error="ShardOpError", contains=["head.weight"])
    with pytest.raises(lamina.UsageError, match="fused"):
        AdamW([nn.Parameter(torch.zeros(2))], fused=False)
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(lamina.UsageError, match="sparse"):
        AdamW(table.parameters()).step()


def test_plain_parameters() -> None:
    """Without any sharded model: memory orders, empty parameters, complex ones, pickling of the optimizer."""
    torch.manual_seed(0)
    values = [torch.randn(4, 3), torch.randn(2, 5, 4, 3).to(memory_format=torch.channels_last), torch.zeros(0)]
    mine, yours = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizers: list[torch.optim.Optimizer] = [AdamW(mine), torch.optim.AdamW(yours)]
    for step in range(3):
        for a, b in zip(mine, yours, strict=True):
            grad = torch.randn(a.shape)
            a.grad, b.grad = grad, grad.clone()
        if step == 2:
            optimizers[0] = copy.deepcopy(optimizers[0])
            mine = optimizers[0].param_groups[0]["params"]
            for a, b in zip(mine, yours, strict=True):
                a.grad = b.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert difference(yours, mine) < 1e-6
    number = nn.Parameter(torch.randn(5, dtype=torch.complex128))
    twin = nn.Parameter(number.detach().clone())
    number.grad = torch.randn(5, dtype=torch.complex128)
    twin.grad = number.grad.clone()
    AdamW([number]).step()
    torch.optim.AdamW([twin], foreach=False).step()
    assert difference([torch.view_as_real(twin)], [torch.view_as_real(number.detach())]) < EXACT
