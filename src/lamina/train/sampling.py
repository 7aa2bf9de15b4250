"""Text from a model in training, by whole forwards. Every rank takes part and draws the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lamina.train.objective import NextToken, evaluating


class Codec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Words:
    """A Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)


def sample(
    objective: NextToken,
    codec: Codec,
    prompt: str,
    count: int,
    length: int,
    device: torch.device,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """The prompt and `count` tokens after it; the model sees at most the last `length`. Collective."""
    generator = torch.Generator().manual_seed(seed)
    tokens = codec.encode(prompt) or codec.encode("\n") or [0]
    with evaluating(objective.model):
        for _ in range(count):
            window = torch.tensor(tokens[-length:], device=device).view(1, -1)
            logits = objective.logits(window)[0, -1].double().cpu()
            chances = torch.softmax(logits / max(temperature, 1e-6), dim=-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return codec.decode(tokens)
