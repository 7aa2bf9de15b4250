"""lamina.optim.clip_grad_norm_ against torch's on one process: every element once, in every mixture."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from harness import expect_error, run_ranks
from lamina.core.shard_collectives import COUNTERS
from lamina.core.shard_tensor import Shard
from lamina.optim import clip_grad_norm_
from lamina.runtime.parts import split_parameter
from optim.training import backward, difference, pair

ORDERS = (2.0, 1.0, 3.0, math.inf, 0.0, 0.5, -1.0, -math.inf)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def equal_on_all_ranks(norm: Tensor) -> bool:
    everyone = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, norm)
    return all(torch.equal(norm, other) or bool(norm.isnan() & other.isnan()) for other in everyone)


def norms_equal(cases: list[tuple[Any, dict[str, Any]]]) -> None:
    """All orders on one pair of models; in every second step `extra` has no gradient and its ranges hold old values."""
    for strategy, options in cases:
        reference, sharded = pair(strategy, **options)
        for step, order in enumerate(ORDERS):
            backward(reference, sharded, step, use_extra=step % 2 == 0)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, order)
            got = clip_grad_norm_(sharded, 0.05, norm_type=order)
            assert type(got) is Tensor and got.dim() == 0 and got.dtype is torch.float64
            assert equal_on_all_ranks(got)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
            assert difference(grads_of(reference), grads_of(sharded)) < 1e-14, (strategy, order)
            for model in (reference, sharded):
                model.zero_grad()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equal_to_torch(world: int) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [("zero3", {}), ("ddp", {})]
    if world == 2:
        cases += [("zero3", {"replicate": ["blocks.0.*", "scale"]}), ("zero2", {})]
    run_ranks(world, norms_equal, cases)


def made_by_clipping() -> list[int]:
    """How many tensors are made of the host's numbers: it would wait for a GPU at each. By function and step."""
    found = []
    for clip in (nn.utils.clip_grad_norm_, clip_grad_norm_):
        reference, sharded = pair()
        for step in range(2):
            backward(reference, sharded, step)
            with patch.object(torch, "tensor", wraps=torch.tensor) as made:
                clip(sharded.parameters(), 0.5)
            found.append(made.call_count)
            sharded.zero_grad()
    return found


def test_clipping_brings_nothing_to_the_device_each_time() -> None:
    assert run_ranks(3, made_by_clipping) == [[1, 0, 0, 0]] * 3


def one_reduction_and_few_ranges() -> None:
    """A list of parameters, in any order, named twice; gradients that the user replaced; one all-reduce."""
    reference, sharded = pair()
    backward(reference, sharded, 0)
    for (name, a), b in zip(reference.named_parameters(), sharded.parameters(), strict=True):
        if name == "head.bias":
            a.grad, b.grad = torch.ones_like(a), torch.ones(b.shape, dtype=b.dtype)
        elif name == "blocks.1.up.weight":
            a.grad, b.grad = a.grad * 3, b.grad * 3
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    params = list(sharded.parameters())[::-1]
    COUNTERS.reset()
    got = clip_grad_norm_(iter(params + params[:3]), torch.tensor(0.5, dtype=torch.float64))
    assert COUNTERS.all_reduces == 1
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert difference(grads_of(reference), grads_of(sharded)) < 1e-14
    one = sharded.blocks[0].up.weight
    whole = one.grad.full().norm()
    torch.testing.assert_close(clip_grad_norm_(one, math.inf), whole, rtol=1e-12, atol=0)
    sharded.zero_grad()
    assert clip_grad_norm_(sharded, 1.0).item() == 0.0, "no gradient at all"


def a_range_in_pieces() -> None:
    """Long ranges are summed piece by piece: float32 elements, a norm exact to float32."""
    grad = torch.full((9_000_001,), 0.1)
    param = nn.Parameter(torch.empty(9_000_001))
    param.grad = grad
    exact = math.sqrt(9_000_001) * float(torch.tensor(0.1))
    assert abs(clip_grad_norm_([param], math.inf).item() / exact - 1) < 1e-6


