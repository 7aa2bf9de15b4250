"""What wrote a folder or file, by what is in it."""

from __future__ import annotations

from pathlib import Path

from lamina.checkpoint import deepspeed, folders
from lamina.checkpoint.exporting import INDEX
from lamina.checkpoint.foreign import DcpSource, Hints, TorchSource
from lamina.checkpoint.huggingface import HuggingFaceSource
from lamina.checkpoint.manifest import MANIFEST_NAME
from lamina.checkpoint.source import LaminaSource, Source
from lamina.checkpoint.special import refuse_special_inside


def format_of(path: Path) -> str:
    """ "lamina", "hf", "dcp", "torch" or "deepspeed"; "lamina" also where nothing is, for its errors."""
    if (path / MANIFEST_NAME).exists():
        return "lamina"
    if (path / ".metadata").exists():
        return "dcp"
    if path.is_file():
        return "torch"
    if (path / INDEX).exists() or any(
        not file.name.startswith("rank-") for file in path.glob("*.safetensors")
    ):  # ours have lost their manifest
        return "hf"
    return "deepspeed" if deepspeed.folder_of(path) is not None else "lamina"


def open_source(path: Path, rank: int = 0, world: int = 0, hints: Hints | None = None) -> Source:
    """The checkpoint at `path`, as one rank of a world sees it."""
    path, hints = folders.find(path), hints or Hints()
    refuse_special_inside(path)
    kind = format_of(path)
    if kind == "hf":
        return HuggingFaceSource(path)
    if kind == "dcp":
        return DcpSource(path, hints)
    if kind == "deepspeed":
        folder = deepspeed.folder_of(path) or path
        refuse_special_inside(folder)
        return deepspeed.DeepSpeedSource(folder)
    return TorchSource(path, hints) if kind == "torch" else LaminaSource(path, rank, world)
