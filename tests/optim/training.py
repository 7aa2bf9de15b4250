"""A small model, its sharded twin, and steps of both: shared by the tests of optimizers and clipping.

Every rank trains the reference too, in one process: on the batches of all ranks, with torch's own optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from lamina.core.shard_tensor import Shard


class Block(nn.Module):
    """Odd sizes, so that ranges end inside parameters; `extra` runs only when asked, and has no gradient otherwise."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, dtype=dtype)
        self.up = nn.Linear(dim, 3 * dim, dtype=dtype)
        self.extra = nn.Linear(dim, dim, dtype=dtype)
        self.down = nn.Linear(3 * dim, dim, dtype=dtype)

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.extra(x) if use_extra else x


class Model(nn.Module):
    def __init__(self, dim: int = 13, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.blocks = nn.ModuleList(Block(dim, dtype) for _ in range(2))
        self.frozen = nn.Linear(dim, dim, dtype=dtype).requires_grad_(False)
        self.head = nn.Linear(dim, 5, dtype=dtype)

    def forward(self, x: Tensor, use_extra: bool = True) -> Tensor:
        for block in self.blocks:
            x = block(x, use_extra)
        return self.head(self.frozen(x) * self.scale)


def pair(strategy: Any = "zero3", dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The reference and the sharded model, of equal weights."""
    reference = Model(dtype=dtype)
    sharded = lamina.shard(copy.deepcopy(reference), strategy=strategy, units=[Block], **options)
    return reference, sharded


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 13, generator=generator, dtype=torch.float64).to(dtype)


def backward(reference: nn.Module, sharded: nn.Module, step: int, use_extra: bool = True, factor: float = 1.0) -> None:
    """Gradients of one step: of the reference on all ranks' batches, of the sharded model on this rank's."""
    dtype = next(reference.parameters()).dtype
    world, rank = dist.get_world_size(), dist.get_rank()
    for other in range(world):
        loss = reference(batch(step, other, dtype), use_extra).pow(2).mean()
        (loss * factor / world).backward()
    (sharded(batch(step, rank, dtype), use_extra).pow(2).mean() * factor).backward()


def groups_of(model: nn.Module, lr: float | Tensor = 1e-2, **options: Any) -> list[dict[str, Any]]:
    """Decay for matrices, none for vectors, the head at another rate."""
    head = [p for n, p in model.named_parameters() if n.startswith("head")]
    rest = [p for n, p in model.named_parameters() if not n.startswith(("head", "frozen"))]
    return [
        {"params": [p for p in rest if p.ndim >= 2], "lr": lr, "weight_decay": 0.1, **options},
        {"params": [p for p in rest if p.ndim < 2], "lr": lr, "weight_decay": 0.0, **options},
        {"params": head, "lr": 3e-3, "weight_decay": 0.05, **options},
    ]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full() if isinstance(tensor, Shard) else tensor.detach()


def difference(expected: Iterable[Tensor], got: Iterable[Tensor]) -> float:
    """The largest absolute difference between full values. Collective."""
    apart = [(a.detach().double() - whole(b).double()).abs() for a, b in zip(expected, got, strict=True)]
    return max(float(one.max()) for one in apart if one.numel())


def state_difference(expected: torch.optim.Optimizer, got: torch.optim.Optimizer) -> float:
    """The largest difference between two optimizers' states; which parameters have one must be the same. Collective."""
    worst = 0.0
    theirs, ours = (
        [o.state.get(p) or {} for group in o.param_groups for p in group["params"]] for o in (expected, got)
    )
    for mine, yours in zip(theirs, ours, strict=True):
        assert mine.keys() == yours.keys(), f"{mine.keys()} {yours.keys()}"
        worst = max([worst, *(difference([mine[key]], [yours[key]]) for key in mine)])
    return worst


def kernels(optimizer: Any) -> list[int]:
    """How many ranges each fused kernel of the last step took."""
    return [len(call.params) for call in optimizer._calls]
