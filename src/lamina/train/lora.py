"""Low-rank adapters (LoRA, arXiv:2106.09685), with PEFT's names on disk.

`peft` wraps the model and renames every weight, so that neither checkpoints of the base nor its units fit any more.
Here an adapted layer keeps its weight under its own name and gains two small matrices beside it; only the files are
PEFT's: `adapter_config.json` and `adapter_model.safetensors` in a folder that `PeftModel.from_pretrained` reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lamina.errors import UsageError

ADAPTER_FILE = "adapter_config.json"
READ_BY_KERNELS = {"x_proj", "dt_proj", "out_proj"}
EXPERT_LAYERS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Rank:
    r: int
    alpha: int

    @property
    def scale(self) -> float:
        return self.alpha / self.r


def read_rank(text: str) -> Rank:
    """ "r=16" or "r=16,alpha=32"; alpha is twice r if it is left out."""
    if not re.fullmatch(r"r=\d+(,alpha=\d+)?", text) or "r=0" in text.split(","):
        raise UsageError(f"lora={text!r}: write r=16, or r=16,alpha=32")
    values = dict(part.split("=") for part in text.split(","))
    return Rank(int(values["r"]), int(values.get("alpha", 2 * int(values["r"]))))


class LowRank(nn.Module):
    """A linear layer, frozen, plus scale x B A; `weight` and `bias` stay the layer's own."""

    def __init__(self, layer: nn.Module, rank: Rank) -> None:
        super().__init__()
        self.transposed = not isinstance(layer, nn.Linear)  # GPT-2's Conv1D holds [inputs, outputs]
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
        self.weight, self.bias = weight, bias
        outputs, inputs = weight.shape[::-1] if self.transposed else weight.shape
        self.scale = rank.scale
        self.lora_A = nn.Linear(inputs, rank.r, bias=False, dtype=self.weight.dtype)
        self.lora_B = nn.Linear(rank.r, outputs, bias=False, dtype=self.weight.dtype)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)  # so that training begins at the model as it is

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        return nn.functional.linear(x, weight, self.bias) + self.lora_B(self.lora_A(x)) * self.scale


def add_adapters(model: nn.Module, head: nn.Module | None, rank: Rank) -> list[str]:
    """Freeze the model and put an adapter beside every linear layer but the head; the names of the adapted layers."""
    model.requires_grad_(False)
    alone = _left_alone(model)
    found = [(name, m) for name, m in model.named_modules() if _is_linear(m) and m is not head and name not in alone]
    if not found:
        raise UsageError(f"lora: {type(model).__name__} has no linear layer to adapt")
    for name, layer in found:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, LowRank(layer, rank))
    return [name for name, _ in found]


def _left_alone(model: nn.Module) -> set[str]:
    """Layers whose adapter would do nothing, or mean something else to PEFT.

    Mamba's kernels read weights past the layer's forward. Where the experts' weights are one parameter each, PEFT takes
    the old names of their layers, wherever they stand, for these parameters.
    """
    fused = any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())
    found = set()
    for name, _ in model.named_modules():
        parent, _, last = name.rpartition(".")
        in_kernel = last in READ_BY_KERNELS and "Mamba" in type(model.get_submodule(parent)).__name__
        if in_kernel or (fused and last in EXPERT_LAYERS):
            found.add(name)
    return found


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """With PEFT's names."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            yield PEFT_PREFIX + name, parameter


def write_adapter(
    folder: Path, state: dict[str, Tensor], model: nn.Module, rank: Rank, layers: list[str], base: str
) -> None:
    """What PEFT reads. `state` holds whole tensors, under PEFT's names."""
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in state.items()}, folder / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank.r,
        "lora_alpha": rank.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "fan_in_fan_out": any(isinstance(m, LowRank) and m.transposed for m in model.modules()),
        "inference_mode": True,
    }
    (folder / ADAPTER_FILE).write_text(json.dumps(description, indent=2) + "\n")


def read_adapter_config(folder: Path) -> tuple[str, Rank]:
    """The model that an adapter of ours adapts, and its rank; `UsageError` for a damaged file."""
    try:
        told = json.loads((folder / ADAPTER_FILE).read_text())
        return str(told["base_model_name_or_path"]), Rank(int(told["r"]), int(told["lora_alpha"]))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UsageError(f"{folder / ADAPTER_FILE} is damaged: {problem!r}") from None


def read_adapter(folder: Path, model: nn.Module) -> None:
    """Copy an adapter's two matrices a layer into a model that has been given them, every parameter whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            for name, parameter in adapter_parameters(model):
                parameter.copy_(state[name])
    except (OSError, SafetensorError, KeyError, RuntimeError) as problem:
        raise UsageError(f"{folder} holds no adapter of this model: {str(problem).splitlines()[0]}") from None


def merged(layer: LowRank, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The weight of a plain layer that does the same, from whole tensors."""
    delta = (b @ a) * layer.scale
    return weight + (delta.t() if layer.transposed else delta)
