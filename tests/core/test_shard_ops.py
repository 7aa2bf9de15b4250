"""Elementwise operations, reductions and random fills against the same call on the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cutting import cut_tensor
from harness import run_ranks
from lamina.core.shard_collectives import COUNTERS
from lamina.core.shard_tensor import Shard, register
from lamina.errors import ShardOpError

register()
SHAPES = [(7, 5), (3, 2, 4), (11,), (1,), (), (2, 0, 3)]
ULPS = 1e-14  # float64: pow and exp round otherwise in a vector register than in the rest of a loop
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.complex64]


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype is torch.bool:
        return values > 0
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if values.dim() else -values).to(dtype)
    return (values * 3).to(dtype)


def check(name: str, got: Any, want: Any, wrong: list[str], rtol: float = 0.0) -> None:
    got = got.full() if type(got) is Shard else got
    if isinstance(want, Tensor):
        fits = isinstance(got, Tensor) and got.shape == want.shape and got.dtype == want.dtype
        same = fits and (torch.equal(got, want) or torch.allclose(got, want, rtol=rtol, atol=0, equal_nan=True))
    else:
        same = got == want
    if not same:
        wrong.append(f"{name}: {got} instead of {want}")


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arithmetic": lambda x, y: (x * 2 + y) / 3 - y,
    "reflected": lambda x, y: 1.0 / (2 - x),
    "plain left": lambda x, y: torch.ones(x.shape, dtype=torch.float64) * x,
    "broadcast row": lambda x, y: x * torch.arange(1.0, x.shape[-1] + 1) if x.dim() else x,
    "broadcast column": lambda x, y: x + torch.ones(x.shape[0], *(1,) * (x.dim() - 1)) if x.dim() else x,
    "0-dim": lambda x, y: x * torch.tensor(3.0),
    "promotion": lambda x, y: x.float() * torch.ones(x.shape, dtype=torch.float64),
    "0-dim promotion": lambda x, y: x.float() * torch.tensor(2.0, dtype=torch.float64),
    "compare": lambda x, y: (x > y) | (x == 0),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where plain": lambda x, y: torch.where(torch.ones(x.shape, dtype=torch.bool), x, 0.0),
    "clamp": lambda x, y: x.clamp(-1, 1).clamp_min(y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.5),
    "functions": lambda x, y: x.abs().sqrt() + x.sigmoid() + nn.functional.gelu(x) + x.erf() + torch.sign(x),
    "power": lambda x, y: x.pow(2) + 2.0**x,
    "masked_fill": lambda x, y: x.masked_fill(x > 0, 0.0),
    "round trip": lambda x, y: x.bfloat16().double(),
    "view": lambda x, y: x.reshape(-1).mul(2).view(x.shape),
    "flatten": lambda x, y: x.flatten(),
    "slice": lambda x, y: x.flatten()[::1][0:][:1000],
    "unsqueeze": lambda x, y: x.unsqueeze(0).squeeze(0),
    "frexp": lambda x, y: torch.frexp(x)[0],
    "max of two": lambda x, y: torch.maximum(x, y),
    "nan_to_num": lambda x, y: x.nan_to_num(),
    "isclose": lambda x, y: torch.isclose(x, y),
    "likes": lambda x, y: torch.ones_like(x) + torch.full_like(x, 2) + torch.zeros_like(x, dtype=torch.float32),
    "atan2": lambda x, y: torch.atan2(x, y),
    "complex": lambda x, y: torch.view_as_real(torch.complex(x, y)),
    "bits": lambda x, y: (x.view(torch.int64) & -(1 << 40)).view(torch.float64),
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda x, y: x.mul_(2),
    "add_": lambda x, y: x.add_(y, alpha=0.5),
    "iadd": lambda x, y: x.__iadd__(y),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=2.0),
    "clamp_": lambda x, y: x.clamp_(-1, 1),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(torch.tensor(3.0)),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ cast": lambda x, y: x.copy_(torch.ones(x.shape, dtype=torch.float32)),
    "copy_ broadcast": lambda x, y: x.copy_(torch.tensor(2.0)),
    "mask": lambda x, y: x.__setitem__(x > 0, 0.5),
    "masked_fill_": lambda x, y: x.masked_fill_(torch.ones(x.shape, dtype=torch.bool), 2.0),
    "out": lambda x, y: torch.add(y, 1, out=x),
    "data": lambda x, y: setattr(x, "data", torch.ones(x.shape, dtype=x.dtype)),
    "bits": lambda x, y: x.view(dtype=torch.int64).bitwise_and_(-(1 << 40)),
    "foreach lerp": lambda x, y: torch._foreach_lerp_([x, x], [y, y], 0.5),
    "foreach scalars": lambda x, y: torch._foreach_mul_([x, y], [2.0, 3.0]),
    "foreach plain": lambda x, y: torch._foreach_add_([x], [torch.ones(x.shape)]),
    "foreach copy": lambda x, y: torch._foreach_copy_([x], [torch.ones(x.shape, dtype=torch.float32)]),
    "foreach mixed": lambda x, y: torch._foreach_add_([x, torch.zeros(2)], [y, torch.ones(2)]),
    "foreach addcdiv": lambda x, y: torch._foreach_addcdiv_([x], [y], [y.abs() + 1], torch.tensor([2.0])),
    "foreach zero": lambda x, y: torch._foreach_zero_([x]),
    "foreach out of place": lambda x, y: x.copy_(torch._foreach_sub(torch._foreach_neg([x]), [y])[0]),
    "foreach pow": lambda x, y: x.copy_(torch._foreach_pow(2.0, [x])[0]),
}
REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum dims": lambda x: x.sum(dim=tuple(range(x.dim())), keepdim=True),
    "sum dtype": lambda x: x.sum(dtype=torch.float32),
    "mean": lambda x: x.mean(),
    "nansum": lambda x: x.nansum(),
    "all": lambda x: (x > -100).all(),
    "any": lambda x: (x > 100).any(),
    "isfinite": lambda x: torch.isfinite(x).all(),
    "count": lambda x: torch.count_nonzero(x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x + 1e-12),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0),
    "norm dtype": lambda x: torch.linalg.vector_norm(x, 2, dtype=torch.float64),
    "square": lambda x: x.pow(2).sum().sqrt(),
    "dot": lambda x: torch.dot(x.flatten(), x.flatten().cos()),
    "dot plain": lambda x: torch.dot(torch.arange(float(x.numel()), dtype=x.dtype), x.flatten()),
    "item": lambda x: x.max().item() if x.numel() else x.sum().item(),
}
EXTREMES: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(dim=tuple(range(x.dim())), keepdim=True),
    "aminmax": lambda x: torch.aminmax(x)[1],
    "norm inf": lambda x: x.norm(math.inf),
    "norm -inf": lambda x: x.norm(-math.inf),
    "std by hand": lambda x: (x - x.mean()).pow(2).mean().sqrt(),
}


def elementwise() -> list[str]:
    wrong: list[str] = []
    for shape in SHAPES:
        for uneven in (False, True):
            for name, use in ELEMENTWISE.items():
                x, y = sample(shape), sample(shape, seed=1)
                sharded = use(cut_tensor(x, uneven=uneven), cut_tensor(y, uneven=uneven))
                assert type(sharded) is Shard, name
                check(f"{name} {shape}", sharded, use(x, y), wrong, ULPS)
            for name, use in IN_PLACE.items():
                x, y = sample(shape), sample(shape, seed=1)
                sharded = cut_tensor(x, uneven=uneven)
                use(sharded, cut_tensor(y, uneven=uneven))
                use(x, y)
                check(f"{name} {shape}", sharded, x, wrong, ULPS)
    return wrong


def reductions() -> list[str]:
    wrong: list[str] = []
    for shape in SHAPES:
        for name, use in {**REDUCTIONS, **(EXTREMES if math.prod(shape) else {})}.items():
            x = sample(shape)
            COUNTERS.reset()
            check(f"{name} {shape}", use(cut_tensor(x, uneven=True)), use(x), wrong, rtol=1e-6)
            if name in ("sum", "max", "norm", "norm inf", "norm -inf", "all") and COUNTERS.all_reduces > 1:
                wrong.append(f"{name}: {COUNTERS.all_reduces} all-reduces")
    integers = sample((7, 5), torch.int8)
    for name in ("sum", "max", "min", "all", "any"):
        check(f"int8 {name}", getattr(cut_tensor(integers), name)(), getattr(integers, name)(), wrong)
    half = sample((7, 5), torch.bfloat16)
    for name in ("max", "min", "amax"):
        check(f"bf16 {name}", getattr(cut_tensor(half), name)(), getattr(half, name)(), wrong)
    for at in (0, 34):  # NaN on the first rank, on the last one
        x = sample((7, 5))
        x.view(-1)[at] = math.nan
        for name, use in EXTREMES.items():
            check(f"NaN {name}", use(cut_tensor(x)), use(x), wrong)
        (norm,) = torch._foreach_norm([cut_tensor(x)], math.inf)
        check("NaN foreach norm", norm, x.norm(math.inf), wrong)
    return wrong


def whole_tensors() -> list[str]:
    wrong: list[str] = []
    for shape in SHAPES:
        for dtype in DTYPES:
            for uneven in (False, True):
                x = sample(shape, dtype)
                check(f"full {shape} {dtype}", cut_tensor(x, uneven=uneven), x, wrong)
    x = sample((5,))
    one = cut_tensor(x[:1].clone(), uneven=True)
    assert float(one) == one.item() == x[0].item() and bool(one == one)
    assert cut_tensor(x[0].clone()).tolist() == x[0].item()
    return wrong


FILLS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(17),
    "random_ from": lambda x: x.random_(3, 17),
    "generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(4)),
    "rand_like": lambda x: x.copy_(torch.rand_like(x)),
    "randn_like": lambda x: x.copy_(torch.randn_like(x, dtype=torch.float32)),
    "randint_like": lambda x: x.copy_(torch.randint_like(x, 1, 9)),
    "noise": lambda x: x.add_(torch.randn_like(x), alpha=0.1),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, inplace=True),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, a=-0.5, b=0.5),
    "constant_": lambda x: nn.init.constant_(x, 3.0),
    "ones_": lambda x: nn.init.ones_(x),
    "data": lambda x: x.data.normal_(),
    "data full": lambda x: setattr(x, "data", torch.randn(x.shape, dtype=x.dtype)),
}
MATRIX_FILLS: dict[str, Callable[[Tensor], Any]] = {
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
}


def random_fills() -> list[str]:
    wrong: list[str] = []
    for shape in ((7, 5), (4, 3, 2, 2), (11,), ()):
        for name, fill in {**FILLS, **(MATRIX_FILLS if len(shape) > 1 else {})}.items():
            x = sample(shape)
            sharded = cut_tensor(x)
            for some in (x, sharded):
                torch.manual_seed(5)
                fill(some)
                some.add_(torch.rand(()))  # tells whether the generator is where it would be
            check(f"{name} {shape}", sharded, x, wrong)
    return wrong


def complex_parameters() -> float:
    x = sample((7, 5), torch.complex64)
    sharded, plain = cut_tensor(x).requires_grad_(), x.clone().requires_grad_()
    for some in (sharded, plain):
        optimizer = torch.optim.AdamW([some], lr=0.1, foreach=False)
        some.grad = (some.detach() * 2).clone()
        nn.utils.clip_grad_norm_([some], 1.0)
        optimizer.step()
    return (sharded.full() - plain.detach()).abs().max().item()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("work", [elementwise, reductions, whole_tensors, random_fills])
def test_equals_the_whole(world, work):
    results = run_ranks(world, work)
    assert results == [[]] * world


def test_complex_parameters():
    assert max(run_ranks(3, complex_parameters)) < 1e-6


def in_a_part_of_the_world() -> str | None:
    """Half the ranks hold the tensor; the others do nothing, and nothing waits for them."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    x = sample((7, 5))
    sharded = cut_tensor(x, group)
    assert torch.equal(sharded.full(), x) and torch.equal(cut_tensor(x, group, uneven=True).full(), x)
    assert torch.allclose(sharded.norm(), x.norm()) and sharded.max() == x.max()
    return repr(sharded)


