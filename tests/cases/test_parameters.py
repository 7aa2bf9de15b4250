"""Parameters of every kind train as in one process: reparametrised, recurrent, of odd shape or dtype, quantised.

LoRA, ties, experts, a unit of mixed kinds and batch norm are in tests/parity/test_structures.py; here are the others.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

import lamina
from cases.training import TOLERANCE, WAYS, WIDTH, Case, worst_of
from harness import expect_error, run_ranks
from parity.structures import Chain, Lora


def chain(make: object, count: int = 2) -> Chain:
    return Chain(*(make() for _ in range(count)))  # type: ignore[operator]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(0))[0].squeeze(0)


class Attending(nn.Module):
    """Attention that reads the weights of its children; with `eval`, by torch's fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


class Looking(nn.Module):
    """An embedding with sparse gradients; tokens made from the data, so that ranks use different rows."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.table, self.bag = kind(11, WIDTH, sparse=True), bag

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach().abs() * 10).long() % 11
        return self.table(tokens) + x if self.bag else self.table(tokens[:, 0]) + x


class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) * 0.4)
        self.real = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.fft(x) @ self.weight
        return torch.tanh(torch.fft.ifft(y).real + self.real)


class Scalar(nn.Module):
    """Nothing but a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:0] @ self.nothing.sum(0).diag()])


class Codes(nn.Module):
    """Parameters of which none floats: an int64 permutation and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) % 3 > 0, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, self.order] * self.mask)


class _Dequantised(torch.autograd.Function):
    """Keeps the packed weight alone and widens it again in the backward, as 4-bit layers do."""

    @staticmethod
    def forward(ctx: object, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)  # type: ignore[attr-defined]
        return F.linear(x, unpack(packed))

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        (packed,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad @ unpack(packed), None


def unpack(packed: Tensor) -> Tensor:
    halves = torch.stack([packed & 15, packed >> 4]).double() - 7.5
    return halves.flatten()[: WIDTH * WIDTH].view(WIDTH, WIDTH) / 10


class FourBit(nn.Module):
    """A frozen base of packed nibbles, a low-rank pair beside it (QLoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randint(256, (13,), dtype=torch.uint8), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) * 0.3), nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_Dequantised.apply(x, self.packed) + x @ self.a.T @ self.b.T)


class EightBitFloat(nn.Module):
    """A frozen float8 base with one scale a row."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.base.to(x.dtype) * self.scale))


class LoraWithDropout(Lora):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, self.training))


class Ladder(nn.Module):
    """Tiny dims: one row, one column, one element."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.one, self.up = nn.Linear(WIDTH, 1), nn.Linear(1, 1), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(self.one(self.down(x))))


class Factor(nn.Linear):
    """What the script hangs on a parameter is read by the forward, and the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        return F.linear(torch.tanh(x), self.weight * self.weight.factor, self.bias)


def factors() -> Chain:
    model = chain(lambda: Factor(WIDTH, WIDTH), 3)
    for block in model.blocks:
        block.weight.factor = 1.5
    return model


def next_factors(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x).pow(2).mean()
    for number, block in enumerate(model.blocks):
        block.weight.factor = number + 1 / (1 + block.weight.calls)
    return result


class Factored(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(x), self.weight * getattr(self.weight, "factor", 1.0), self.bias)


def compiled_factors() -> Chain:
    model = chain(lambda: Factored(WIDTH, WIDTH))
    for block in model.blocks:
        block.weight.factor = 1.5
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def halved_factors(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x).pow(2).mean()
    for block in model.blocks:
        block.weight.factor /= 2
    return result


def shared_parametrization() -> nn.Module:
    """Two layers whose original weight is one parameter, each with a norm of its own."""
    first, second = linear(), linear()
    second.weight = first.weight
    return nn.Sequential(parametrizations.weight_norm(first), nn.Tanh(), second)


def all_frozen_but_one() -> Chain:
    model = chain(linear, 3)
    model.requires_grad_(False)
    model.blocks[1].bias.requires_grad_(True)
    return model


CASES: dict[str, Case] = {
    "weight_norm, hooks": Case(lambda: chain(lambda: nn.utils.weight_norm(linear()))),
    "weight_norm, parametrization": Case(lambda: chain(lambda: parametrizations.weight_norm(linear()))),
    "spectral_norm, hooks": Case(lambda: chain(lambda: nn.utils.spectral_norm(linear()))),
    "spectral_norm, parametrization": Case(lambda: chain(lambda: parametrizations.spectral_norm(linear()))),
    "orthogonal, parametrization": Case(lambda: chain(lambda: parametrizations.orthogonal(linear()))),
    "parametrization, units auto": Case(
        lambda: chain(lambda: parametrizations.weight_norm(linear())), units=(nn.Linear,), optimizer="foreach"
    ),
    "lstm": Case(lambda: chain(lambda: Recurrent(nn.LSTM))),
    "gru": Case(lambda: chain(lambda: Recurrent(nn.GRU), 1)),
    "attention": Case(lambda: chain(Attending)),
    "sparse embedding": Case(lambda: chain(lambda: Looking(False))),
    "sparse embedding bag": Case(lambda: chain(lambda: Looking(True))),
    "complex": Case(lambda: chain(ComplexLinear), optimizer="foreach"),
    "complex, for-loop": Case(lambda: chain(ComplexLinear), optimizer="adam"),
    "scalar": Case(lambda: chain(Scalar), max_norm=0.1),
    "empty": Case(lambda: chain(lambda: nn.Sequential(Empty(), linear())), optimizer="foreach"),
    "units of nothing": Case(lambda: chain(lambda: nn.ModuleList([Empty()])[0])),
    "integers": Case(lambda: chain(Codes)),
    "four bits": Case(lambda: chain(FourBit), optimizer="adam", max_norm=0.1),
    "eight-bit floats": Case(lambda: chain(EightBitFloat), optimizer="foreach"),
    "lora with dropout": Case(lambda: chain(lambda: LoraWithDropout(int8=True))),
    "attributes": Case(factors, next_factors, steps=4),
    "attributes, compiled": Case(compiled_factors, halved_factors, steps=3),
    "tiny dims": Case(lambda: chain(Ladder), max_norm=0.05),
    "one bias trains": Case(all_frozen_but_one, max_norm=0.1),
    "root only": Case(lambda: linear(), units=()),
}


def run(name: str) -> dict[str, float]:
    return worst_of(CASES[name])


@pytest.mark.parametrize("name", list(CASES))
def test_parameters_of_every_kind_equal_one_process(name: str) -> None:
    for found in run_ranks(2, run, name):
        assert max(found.values()) <= TOLERANCE, found


def a_little_more(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that is larger by 1e-7 of itself where the model is sharded."""
    is_sharded = isinstance(next(model.parameters()), lamina.Shard)
    return model(x).pow(2).mean() * (1 + 1e-7 * is_sharded)


