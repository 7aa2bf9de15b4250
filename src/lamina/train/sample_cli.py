"""`lamina sample`: text from a run's result, on one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from lamina.errors import LaminaError
from lamina.runtime.api import shard
from lamina.train.export import find_gpt, read_gpt
from lamina.train.lora import ADAPTER_FILE, read_adapter, read_adapter_config
from lamina.train.objective import NextToken
from lamina.train.pretrained import Pretrained, fill, open_pretrained
from lamina.train.sampling import Bytes, Codec, Words, sample


@dataclass(frozen=True)
class Command:
    """Let a trained model write."""

    folder: tyro.conf.Positional[str]
    """of a run, or of a Hugging Face model"""
    prompt: str = "def "
    """what it goes on from"""
    tokens: int = 300
    temperature: float = 0.7
    """0: always the likeliest token"""
    seed: int = 0


def main(argv: Sequence[str]) -> int:
    """`lamina sample ...`; the exit code."""
    command = tyro.cli(Command, args=list(argv), prog="lamina sample")
    try:
        print(written(command))
    except LaminaError as error:
        print(f"lamina sample: {error}", file=sys.stderr)
        return 1
    return 0


def _opened(folder: Path) -> Pretrained:
    """A model of the hub, or an adapter on the model that it names."""
    adapter = next((f for f in (folder, folder / "adapter") if (f / ADAPTER_FILE).is_file()), None)
    base, rank = (str(folder), None) if adapter is None else read_adapter_config(adapter)
    opened = open_pretrained(base, rank, 0, "fp32")
    shard(opened.model, "ddp", start="trust")
    fill(opened)
    if adapter is not None:
        read_adapter(adapter, opened.model)
    return opened


def written(command: Command) -> str:
    folder = Path(command.folder).expanduser()
    own = find_gpt(folder)
    codec: Codec
    if own is not None:
        model = read_gpt(own)
        objective, codec, length = NextToken(model), Bytes(), model.shape.length
    else:
        opened = _opened(folder)
        objective, codec, length = NextToken(opened.model), Words(opened.tokenizer), 1024
    cpu = torch.device("cpu")
    return sample(objective, codec, command.prompt, command.tokens, length, cpu, command.temperature, command.seed)