def test_subgroup():
    results = run_ranks(4, in_a_part_of_the_world)
    assert results[0] is None and "rank 1 of 2" in results[3]


def every_list_operation() -> tuple[list[str], dict[str, int]]:
    """Those of this torch, called in every way that plain tensors take: what is wrong, and how many ways are right."""
    wrong: list[str] = []
    right: dict[str, int] = {}
    for name in [name for name in dir(torch) if name.startswith("_foreach_")]:
        for shape in ((7, 5), (3, 3), (1,)):
            x, y, z = (sample(shape, seed=seed).abs() % 0.9 + 0.05 for seed in range(3))
            for way in ((), (0.5,), ([0.5, 0.25],), (y,), (y, 0.5), (y, z), (y, z, 0.5)):
                plain = [[each.clone(), each / 2] if isinstance(each, Tensor) else each for each in (x, *way)]
                cut = [
                    list(map(cut_tensor, arg)) if isinstance(arg, list) and isinstance(arg[0], Tensor) else arg
                    for arg in plain
                ]
                try:
                    expected = getattr(torch, name)(*plain)
                except (TypeError, RuntimeError):
                    continue
                try:
                    found = getattr(torch, name)(*cut)
                except ShardOpError:
                    right.setdefault(name, 0)
                    continue
                pairs = zip(found, expected, strict=True) if expected else zip(cut[0], plain[0], strict=True)
                for got, want in pairs:
                    check(f"{name}{way}", got, want, wrong, ULPS)
                right[name] = right.get(name, 0) + 1
    return wrong, right


@pytest.mark.parametrize("world", [1, 3])
def test_every_list_operation_of_torch_is_right_or_refused(world: int) -> None:
    for wrong, right in run_ranks(world, every_list_operation):
        assert not wrong, wrong
        assert len(right) > 60 and [name for name, count in right.items() if not count] == ["_foreach_mm"], right
