"""Ways of calling a sharded model that go past a plain forward and backward.

Orders of forwards and backwards, outputs of every type, graphs kept or dropped are in tests/parity. Here are custom
Functions, hooks that read weights, recomputation with random numbers, gradients of inputs, losses that read parameters,
several models in one step, and torch's own fast paths.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from cases.test_parameters import Attending, linear
from cases.training import TOLERANCE, WIDTH, Case, batch_of, seeded, worst_of
from harness import run_ranks
from parity.reference import gradient_deviation
from parity.structures import Chain, Crossing


class _SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class _ReadsModule(torch.autograd.Function):
    """Saves nothing: asks the module for its weight again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.module.weight.detach(), grad.T @ x, None


class Custom(nn.Linear):
    def __init__(self, reads_module: bool) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.reads_module = reads_module

    def forward(self, x: Tensor) -> Tensor:
        y = _ReadsModule.apply(x, self.weight, self) if self.reads_module else _SavesWeight.apply(x, self.weight)
        return torch.tanh(y)


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(linear(), nn.Dropout(0.4), nn.Tanh(), linear())


class Recomputed(Chain):
    """Blocks with dropout under torch's checkpoint: the second forward draws the same numbers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(Dropping(), Dropping())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(F.dropout(x, 0.2))


class Translating(nn.Module):
    """Encoder and decoder, each block of both under the user's checkpoint; the memory goes to every decoder block."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(linear(), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList(Crossing() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        memory = x.clone().requires_grad_()  # a reentrant checkpoint has no gradient without an input that wants one
        y = memory * 0.5
        for layer in self.encoder:
            memory = checkpoint(layer, memory, use_reentrant=self.reentrant)
        for block in self.blocks:
            y = checkpoint(lambda a, m, block=block: block(a, memory=m), y, memory, use_reentrant=self.reentrant)
        return y


class Dispatching(nn.Module):
    """Tokens go to the expert of their gate's choice; an expert may see none on a rank, or on all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(linear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, out = weights.argmax(-1), x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return out


class HalfWithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.still, self.moving = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.still(x)
        return self.moving(x + y)


def noting(where: str) -> nn.Module:
    """Hooks of the user's that read weights: a penalty is added to the output, or noted in the backward."""
    model = Chain(linear(), linear())
    for block in model.blocks:
        if where == "before":
            block.register_forward_pre_hook(lambda m, args: (args[0] + m.weight.sum(1),))
        elif where == "after":
            block.register_forward_hook(lambda m, args, out: torch.tanh(out) * m.weight.abs().sum())
        elif where == "backward":
            block.register_full_backward_hook(lambda m, gi, go: (gi[0] * m.bias.detach().sum(),))
        else:
            block.register_full_backward_pre_hook(lambda m, go: (go[0] * m.weight.detach().mean(),))
    return model


def with_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """autograd.grad of the inputs alone, then the step itself: the first leaves no gradient anywhere."""
    x = x.requires_grad_()
    (found,) = torch.autograd.grad(model(x).pow(2).mean(), x)
    assert all(p.grad is None for p in model.parameters())
    return model(x.detach() + 0.1 * found.sign()).pow(2).mean()


def after_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """The gradients of a step are there; an attack on the inputs does not add to them."""
    model(x).pow(2).mean().backward()
    x = x.requires_grad_()
    (found,) = torch.autograd.grad(model(x).pow(2).mean(), x)
    return (model(x.detach() + found) ** 2).mean()


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A regulariser over parameters outside the forward, in the same loss."""
    return model(x).pow(2).mean() + 0.1 * sum((p**2).sum() for p in model.parameters())


def penalty_first(model: nn.Module, x: Tensor) -> Tensor:
    """The regulariser has a backward of its own, before the forward."""
    (0.1 * sum(p.pow(2).sum() for p in model.parameters())).backward()
    return model(x).pow(2).mean()


def penalty_between(model: nn.Module, x: Tensor) -> Tensor:
    """The regulariser's backward runs between the model's forward and its backward."""
    loss = model(x).pow(2).mean()
    (0.1 * sum(p.abs().sum() for p in model.parameters())).backward()
    return loss


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    """Attention's fast path, which reads weights without calling their modules, between training steps."""
    model.eval()
    with torch.no_grad():
        out = model(x)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), out)
    model.train()
    return (model(x) - out).pow(2).mean() + model(x * 2).pow(2).mean()


def two_calls(model: nn.Module, x: Tensor) -> Tensor:
    """Contrastive: two views of the batch through the same model, a loss over both."""
    a, b = model(x), model(x + 0.1)
    return F.mse_loss(a, b.detach()) - (a * b.flip(0)).sum().tanh()


def part_only(model: nn.Module, x: Tensor) -> Tensor:
    """Units of the model are called past its forward, each a root of its own."""
    for block in model.blocks:
        x = block(x)
    return x.pow(2).mean()


class Tied(nn.Module):
    """A body that looks words up in a table, whose weight is the head's too; scripts call one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Chain(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.body.table, self.body.last = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body.register_forward_pre_hook(lambda body, args: (body.table(args[0]),))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.body.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(words))


def words_of(x: Tensor) -> Tensor:
    return x.abs().mul(3).long() % 7


def by_parts(model: nn.Module, x: Tensor) -> Tensor:
    return model.head(model.body(words_of(x))).pow(2).mean()


def by_parts_and_whole(model: nn.Module, x: Tensor) -> Tensor:
    return by_parts(model, x) + model(words_of(x + 1)).pow(2).mean()


TIED_UNITS = ("body.blocks.*", ["body.table", "head"], "body")


def auto_cast(model: nn.Module, x: Tensor) -> Tensor:
    """autocast keeps copies of weights while its scope lasts: two forwards inside one."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().pow(2).mean() + model(x * 2).float().pow(2).mean()


