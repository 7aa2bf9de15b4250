"""Every optimizer of torch on Shards against the same optimizer in one plain process."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cutting import Model, cut_module, part_of
from harness import expect_error, run_ranks
from lamina.core.shard_collectives import COUNTERS
from lamina.core.shard_spec import DirtyFlag
from lamina.core.shard_tensor import Shard

STEPS = 3
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "default": {}}
# class name, options, the ways torch offers on the CPU
CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("AdamW", {}, ("loop", "foreach", "fused", "default")),
    ("AdamW", {"amsgrad": True, "maximize": True}, ("loop", "foreach", "fused")),
    ("AdamW", {"lr": torch.tensor(1e-2)}, ("fused",)),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}, ("loop", "foreach", "fused")),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, ("loop", "foreach", "fused", "default")),
    ("SGD", {}, ("loop", "foreach", "fused")),
    ("Adagrad", {"weight_decay": 0.1}, ("loop", "foreach", "fused")),
    ("RAdam", {}, ("loop", "foreach")),
    ("NAdam", {}, ("loop", "foreach")),
    ("RMSprop", {"momentum": 0.9, "centered": True}, ("loop", "foreach")),
    ("Adadelta", {}, ("loop", "foreach")),
    ("Adamax", {}, ("loop", "foreach")),
    ("Rprop", {}, ("loop", "foreach")),
    ("ASGD", {}, ("loop", "foreach")),
]


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    torch.manual_seed(100 + step)
    return [torch.randn(param.shape, dtype=param.dtype) * 3 for param in model.parameters()]


def build(model: nn.Module, name: str, options: dict[str, Any], way: str) -> torch.optim.Optimizer:
    options = {"lr": 1e-2, **options, **WAYS[way]}
    return getattr(torch.optim, name)(model.parameters(), **copy.deepcopy(options))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, stop: int, clip: float | None
) -> list[Tensor]:
    norms = []
    for step in range(first, stop):
        for param, grad in zip(model.parameters(), gradients(model, step), strict=True):
            param.grad = part_of(grad, param) if isinstance(param, Shard) else grad
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=clip))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def difference(sharded: nn.Module, plain: nn.Module) -> float:
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max((mine.full() - other.detach()).abs().max().item() for mine, other in pairs)


def every_optimizer(warm_steps: int) -> list[str]:
    """Optimizer built before the cut, after `warm_steps` plain steps; returns what differed."""
    wrong = []
    for name, options, ways in CASES:
        for way in ways:
            plain, model = Model(torch.float64), Model(torch.float64)
            reference, optimizer = build(plain, name, options, way), build(model, name, options, way)
            train(plain, reference, 0, STEPS, None)
            train(model, optimizer, 0, warm_steps, None)
            flag = DirtyFlag()
            cut_module(model, flag=flag)
            train(model, optimizer, warm_steps, STEPS, None)
            found = difference(model, plain)
            if not found < 1e-12 or not flag.value:
                wrong.append(f"{name} {options} {way}: {found}, dirty {flag.value}")
    return wrong


@pytest.mark.parametrize(("world", "warm_steps"), [(1, 0), (2, 1), (3, 0), (4, 1)])
def test_every_optimizer_equals_one_process(world, warm_steps):
    assert run_ranks(world, every_optimizer, warm_steps) == [[]] * world


def clipping(norm_type: float) -> tuple[float, float, float, int, bool]:
    plain, model = Model(torch.float64), Model(torch.float64)
    expected = train(plain, build(plain, "AdamW", {}, "foreach"), 0, STEPS, norm_type)
    cut_module(model)
    COUNTERS.reset()
    got = train(model, build(model, "AdamW", {}, "foreach"), 0, STEPS, norm_type)
    all_reduces = COUNTERS.all_reduces
    off = max(abs(a.item() - b.item()) for a, b in zip(expected, got, strict=True))
    return off, difference(model, plain), got[-1].item(), all_reduces, all(type(norm) is Tensor for norm in got)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.0, 0.5, math.inf, -math.inf])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_stock_clipping(world, norm_type):
    results = run_ranks(world, clipping, norm_type)
    for off, parameters, _, all_reduces, is_plain in results:
        assert off < 1e-10 and parameters < 1e-12 and is_plain
        assert all_reduces == (STEPS if world > 1 else 0)  # one a step, for the whole list
    assert len({norm for _, _, norm, _, _ in results}) == 1


def clip_others() -> None:
    model = Model()
    cut_module(model)
    params = list(model.parameters())
    for param in params:
        param.grad = part_of(torch.full(param.shape, 5.0), param)
    count = sum(param.numel() for param in params)
    total = nn.utils.get_total_norm([param.grad for param in params])
    assert torch.allclose(total, torch.tensor(5.0 * count**0.5))
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.full((3,), 5.0)
    mixed = nn.utils.clip_grad_norm_([*params, plain], 1e9)
    assert torch.allclose(mixed, torch.tensor(5.0 * (count + 3) ** 0.5))
    nn.utils.clip_grad_value_(params, 1.0)
    assert all((param.grad.local == 1).all() for param in params)
    params[0].grad.local.fill_(math.nan)  # of rank 0 and others alike
    for norm_type in (2.0, math.inf):
        assert nn.utils.get_total_norm([param.grad for param in params], norm_type).isnan()


@pytest.mark.parametrize("world", [1, 3])
def test_other_clipping(world):
    run_ranks(world, clip_others)


def sixteen_bits() -> float:
    """256 gradients of 1.0 and one of 2^-4 each: in bf16 the squares below a half unit would be lost."""
    model = nn.ParameterList([nn.Parameter(torch.ones(301, dtype=torch.bfloat16)) for _ in range(40)])
    cut_module(model)
    for param in model:
        param.grad = part_of(torch.full((301,), 0.37, dtype=torch.bfloat16), param)
    total = nn.utils.get_total_norm([param.grad for param in model])
    exact = float(torch.tensor(0.37, dtype=torch.bfloat16)) * (301 * 40) ** 0.5
    return abs(total.item() - exact) / exact


@pytest.mark.parametrize("world", [1, 2])
def test_norm_of_16_bit_gradients_is_taken_in_fp32(world):
    assert max(run_ranks(world, sixteen_bits)) < 1e-6


def scaler(fused: bool, inf_at: int | None) -> tuple[float, float]:
    plain, model = Model(), Model()
    reference = build(plain, "AdamW", {}, "foreach")
    optimizer = build(model, "AdamW", {}, "fused" if fused else "foreach")
    cut_module(model)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    grad_scaler.scale(torch.ones(()))
    for at, (grad, param, other) in enumerate(
        zip(gradients(plain, 0), model.parameters(), plain.parameters(), strict=True)
    ):
        other.grad = grad.clone()
        if at == inf_at:
            grad.view(-1)[0] = math.inf
        param.grad = part_of(grad * 4, param)
    if not fused:
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    grad_scaler.step(optimizer)
    grad_scaler.update()
    if inf_at is None:
        reference.step()
    return difference(model, plain), grad_scaler.get_scale()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("inf_at", [None, 0, 1, 5])
def test_grad_scaler_skips_on_all_ranks(fused, inf_at):
    for found, scale in run_ranks(3, scaler, fused, inf_at):
        assert found < 1e-6 and scale == (4.0 if inf_at is None else 2.0)


def loading() -> None:
    """Optimizer state dicts: of Shards, of full tensors, and out of a file."""
    model, plain = Model(torch.float64), Model(torch.float64)
    reference = build(plain, "AdamW", {}, "fused")
    train(plain, reference, 0, 2, None)
    cut_module(model)
    optimizer = build(model, "AdamW", {}, "fused")
    train(model, optimizer, 0, 2, None)
    full, shards = copy.deepcopy(reference.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(plain, reference, 2, 3, None)
    train(model, optimizer, 2, 3, None)
    assert difference(model, plain) < 1e-12
    expected = [param.full() for param in model.parameters()]
    start = Model(torch.float64)
    train(start, build(start, "AdamW", {}, "fused"), 0, 2, None)
    for way in ("loop", "foreach", "fused"):
        for state in (full, shards):
            for warm in (False, True):
                model.load_state_dict(start.state_dict())
                other = build(model, "AdamW", {}, way)
                if warm:  # loaded after a step, when the states were looked at already
                    train(model, other, 0, 1, None)
                    model.load_state_dict(start.state_dict())
                loaded = copy.deepcopy(state)  # torch keeps what it is given, and steps write to it
                loaded["param_groups"] = other.state_dict()["param_groups"]
                other.load_state_dict(loaded)
                train(model, other, 2, 3, None)
                for param, value in zip(model.parameters(), expected, strict=True):
                    assert torch.allclose(param.full(), value, atol=1e-12), (way, warm)
                    assert other.state[param]["exp_avg"].spec is param.spec


@pytest.mark.parametrize("world", [1, 3])
def test_loading_optimizer_states(world):
    run_ranks(world, loading)


def ordinary_use() -> None:
    model = Model()
    cut_module(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    for param in model.parameters():
        param.grad = part_of(torch.ones(param.shape), param)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.local.any() for param in model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    named = torch.optim.SGD(list(model.first.named_parameters()), lr=0.1)
    named.add_param_group({"params": list(model.norm.named_parameters())})
    assert named.param_groups[1]["param_names"] == ["weight", "bias"]


def test_groups_schedules_and_zero_grad():
    run_ranks(2, ordinary_use)


def average_follows() -> None:
    """EMA made after the cut, by hand and by torch's AveragedModel: no communication, right values."""
    model, plain = Model(torch.float64), Model(torch.float64)
    cut_module(model)
    mine = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    other = torch.optim.swa_utils.AveragedModel(plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    by_hand = copy.deepcopy(model)
    optimizer, reference = build(model, "SGD", {}, "foreach"), build(plain, "SGD", {}, "foreach")
    for step in range(3):
        train(model, optimizer, step, step + 1, None)
        train(plain, reference, step, step + 1, None)
        mine.update_parameters(model)
        other.update_parameters(plain)
        with torch.no_grad():
            for average, param in zip(by_hand.parameters(), model.parameters(), strict=True):
                average.mul_(0.9).add_(param, alpha=0.1)
    assert difference(mine.module, other.module) < 1e-12
    assert all(type(param) is Shard for param in by_hand.parameters())


def test_moving_averages():
    run_ranks(3, average_follows)


def regularise(way: str) -> None:
    """A loss outside the forward: some chains give a Shard as gradient, some a plain full tensor."""
    model, plain = Model(torch.float64), Model(torch.float64)
    cut_module(model)
    optimizer, reference = build(model, "Adagrad", {}, way), build(plain, "Adagrad", {}, way)
    for some, stepper in ((model, optimizer), (plain, reference)):
        loss = sum(p.pow(2).sum() + (p * 2).sum() + p.abs().mean() + p.norm() + p.max() for p in some.parameters())
        loss.backward()
        stepper.step()
    assert difference(model, plain) < 1e-12


@pytest.mark.parametrize("way", ["loop", "foreach", "fused"])
def test_losses_outside_the_forward(way):
    run_ranks(3, regularise, way)


def refused_optimizer(name: str) -> None:
    model = Model()
    cut_module(model)
    params = [p for p in model.parameters() if p.ndim == 2] if name == "Muon" else list(model.parameters())
    optimizer = getattr(torch.optim, name)(params, lr=0.1)
    for param in params:
        param.grad = part_of(torch.ones(param.shape), param)
    optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
def test_optimizers_that_need_whole_tensors(name):
    expect_error(2, refused_optimizer, name, error="ShardOpError", contains=[name, "sharded", "AdamW", "ddp"])


def plain_state_by_hand(fused: bool) -> None:
    model = Model()
    cut_module(model)
    optimizer = build(model, "AdamW", {}, "fused" if fused else "foreach")
    train(model, optimizer, 0, 2, None)
    optimizer.state[model.first.weight]["exp_avg"] = torch.zeros(7, 5)
    train(model, optimizer, 2, 3, None)


@pytest.mark.parametrize("fused", [True, False])
def test_a_full_state_never_reaches_a_kernel(fused):
    expect_error(2, plain_state_by_hand, fused, error="ShardOpError", contains=["first.weight", "plain tensor"])


def compiled_step(way: str) -> tuple[float, bool]:
    model, plain = Model(torch.float64), Model(torch.float64)
    flag = DirtyFlag()
    cut_module(model, flag=flag)
    optimizer, reference = build(model, "AdamW", {}, way), build(plain, "AdamW", {}, way)
    step = torch.compile(optimizer.step, backend="aot_eager")
    plain_step = torch.compile(reference.step, backend="aot_eager")  # compiled too: its step counts are fp32 tensors
    for at in range(3):
        for param, other, grad in zip(model.parameters(), plain.parameters(), gradients(plain, at), strict=True):
            other.grad = grad
            param.grad = part_of(grad, param)
        flag.value = False
        step()
        plain_step()
    return difference(model, plain), flag.value


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_compiled_step(way):
    for found, marked in run_ranks(2, compiled_step, way, timeout=120):
        assert found < 1e-12 and marked


def test_world_is_left_in_step():
    assert run_ranks(2, dist.get_world_size) == [2, 2]
