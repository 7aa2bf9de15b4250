"""Do models of other libraries train sharded as they train alone? Against one process, on CPUs or GPUs.

    torchrun --nproc-per-node 2 benchmarks/libraries/run.py [--save FILE] [NAME ...]

Each case builds a small model twice, from one seed. Three steps of AdamW, clipped, on every rank's part of a batch are
compared with the same steps on the whole batch: the largest difference of a parameter, in float64 unless the case says
otherwise. A library that is not there is named; none of them is a dependency of lamina.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lamina

STEPS, ROWS, WORDS, CLASSES = 3, 2, 97, 10  # ROWS of a rank
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())  # ranks may share one
Part = Callable[[Tensor], Tensor]  # what of a batch a model sees
Loss = Callable[[nn.Module, int, Part], Tensor]  # model, number of the step


def whole(batch: Tensor) -> Tensor:
    return batch


def own(batch: Tensor) -> Tensor:
    return batch.view(dist.get_world_size(), -1, *batch.shape[1:])[dist.get_rank()]


def drawn(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def rows() -> int:
    return ROWS * dist.get_world_size()


def words(step: int, length: int = 16) -> Tensor:
    return torch.randint(0, WORDS, (rows(), length), generator=drawn(step)).to(DEVICE)


def numbers(step: int, *shape: int) -> Tensor:
    return torch.randn(rows(), *shape, generator=drawn(step), dtype=torch.float64).to(DEVICE)


def labels() -> Tensor:
    return torch.arange(rows(), device=DEVICE) % CLASSES


@dataclass
class Case:
    """One model, and how it is trained."""

    build: Callable[[], nn.Module]
    loss: Loss
    shard: dict[str, Any] = field(default_factory=dict)
    alone: Callable[[], nn.Module] | None = None  # the model of one process, where it is another
    before_step: Callable[[nn.Module, nn.Module], None] | None = None
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW

    def run(self) -> float:
        """Largest difference of a parameter after three steps."""
        torch.manual_seed(0)
        model = lamina.shard(self.build().to(DEVICE), **self.shard)
        torch.manual_seed(0)
        alone = (self.alone or self.build)().to(DEVICE)
        models = ((model, own), (alone, whole))
        start = {name: parameter.detach().clone() for name, parameter in alone.named_parameters()}
        optimizers = [self.kind([p for p in m.parameters() if p.requires_grad], lr=1e-3) for m, _ in models]
        for step in range(STEPS):
            if self.before_step is not None:
                self.before_step(model, alone)
            for (each, part), optimizer in zip(models, optimizers, strict=True):
                self.loss(each, step, part).backward()
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        wanted = dict(alone.named_parameters())
        assert any((wanted[name] - start[name]).abs().max() > 1e-4 for name in start), "nothing was trained"
        with lamina.gathered(model):
            return max(float((p - wanted[name]).detach().abs().max()) for name, p in model.named_parameters())


# ---- transformers, peft -------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    ).double()


def llama_recomputed() -> nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable()
    return model


def with_lora(model: Any, **choices: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, **choices))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, which would hide the gradients of the other factor
            nn.init.normal_(parameter, std=0.1)
    return model


def recomputed_with_lora() -> nn.Module:
    model: Any = llama_recomputed()
    model.enable_input_require_grads()
    return with_lora(model, target_modules="all-linear")


def of_language(model: Any, step: int, part: Part) -> Tensor:
    tokens = part(words(step))
    return model(input_ids=tokens, labels=tokens).loss


def generates_the_same(model: Any, alone: Any) -> None:
    """Both with a cache, greedily."""
    prompt = words(9, 5)
    how = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "attention_mask": torch.ones_like(prompt)}
    found, wanted = (each.generate(prompt, pad_token_id=0, **how) for each in (model, alone))
    assert torch.equal(found, wanted), f"generated {found.tolist()}, not {wanted.tolist()}"


# ---- timm, torchvision --------------------------------------------------------------------------------------------


def timm_model(name: str, is_recomputed: bool = False, **choices: Any) -> nn.Module:
    timm = importlib.import_module("timm")
    model = timm.create_model(name, num_classes=CLASSES, **choices).double()
    if is_recomputed:
        model.set_grad_checkpointing()
    return model


def vit(is_recomputed: bool = False) -> nn.Module:
    return timm_model("vit_tiny_patch16_224", is_recomputed, img_size=32, depth=3)


def swin() -> nn.Module:
    return timm_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1, 1, 1), drop_path_rate=0.0)


def resnet() -> nn.Module:
    return importlib.import_module("torchvision").models.resnet18(num_classes=CLASSES).double()


def resnet_in_channels_last() -> nn.Module:
    return resnet().to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]


def convnext() -> nn.Module:
    models = importlib.import_module("torchvision").models
    return models.convnext_tiny(num_classes=CLASSES, stochastic_depth_prob=0.0).double()


def of_images(size: int, memory_format: torch.memory_format = torch.contiguous_format) -> Loss:
    def loss(model: nn.Module, step: int, part: Part) -> Tensor:
        images = part(numbers(step, 3, size, size)).contiguous(memory_format=memory_format)
        return F.cross_entropy(model(images), part(labels()))

    return loss


# ---- e3nn, torch_geometric, Lightning, Accelerate -----------------------------------------------------------------


def equivariant() -> nn.Module:
    o3 = importlib.import_module("e3nn.o3")
    return nn.Sequential(o3.Linear("4x0e+4x1o", "8x0e+4x1o"), o3.Linear("8x0e+4x1o", "8x0e")).double()


class Graphs(nn.Module):
    """Two graph convolutions over a ring of four nodes, one graph at a time: several forwards in one backward."""

    def __init__(self) -> None:
        super().__init__()
        convolution = importlib.import_module("torch_geometric.nn").GCNConv
        self.first, self.second = convolution(8, 16), convolution(16, 4)

    def forward(self, nodes: Tensor) -> Tensor:
        edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]], device=nodes.device)
        return torch.stack([self.second(F.relu(self.first(one, edges)), edges) for one in nodes])


def of_squares(*shape: int) -> Loss:
    return lambda model, step, part: model(part(numbers(step, *shape))).pow(2).mean()


class Handed:
    """A loss whose backward another library starts."""

    def __init__(self, loss: Tensor, backward: Callable[[Tensor], None]) -> None:
        self.loss, self._backward = loss, backward

    def backward(self) -> None:
        self._backward(self.loss)


def by_fabric(model: nn.Module, step: int, part: Part) -> Any:
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator=DEVICE.type, devices=1)
    return Handed(of_language(model, step, part), fabric.backward)


def by_accelerate(model: nn.Module, step: int, part: Part) -> Any:
    return Handed(of_language(model, step, part), importlib.import_module("accelerate").Accelerator().backward)


CASES: dict[str, Case] = {
    "transformers: Llama": Case(llama, of_language),
    "transformers: Llama over peers": Case(llama, of_language, {"transport": "peer"}),
    "transformers: Llama, its own checkpointing": Case(llama_recomputed, of_language),
    "transformers: Llama, generates between steps": Case(llama, of_language, before_step=generates_the_same),
    "peft: LoRA on two projections": Case(lambda: with_lora(llama(), target_modules=["q_proj", "v_proj"]), of_language),
    "peft: LoRA everywhere, checkpointing": Case(recomputed_with_lora, of_language),
    "timm: ViT": Case(vit, of_images(32)),
    "timm: ViT, its own checkpointing": Case(lambda: vit(True), of_images(32)),
    "timm: Swin": Case(swin, of_images(56)),
    "torchvision: ResNet-18, channels last": Case(resnet_in_channels_last, of_images(64, torch.channels_last)),
    "torchvision: ResNet-18, SyncBatchNorm": Case(
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(resnet()), of_images(64), alone=resnet, kind=torch.optim.SGD
    ),
    "torchvision: ConvNeXt": Case(convnext, of_images(64)),
    "e3nn: equivariant layers": Case(equivariant, of_squares(16)),
    "torch_geometric: graph convolutions": Case(Graphs, of_squares(4, 8)),
    "lightning: Fabric's backward": Case(llama, by_fabric),
    "accelerate: its backward": Case(llama, by_accelerate),
}


def tried(case: Case) -> str:
    try:
        return f"{case.run():.1e}"
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of cases' names")
    parser.add_argument("--save", type=Path, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cuda:nccl,cpu:gloo" if DEVICE.type == "cuda" else "gloo")
    rows_found = []
    for name, case in CASES.items():
        if options.names and not any(part in name for part in options.names):
            continue
        began = time.perf_counter()
        found: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(found, tried(case))
        rows_found.append({"case": name, "deviation": found})
        if dist.get_rank() == 0:
            print(f"{name:46} {time.perf_counter() - began:5.1f} s  {', '.join(sorted(set(found)))}", flush=True)
    if options.save is not None and dist.get_rank() == 0:
        card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
        facts = {"device": card, "torch": torch.__version__, "ranks": dist.get_world_size(), "rows": rows_found}
        options.save.write_text(json.dumps(facts, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