def run_control() -> dict[str, float]:
    return worst_of(Case(lambda: chain(linear), a_little_more), WAYS[:3])


def test_a_small_fault_is_seen() -> None:
    for found in run_ranks(2, run_control):
        assert min(found.values()) > TOLERANCE, found


def attributes_inside() -> list[object]:
    """Each asked for inside a forward."""
    model = lamina.shard(linear())
    model.weight.later = 1
    found: list[object] = []

    def look(module: nn.Module, args: object) -> None:
        weight = module.weight
        found.extend((weight.later, hasattr(weight, "never"), hasattr(weight, "spec"), weight.shape))
        del weight.later
        weight.now = 2

    model.register_forward_pre_hook(look)
    model(torch.ones(1, WIDTH))
    return [*found, hasattr(model.weight, "later"), model.weight.now]


def test_attributes_of_a_parameter_are_the_same_inside_and_outside() -> None:
    wanted = [1, False, False, torch.Size([WIDTH, WIDTH]), False, 2]
    assert run_ranks(2, attributes_inside) == [wanted] * 2


def attributes_that_come_late(strategy: str) -> list[object]:
    """What a forward finds on the weight and on the bias: before there is anything, after one, after both."""
    model = lamina.shard(linear(), strategy, precision=lamina.Precision(compute=torch.bfloat16))
    found: list[object] = []

    def look(module: nn.Module, args: object) -> None:
        found.append((getattr(module.weight, "late", None), getattr(module.bias, "late", None)))

    model.register_forward_pre_hook(look)
    model(torch.ones(1, WIDTH))
    model.to_empty(device="cpu")  # makes other objects of what lamina itself keeps there
    model.bias.late = 1
    model(torch.ones(1, WIDTH))
    model.weight.late = 2
    model(torch.ones(1, WIDTH))
    return found


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_attributes_that_come_late_are_seen(strategy: str) -> None:
    assert run_ranks(2, attributes_that_come_late, strategy) == [[(None, None), (None, 1), (2, 1)]] * 2


def made_of_two(ignore: tuple[str, ...]) -> str:
    """A frozen parameter of a class like those of quantised weights."""
    model = chain(linear)
    name = next(name for name, param in model.named_parameters() if param.dim() == 2)
    module = model.get_submodule(name.rpartition(".")[0])
    value = module.weight.detach()
    module.weight = nn.Parameter(TwoTensor(value, value.clone()), requires_grad=False)
    lamina.shard(model, ignore=ignore)
    return type(model.get_parameter(name)).__name__


def test_parameters_made_of_other_tensors_are_named() -> None:
    """They became plain ones, several times as large."""
    words = ["weight` is of the class TwoTensor", "float32", "ignore=['"]
    errors = expect_error(2, made_of_two, (), error="UsageError", contains=words)
    name = errors[0].message.split("`")[1]
    assert run_ranks(2, made_of_two, (name,)) == ["TwoTensor"] * 2
