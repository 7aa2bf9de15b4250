"""A model with everything that a checkpoint may meet, and a training run that does not depend on the layout.

Every step takes the same eight samples, dealt out evenly: in float64 the run is the same on any number of ranks, so one
run in one process is what every continued run is compared with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lamina

SAMPLES = 8
VOCABULARY, WIDTH = 29, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 23)
        self.down = nn.Linear(23, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Everything(nn.Module):
    """Tied head, frozen layers of three dtypes, a 0-dim and an empty parameter, a buffer that counts; else float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.double()
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.steps_of_frozen = nn.Parameter(torch.randint(-5, 5, (WIDTH,), dtype=torch.int8), requires_grad=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("not_kept", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.forwards += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + self.frozen(x.bfloat16()).double() * 0 + self.steps_of_frozen.double() * 0.01
        return self.head(x) * self.scale + self.empty.sum()


def build(seed: int = 0) -> Everything:
    torch.manual_seed(seed)
    return Everything()


UNITS = ["embedding", "blocks.*", "frozen"]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9)
    made = lamina.optim.AdamW if kind == "lamina" else torch.optim.AdamW
    return made(groups_of(model), betas=(0.8, 0.95), eps=1e-3)


def batch(step: int) -> Tensor:
    """All ranks' samples of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SAMPLES, 5), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The mean over this rank's samples."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mine = batch(step).chunk(world)[rank]
    return F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """This rank's losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, whole. Collective."""
    with lamina.gathered(list(model.parameters())) as values:
        named = dict(zip((name for name, _ in model.named_parameters()), values, strict=True))
    return {name: value.clone() for name, value in {**named, **dict(model.named_buffers())}.items()}


def own_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything that this rank holds, to be compared bit for bit."""
    tensors = list(model.parameters())
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            tensors += [state[key] for key in sorted(state)]
    return [t.local.clone() if isinstance(t, lamina.Shard) else t.detach().clone() for t in tensors]


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Between full values, or this rank's part of them and full values. Local."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, value in found.items():
        mine, other = value.detach(), expected[name].detach()
        if isinstance(value, lamina.Shard):
            mine, other = value.local.detach(), other.reshape(-1)[value.start : value.stop]
        assert mine.shape == other.shape, name
        if mine.numel():
            worst = max(worst, float((mine.double() - other.double()).abs().max()))
    return worst


def own_values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as this rank holds them."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
