"""Models that are hard to initialise, and a call that materialises one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lamina.runtime.materialise import Materialised, materialise

SEED = 3


def materialise_all(model: nn.Module, seed: int = SEED) -> Materialised:
    return materialise(model, list(model.named_parameters()), "cpu", seed)


class AdaLN(nn.Module):
    """A zero-initialisation written by the parent, after the child's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((6,), 0.5))
        self.out = nn.Linear(6, 12)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


class Rotary(nn.Module):
    def __init__(self, dim: int = 8, length: int = 16) -> None:
        super().__init__()
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        angles = torch.outer(torch.arange(length).float(), inv_freq)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("noise", torch.randn(4))
        self.proj = nn.Linear(dim, dim)


class Owner(nn.Module):
    """One parameter, and a function that initialises it."""

    def __init__(self, init: Callable[[nn.Parameter], object], shape: tuple[int, ...] = (12, 7)) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape))
        init(self.w)


class SmallLanguageModel(nn.Module):
    """In the manner of Hugging Face: one method knows all modules, and the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 8, padding_idx=1)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()
