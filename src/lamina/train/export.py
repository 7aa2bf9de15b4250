"""The result of a run as a folder that others read, from a sharded model; collective, written by rank 0."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from lamina.errors import UsageError
from lamina.runtime.access import full_value
from lamina.train.gpt import GPT, Shape
from lamina.train.lora import Rank, adapter_parameters, write_adapter
from lamina.train.pretrained import Pretrained

GPT_FILE = "gpt.json"


def whole_state(named: Iterable[tuple[str, Tensor]], rank: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Whole values on rank 0, on the CPU; the other ranks take part and keep nothing. One tensor at a time."""
    state = {}
    for name, tensor in named:
        full = full_value(tensor)
        if rank == 0:
            wanted = dtype if dtype is not None and full.is_floating_point() else full.dtype
            state[name] = full.to("cpu", wanted, copy=True)
    return state


def write_gpt(folder: Path, state: dict[str, Tensor], shape: Shape) -> None:
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors")
    (folder / GPT_FILE).write_text(json.dumps(shape.as_dict(), indent=2) + "\n")


def find_gpt(path: Path) -> Path | None:
    """The folder of a small GPT in `path`, or in its result."""
    return next((f for f in (path, path / "model") if (f / GPT_FILE).is_file()), None)


def read_gpt(folder: Path) -> GPT:
    """A whole GPT; `UsageError` for a folder that is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        shape = Shape(**json.loads((folder / GPT_FILE).read_text()))
        model = GPT(shape)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as problem:
        raise UsageError(f"{folder} holds no whole model: {str(problem).splitlines()[0]}") from None
    return model


def hugging_face_state(opened: Pretrained, model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Parameters under all their names but ties, and persistent buffers, in the dtype of the original files."""
    buffers = {name for name, _ in model.named_buffers()}
    named = list(model.named_parameters())
    named += [(n, t) for n, t in model.state_dict(keep_vars=True).items() if n in buffers]
    return whole_state(named, rank, opened.dtype)


def write_hugging_face(folder: Path, opened: Pretrained, state: dict[str, Tensor]) -> None:
    """What transformers loads: weights, configuration, tokenizer."""
    opened.model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
    opened.tokenizer.save_pretrained(folder)


def adapter_state(model: nn.Module, rank: int) -> dict[str, Tensor]:
    return whole_state(adapter_parameters(model), rank, None)


def write_lora(folder: Path, opened: Pretrained, state: dict[str, Tensor], rank: Rank) -> None:
    local = Path(opened.name).expanduser()
    base = str(opened.folder.absolute()) if local.is_dir() else opened.name  # a name of the hub is good anywhere
    write_adapter(folder, state, opened.model, rank, opened.adapted, base)
    opened.tokenizer.save_pretrained(folder)