def test_lists_and_long_ranges() -> None:
    run_ranks(2, one_reduction_and_few_ranges)
    run_ranks(1, a_range_in_pieces)


def float32_and_bf16() -> list[float]:
    norms = []
    for precision in (None, "bf16"):
        _, sharded = pair(dtype=torch.float32, precision=precision)
        backward(_, sharded, 0)
        full = [g.full().double() for g in grads_of(sharded)]
        got = clip_grad_norm_(sharded, 1e9)
        assert got.dtype is torch.float32
        norms.append(abs(got.item() / math.sqrt(sum(float(g.pow(2).sum()) for g in full)) - 1))
    return norms


def test_float32() -> None:
    assert max(max(rank) for rank in run_ranks(2, float32_and_bf16)) < 1e-6


# -- values that are not finite


def spoil(sharded: nn.Module, names: tuple[str, ...], value: float) -> None:
    """Put a value into the first element of gradients, on the rank that holds it."""
    for name, param in sharded.named_parameters():
        if name in names:
            assert isinstance(param.grad, Shard)
            if param.grad.start == 0 and param.grad.local.numel():
                param.grad.local[0] = value


def not_finite(value: float, order: float) -> float:
    reference, sharded = pair()
    backward(reference, sharded, 0)
    spoil(sharded, ("head.weight",), value)
    norm = clip_grad_norm_(sharded, 1.0, order)
    assert equal_on_all_ranks(norm)
    return norm.item()


def raise_not_finite(names: tuple[str, ...], value: float, order: float = 2.0) -> None:
    reference, sharded = pair()
    backward(reference, sharded, 0)
    spoil(sharded, names, value)
    clip_grad_norm_(sharded, 1.0, order, error_if_nonfinite=True)


def test_not_finite() -> None:
    for order in (2.0, math.inf):
        assert all(math.isinf(norm) for norm in run_ranks(2, not_finite, math.inf, order))
        assert all(math.isnan(norm) for norm in run_ranks(2, not_finite, math.nan, order))
    for order in (2.0, math.inf):
        expect_error(
            2,
            raise_not_finite,
            ("head.weight", "blocks.1.down.bias"),
            math.nan,
            order,
            error="StateError",
            contains=["`head.weight`", "`blocks.1.down.bias`"],
        )
    expect_error(2, raise_not_finite, ("head.weight",), 1e300, error="StateError", contains=["are finite", "too large"])
    run_ranks(2, raise_not_finite, (), 0.0)


def test_mistakes() -> None:
    with pytest.raises(lamina.UsageError, match="norm_type"):
        param = nn.Parameter(torch.zeros(1))
        clip_grad_norm_(param, 1.0, norm_type="two")  # type: ignore[arg-type]


# -- tensor parallelism beside sharding


def parts_count_once(strategy: str) -> None:
    """2 x 2 ranks: one weight split over "tp" and then over "shard", one bias the same on both tensor ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    tensor = mesh.get_local_rank("tp")
    torch.manual_seed(3)
    weight, bias = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    model = nn.Module()
    model.weight = nn.Parameter(weight[3 * tensor : 3 * tensor + 3].clone())
    model.bias = nn.Parameter(bias.clone())
    split_parameter(model.weight, 0, mesh.get_group("tp"))
    model.forward = lambda: (model.weight.pow(2).sum() + model.bias.pow(2).sum()) / 2
    lamina.shard(model, strategy=strategy, mesh=mesh["shard"])
    for order in (2.0, 1.0, math.inf, 0.0):
        model().backward()  # gradients equal the values
        expected = nn.utils.get_total_norm([weight, bias], order)
        got = clip_grad_norm_(model, 1e9, order)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
        model.zero_grad()


def test_tensor_parallel_parts_count_once() -> None:
    for strategy in ("zero3", "zero1"):
        run_ranks(4, parts_count_once, strategy)
