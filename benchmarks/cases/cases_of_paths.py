"""C01, C02, C03, C06, C07, C11: ranks that disagree, sharing, frozen parameters, calls, outputs, optimizers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from systems import System, differences, make, twin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina

WIDTH = 5


def data(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def linears(count: int = 3) -> nn.Module:
    layers = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).double()


def units_of(model: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kinds or (nn.Linear,)) and module is not model]


Loss = Callable[[nn.Module, Tensor], Tensor]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def step_both(system: System, plain: nn.Module, model: nn.Module, step: int, loss: Loss = square) -> None:
    """Gradients of one step in both; the plain model sees what all ranks see."""
    for rank in range(dist.get_world_size()):
        (loss(plain, data(rank, step)) / dist.get_world_size()).backward()
    loss(model, data(dist.get_rank(), step)).backward()


def train(
    system: System,
    plain: nn.Module,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    steps: int,
    loss: Loss = square,
    clip: float | None = None,
) -> float:
    worst = 0.0
    for step in range(steps):
        step_both(system, plain, model, step, loss)
        worst = max(worst, differences(system, model, plain))
        if clip is not None:
            for each in (plain, model):
                torch.nn.utils.clip_grad_norm_(each.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, differences(system, model, plain))
    return worst


# -- C01


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, skip: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = torch.tanh(layer(x))
        return x


def skip(name: str) -> float:
    system, rank = make(name), dist.get_rank()
    plain, model = twin(lambda: Skipping().double())
    model = system.shard(model, units_of(model))
    worst = 0.0
    for step in range(2):
        with torch.no_grad():
            found, wanted = (each(data(rank, step), skip=rank + 1) for each in (model, plain))
        worst = max(worst, (found - wanted).abs().max().item())
    return worst


def uneven(name: str) -> float:
    """Rank 0 trains three steps, rank 1 two; then both evaluate."""
    system = make(name)
    _, model = twin(linears)
    model = system.shard(model, units_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3 - dist.get_rank()):
        square(model, data(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(data(dist.get_rank(), 9))
    return float("nan")


def even(name: str) -> float | None:
    if name == "FSDP2":
        return None  # torch's Join does not know it
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step, x in enumerate(lamina.even([data(dist.get_rank(), step) for step in range(3 - dist.get_rank())])):
        ranks = range(2 if step < 2 else 1)
        for rank in ranks:
            (square(plain, data(rank, step)) / len(ranks)).backward()
        square(model, x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return differences(system, model, plain)


# -- C02, C03


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.emb(tokens))))


def tied_loss(model: nn.Module, x: Tensor) -> Tensor:
    tokens = (x.abs() * 10).long() % 7
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def tied(name: str) -> float:
    system = make(name)
    plain, model = twin(lambda: Tied().double())
    model = system.shard(model, [model.emb, model.mid, model.head])
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01, eps=1e-3) for each in (plain, model)]
    worst = train(system, plain, model, optimizers, 3, tied_loss, clip=0.01)
    return worst if model.head.weight is model.emb.weight else float("inf")


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = (torch.randn(WIDTH, WIDTH) * 20).round().clamp(-127, 127).to(torch.int8)
        self.q = nn.Parameter(codes, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) * 0.3), nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.q.to(x.dtype) / 20) + F.linear(F.linear(x, self.a), self.b))


def lora(name: str) -> float:
    system = make(name)
    plain, model = twin(lambda: nn.Sequential(Lora(), Lora()).double())
    model = system.shard(model, units_of(model, Lora))
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, model)]
    return train(system, plain, model, optimizers, 2)


class NarrowAndWide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x).to(torch.bfloat16))).float()


def narrow_and_wide(name: str) -> float:
    system = make(name)
    plain, model = twin(lambda: nn.Sequential(NarrowAndWide(), NarrowAndWide()))
    model = system.shard(model, units_of(model, NarrowAndWide))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    return train(system, plain, model, optimizers, 2, lambda each, x: square(each, x.float()))


# -- C06


class Stack(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.heads[0](x), self.heads[1](x)


def calls(name: str, order: str, reentrant: bool) -> float:
    system, rank = make(name), dist.get_rank()
    plain, model = twin(lambda: Stack(reentrant).double())
    model = system.shard(model, [*model.blocks, *model.heads])
    worst = 0.0
    for step in range(2):
        for each, ranks in ((plain, (0, 1)), (model, (rank,))):
            for r in ranks:
                _call(each, order, r, step, len(ranks))
        worst = max(worst, differences(system, model, plain))
        for each in (plain, model):
            each.zero_grad()
    return worst


def _call(model: nn.Module, order: str, rank: int, step: int, share: int) -> None:
    if order == "(v)":  # one output in the first step, the other in the second
        (model(data(rank, step))[step].pow(2).mean() / share).backward()
        return
    losses = [sum(out.pow(2).mean() for out in model(data(rank, 2 * step + i))) / share for i in (0, 1)]
    if order == "(i)":
        losses[0].backward()
        losses[1].backward()
    elif order == "(ii)":
        losses[1].backward()
        losses[0].backward()
    elif order == "(iii)":
        (losses[0] + 2 * losses[1]).backward()
    else:
        losses[0].backward(retain_graph=True)
        losses[0].backward()


# -- C07


class Custom:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclasses.dataclass
class Data:
    value: Tensor


class Named(NamedTuple):
    value: Tensor
    other: None = None


PACKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "(i)": (Custom, lambda out: out.value),
    "(ii)": (Data, lambda out: out.value),
    "(iii)": (lambda y: {"a": [None, y], "b": None}, lambda out: out["a"][1]),
    "(iv)": (Named, lambda out: out.value),
    "(v)": (lambda y: y.view(-1), lambda out: out),
}


class Pair(nn.Module):
    def __init__(self, pack: str) -> None:
        super().__init__()
        self.one, self.two, self.pack = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), pack

    def forward(self, *, x: Tensor) -> Any:
        return PACKS[self.pack][0](self.two(torch.tanh(self.one(x))))


class Parent(nn.Module):
    def __init__(self, pack: str) -> None:
        super().__init__()
        self.pairs, self.pack = nn.ModuleList(Pair(pack) for _ in range(3)), pack

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            y = PACKS[self.pack][1](pair(x=x))
            if self.pack == "(v)":
                y += 1.0
            x = torch.tanh(y.view(-1, WIDTH))
        return x


def outputs(name: str, pack: str) -> float:
    system = make(name)
    plain, model = twin(lambda: Parent(pack).double())
    model = system.shard(model, list(model.pairs))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    return train(system, plain, model, optimizers, 2)


def gradient_hooks(name: str) -> float:
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))
    fired: list[str] = []
    for key, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, key=key: fired.append(key))
    for step in range(2):
        step_both(system, plain, model, step)
    expected = sorted(2 * [key for key, _ in plain.named_parameters()])
    return differences(system, model, plain) if sorted(fired) == expected else float("inf")


# -- C11


def optimizer_order(name: str, when: str) -> float:
    system = make(name)
    plain, model = twin(linears)
    start = copy.deepcopy(plain)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1, eps=1e-3) for m in (plain, model)] if when == "(i)" else []
    names, dims = ([f(p) for p in model.named_parameters()] for f in (lambda p: p[0], lambda p: p[1].ndim))
    identities = [id(p) for p in model.parameters()]
    model = system.shard(model, units_of(model)[:-1])  # the last layer is left to the root
    if when == "(ii)":
        with torch.no_grad():
            model(data(0))
    for each in (plain, model) if not optimizers else ():
        decay = [p for p in each.parameters() if p.ndim == 2]
        rest = [p for key, p in each.named_parameters() if key.endswith("bias")]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        chosen = {"(iii)": groups, "(iv)": decay}.get(when, list(each.parameters()))
        optimizers.append(torch.optim.Adam(chosen, lr=0.1, eps=1e-3))
    worst = train(system, plain, model, optimizers, 3)
    if [key for key, _ in model.named_parameters()] != names or [p.ndim for p in model.parameters()] != dims:
        return float("inf")
    moved = max((a - b).abs().max().item() for a, b in zip(plain.parameters(), start.parameters(), strict=True))
    same = [id(p) for p in model.parameters()] == identities or system.name == "FSDP2"  # it promises no identity
    return worst if moved > 0.01 and same else float("inf")


def moving_average(name: str) -> float:
    """An EMA by zip(parameters()), taken after a forward without gradients."""
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model)[:-1])
    averages = [[p.detach().clone() for p in each.parameters()] for each in (plain, model)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        train(system, plain, model, optimizers, 1)
        with torch.no_grad():
            model(data(0))
            for average, each in zip(averages, (plain, model), strict=True):
                for e, p in zip(average, each.parameters(), strict=True):
                    e.lerp_(p, 0.5)
    return max((system.full(ours) - other).abs().max().item() for other, ours in zip(*averages, strict=True))


def edited(name: str) -> float:
    """p.mul_(2) after a forward, then the next forward."""
    system = make(name)
    plain, model = twin(linears)
    model = system.shard(model, units_of(model))
    with torch.no_grad():
        model(data(0))
        for each in (plain, model):
            for param in each.parameters():
                param.mul_(2)
    step_both(system, plain, model, 0)
    return differences(system, model, plain)
