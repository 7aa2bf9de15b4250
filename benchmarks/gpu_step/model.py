"""A Llama-style decoder in plain PyTorch, dense or with experts: the model of all rows of this benchmark."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIZES = {  # dim, layers, heads, key-value heads, feed-forward, vocabulary
    "tiny": (256, 4, 4, 2, 512, 512),
    "1b": (2048, 24, 16, 8, 5632, 32768),
    "deep": (1600, 48, 25, 25, 4288, 50304),  # blocks of 31 M, as GPT-2 XL's
    "3b": (3072, 28, 24, 8, 8192, 32768),
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "experts": (1000, 4, 5, 1, 1429, 32768),
    "experts-tiny": (30, 2, 3, 1, 23, 101),
}
EXPERTS = {"experts": 64, "experts-tiny": 64}  # in each layer; other sizes are dense
CHOSEN = 2  # experts of a token
CAPACITY = 1.25  # places of an expert, over those of an even choice


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(y).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(y).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, dim))
        y = self.norm2(x)
        return x + self.feed_forward(y)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A feed-forward layer of many experts, of which each token takes `CHOSEN`. Stacked: one product does all.

    The same kernels whatever is chosen, no look at values on the host, and no sum in an order of its own: every expert
    has as many places, tokens take them in their order, and those that find none left pass by.
    """

    def __init__(self, dim: int, hidden: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count, bias=False)
        self.gate = nn.Parameter(torch.empty(count, hidden, dim))
        self.up = nn.Parameter(torch.empty(count, hidden, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden))

    def forward(self, x: Tensor) -> Tensor:
        count, dim = self.gate.shape[0], x.shape[-1]
        tokens = x.reshape(-1, dim)
        weights, chosen = F.softmax(_wide(self.router(tokens)), dim=-1).topk(CHOSEN, dim=-1)
        capacity = math.ceil(CAPACITY * chosen.numel() / count)
        places = _places(chosen.flatten(), count, capacity)
        rows = tokens.unsqueeze(1).expand(-1, CHOSEN, -1).reshape(-1, dim)
        packed = rows.new_zeros(count * capacity + 1, dim).index_copy(0, places, rows)[:-1].view(count, capacity, dim)
        inner = F.silu(packed @ self.gate.transpose(1, 2)) * (packed @ self.up.transpose(1, 2))
        made = F.pad((inner @ self.down.transpose(1, 2)).view(-1, dim), (0, 0, 0, 1))  # who passed by reads zeros
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        found = made.index_select(0, places)  # its backward adds; that of made[places] does the same row one at a time
        return (found.view(-1, CHOSEN, dim) * weights.unsqueeze(-1)).sum(1).view(x.shape)


def _places(chosen: Tensor, count: int, capacity: int) -> Tensor:
    """Row of the packed tokens for each choice, (choices,); the row behind all others where none is left."""
    is_chosen = (torch.arange(count, device=chosen.device).unsqueeze(1) == chosen).int()  # (count, choices)
    earlier = (
        is_chosen.cumsum(1).gather(0, chosen.unsqueeze(0)).squeeze(0) - 1
    )  # along rows: columns take ten times as long
    return torch.where(earlier < capacity, chosen * capacity + earlier, count * capacity)


class ExpertBlock(Block):
    """A block with `Experts` in the place of its feed-forward layer."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, count: int) -> None:
        super().__init__(dim, heads, kv_heads, hidden)
        del self.gate, self.up, self.down
        self.experts = Experts(dim, hidden, count)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


class Model(nn.Module):
    def __init__(self, size: str, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes  # by torch's checkpoint, in every block
        dim, layers, heads, kv_heads, hidden, vocabulary = SIZES[size]
        experts = EXPERTS.get(size)
        self.vocabulary = vocabulary
        self.emb = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            Block(dim, heads, kv_heads, hidden)
            if experts is None
            else ExpertBlock(dim, heads, kv_heads, hidden, experts)
            for _ in range(layers)
        )
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(_wide(logits.flatten(0, 1)), targets.flatten())
