"""Weights of every architecture of the table go to Hugging Face and back, bit for bit.

Trained and sharded -> `lamina.export` -> `from_pretrained`: the same logits. `save_pretrained` -> `from_pretrained` ->
sharded -> the same logits, and exported again the same tensors. The models that are not of transformers go by their
state dict.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import lamina
from architectures.models import ARCHITECTURES, Architecture
from harness import run_ranks

WORLD = 2
AT_A_TIME = 5
GROUPS = [list(ARCHITECTURES)[first : first + AT_A_TIME] for first in range(0, len(ARCHITECTURES), AT_A_TIME)]
# transformers has other names or shapes for some of their tensors in memory than in files
RENAMED = {"qwen3-moe", "deepseek-v3", "mixtral", "vit", "llava"}
ROUNDING = 1e-5  # of logits: a sharded model computes in the same order, but views may choose other kernels


def there_and_back(names: list[str], folder: str) -> dict[str, list[str]]:
    """What is wrong, by architecture."""
    return {name: _there_and_back(ARCHITECTURES[name], Path(folder, name)) for name in names}


def _there_and_back(entry: Architecture, folder: Path) -> list[str]:
    model = lamina.shard(entry.build(), "zero3")
    train(entry, model)
    expected = entry.build()
    with lamina.gathered(model):
        expected.load_state_dict(model.state_dict())
    expected.eval()
    batch = entry.batch(5, 2)
    wanted = logits_of(expected, batch)
    faults = []

    lamina.export(folder / "ours", model)
    read, problems = opened(expected, folder / "ours")
    faults += problems
    if off := difference(read, batch, wanted):
        faults.append(f"logits of what was exported are off by {off:.0e}")

    write(expected, folder / "theirs")
    other, problems = opened(expected, folder / "theirs")
    faults += problems
    lamina.shard(other, "zero3")
    if (off := difference(other, batch, wanted)) > ROUNDING:
        faults.append(f"logits of what was read and sharded are off by {off:.0e}")
    faults += of_loading(entry, folder / "theirs", batch, wanted)
    lamina.export(folder / "again", other)
    ours, again = tensors_of(folder / "ours"), tensors_of(folder / "again")
    if ours.keys() != again.keys():
        faults.append(f"other names: {sorted(ours.keys() ^ again.keys())}")
    faults += [f"{name} has changed" for name in ours.keys() & again.keys() if not torch.equal(ours[name], again[name])]
    return faults


def of_loading(entry: Architecture, folder: Path, batch: dict[str, Tensor], wanted: Tensor) -> list[str]:
    """What is wrong with a model of other weights into which the folder was read."""
    other = entry.build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    lamina.shard(other, "zero3")
    try:
        lamina.load(folder, other)
    except lamina.errors.CheckpointError as error:
        is_named = entry.name in RENAMED and "from_pretrained" in str(error) and "missing: " in str(error)
        return [] if is_named else [f"loading: {error}"]
    if entry.name in RENAMED:
        return ["the library has named its tensors otherwise, and nobody has seen it"]
    other.eval()
    off = difference(other, batch, wanted)
    return [f"logits of what was loaded are off by {off:.0e}"] if off > ROUNDING else []


def train(entry: Architecture, model: nn.Module) -> None:
    """One step, so that no weight is what its constructor made."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entry.loss(model(**entry.batch(5, 2))).backward()
    optimizer.step()


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        output = model(**batch)
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[no-any-return]


def difference(model: nn.Module, batch: dict[str, Tensor], wanted: Tensor) -> float:
    return float((logits_of(model, batch) - wanted).abs().max())


def opened(like: nn.Module, folder: Path) -> tuple[nn.Module, list[str]]:
    """The model in a folder, as its own library reads it, and what that library complains of."""
    if not hasattr(like, "save_pretrained"):
        read = type(like)()
        read.load_state_dict(tensors_of(folder), strict=False)
        missing = {name for name, _ in like.named_parameters()} - tensors_of(folder).keys()
        return read.eval(), [f"{name} is not in the folder" for name in sorted(missing)]
    transformers = importlib.import_module("transformers")
    library = getattr(transformers, type(like).__name__)
    read, told = library.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    problems = [f"{kind}: {sorted(map(str, keys))}" for kind, keys in told.items() if keys]
    return read.eval(), problems


def write(model: nn.Module, folder: Path) -> None:
    """The model as its own library writes it."""
    if dist.get_rank() == 0:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)  # type: ignore[operator]
        else:
            save_model = importlib.import_module("safetensors.torch").save_model
            folder.mkdir(parents=True)
            save_model(model, str(folder / "model.safetensors"))
    dist.barrier()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_weights_go_to_hugging_face_and_back(names: list[str], tmp_path: Path) -> None:
    for found in run_ranks(WORLD, there_and_back, names, str(tmp_path), timeout=180):
        assert not any(found.values()), {name: faults for name, faults in found.items() if faults}
