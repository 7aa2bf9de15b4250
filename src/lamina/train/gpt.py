"""The model of our own: a small GPT over bytes.

Any GPT would do to show sharding; this one learns as much as possible in two minutes on a CPU: bytes need no tokenizer,
rotary positions and normalised queries and keys allow a high learning rate, the output layer begins at zero so that the
first loss is that of a uniform guess (ln 256 = 5.55). What the loop and the checkpoints ask of it is what they ask of
any module: a forward from tokens to logits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, rms_norm, scaled_dot_product_attention

VOCABULARY = 256  # bytes
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT; stands in `gpt.json` beside its weights."""

    width: int
    layers: int
    heads: int
    length: int  # bytes that it sees at most, in training

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Block(nn.Module):
    """Attention, then a feed-forward layer of squared ReLUs; both read a normalised copy and add to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.merge.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        q, k = rotate(q, turns), rotate(k, turns)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(relu(self.up(self.norm2(x))).square())


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes [batch, length] to logits [batch, length, 256]."""
        x = self.embedding(tokens)
        turns = turns_of(tokens.shape[1], self.shape.width // self.shape.heads, x)
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x))


def turns_of(length: int, head_width: int, like: Tensor) -> Tensor:
    """Cosines and sines of every position, [2, length, head_width / 2]."""
    half = head_width // 2
    rates = ROTARY_BASE ** -(torch.arange(half, device=like.device, dtype=torch.float64) / half)
    angles = torch.arange(length, device=like.device, dtype=torch.float64)[:, None] * rates
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Normalised, then turned by its position, pair by pair: [batch, heads, length, head_width]."""
    x = rms_norm(x, x.shape[-1:])
    left, right = x.chunk(2, dim=-1)
    cos, sin = turns
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
