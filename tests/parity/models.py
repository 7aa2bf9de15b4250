"""Small float64 models that the parity tests train.

Sizes are odd on purpose: no parameter is a multiple of the layout's alignment, so every segment has padding, and ranges
of ranks begin and end inside parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 37
WIDTH = 12
HIDDEN = 27
LENGTH = 5
UNITS = ["embedding", "blocks.*", "head"]  # the final norm is left to the root


class Block(nn.Module):
    """Pre-norm residual block; attention over the sequence without heads."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (samples, length, width)
        y = self.norm(x)
        scores = torch.softmax(y @ self.mix(y).transpose(-1, -2), dim=-1)
        return x + self.down(torch.tanh(self.up(scores @ y)))


class LanguageModel(nn.Module):
    """Embedding, equal blocks, norm, head. `checkpointing`: torch's own checkpoint around blocks, by the user."""

    def __init__(self, blocks: int = 3, checkpointing: str = "none") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:  # (samples, length) -> (samples, length, vocabulary)
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def language_batch(seed: int, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)


def build(checkpointing: str = "none", blocks: int = 3, seed: int = 0) -> LanguageModel:
    """The language model in float64, the same at every call with the same seed."""
    torch.manual_seed(seed)
    return LanguageModel(blocks, checkpointing).double()