def blocks_of_linears() -> Chain:
    return Chain(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(2)))


CASES: dict[str, Case] = {
    "custom function saves the weight": Case(lambda: Chain(Custom(False), Custom(False))),
    "custom function reads the module": Case(lambda: Chain(Custom(True), Custom(True))),
    "dropout": Case(lambda: Chain(Dropping(), Dropping())),
    "dropout, recomputed": Case(lambda: Recomputed(False), optimizer="foreach"),
    "dropout, recomputed with reentry": Case(lambda: Recomputed(True)),
    "encoder and decoder, recomputed": Case(lambda: Translating(False), units=("encoder.*", "blocks.*")),
    "encoder and decoder, with reentry": Case(lambda: Translating(True), units=("encoder.*", "blocks.*")),
    "tokens to experts": Case(
        lambda: Chain(Dispatching(), Dispatching()), units=("blocks.*.experts.*", "blocks.*.gate"), steps=3
    ),
    "half without gradients": Case(
        lambda: Chain(HalfWithoutGradients(), HalfWithoutGradients()), units=("blocks.*.still", "blocks.*.moving")
    ),
    "forward pre-hook": Case(lambda: noting("before")),
    "forward hook": Case(lambda: noting("after")),
    "full backward hook": Case(lambda: noting("backward")),
    "full backward pre-hook": Case(lambda: noting("backward pre")),
    "gradient of inputs": Case(blocks_of_linears, with_input_gradient),
    "gradient of inputs between": Case(blocks_of_linears, after_input_gradient),
    "regulariser": Case(blocks_of_linears, with_penalty, optimizer="foreach", max_norm=0.1),
    "regulariser before": Case(blocks_of_linears, penalty_first),
    "regulariser between": Case(blocks_of_linears, penalty_between),
    "attention's fast path": Case(lambda: Chain(Attending(), Attending()), evaluated),
    "encoder layer's fast path": Case(
        lambda: Chain(*(nn.TransformerEncoderLayer(WIDTH, 1, 7, dropout=0.0) for _ in range(2))), evaluated
    ),
    "two calls, one loss": Case(blocks_of_linears, two_calls),
    "parts past the root": Case(blocks_of_linears, part_only),
    "parts of a tied model": Case(Tied, by_parts, TIED_UNITS, steps=3),
    "parts of a tied model, and all of it": Case(Tied, by_parts_and_whole, TIED_UNITS, steps=3),
    "autocast": Case(blocks_of_linears, auto_cast, dtype=torch.float32),
}


def run(name: str) -> dict[str, float]:
    return worst_of(CASES[name])


@pytest.mark.parametrize("name", list(CASES))
def test_calls_equal_one_process(name: str) -> None:
    tolerance = TOLERANCE if CASES[name].dtype is torch.float64 else 1e-5
    for found in run_ranks(2, run, name):
        assert max(found.values()) <= tolerance, found


def adversarial(strategy: str, transport: str) -> float:
    """Two sharded models train each other: the one's loss goes through the other, which is frozen meanwhile."""
    rank, worst = dist.get_rank(), 0.0
    plain = [seeded(blocks_of_linears), seeded(lambda: nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), linear()))]
    made, judge = (
        lamina.shard(seeded(build), strategy, units=units, transport=transport)
        for build, units in (
            (blocks_of_linears, ["blocks.*"]),
            (lambda: nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), linear()), [nn.Linear]),
        )
    )
    pairs = [plain, [made, judge]]
    optimizers = [[torch.optim.SGD(m.parameters(), lr=0.1) for m in pair] for pair in pairs]
    for step in range(2):
        for trained in (1, 0):
            for pair, ranks in ((pairs[0], (0, 1)), (pairs[1], (rank,))):
                pair[1 - trained].requires_grad_(False)
                for each in ranks:
                    fake = pair[0](batch_of(each, step))
                    loss = pair[1](fake if trained == 0 else fake.detach()).pow(2).mean() * (1 if trained else -1)
                    (loss / len(ranks)).backward()
                pair[1 - trained].requires_grad_(True)
            expected = {n: p.grad for n, p in pairs[0][trained].named_parameters()}
            worst = max(worst, gradient_deviation(pairs[1][trained], expected))
            for group in optimizers:
                group[trained].step()
                group[trained].zero_grad()
    return worst


@pytest.mark.parametrize(("strategy", "transport"), [("zero3", "c10d"), ("zero3", "peer"), ("zero1", "c10d")])
def test_two_models_that_train_each_other(strategy: str, transport: str) -> None:
    assert max(run_ranks(2, adversarial, strategy, transport)) <= TOLERANCE


def step_in_backward(strategy: str) -> float:
    """An optimizer for each parameter, stepped by its post-accumulate hook: no gradient outlives the backward."""
    plain = seeded(blocks_of_linears)
    model = lamina.shard(seeded(blocks_of_linears), strategy, units=["blocks.*"], slots=1)
    each = {p: torch.optim.Adam([p], lr=0.01, eps=1e-3) for p in model.parameters()}

    def step(param: Tensor) -> None:
        each[param].step()
        each[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01, eps=1e-3)
    for number in range(3):
        for other in range(2):
            (plain(batch_of(other, number)).pow(2).mean() / 2).backward()
        reference.step()
        reference.zero_grad()
        model(batch_of(dist.get_rank(), number)).pow(2).mean().backward()
        assert all(p.grad is None for p in model.parameters())
    with lamina.gathered(model):
        return max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_an_optimizer_that_steps_in_the_backward(strategy: str) -> None:
    assert max(run_ranks(2, step_in_backward, strategy)) <= TOLERANCE
