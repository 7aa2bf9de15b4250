"""The jobs of DeepSpeed that left the folders in deepspeed_folders/, and the model that the tests load them into.

    pip install deepspeed                    # 0.19.8, with torch 2.13 on CPUs; DS_ACCELERATOR=cpu
    torchrun --nproc-per-node 2 tests/checkpoint/deepspeed_job.py zero3
    torchrun --nproc-per-node 2 tests/checkpoint/deepspeed_job.py zero1_bf16
    torchrun --nproc-per-node 3 tests/checkpoint/deepspeed_job.py zero2

Files that a test writes after a description show that the description was read. These are a real job's: sub-groups,
an optimizer with two groups, tied and frozen parameters, lengths that the number of ranks does not divide. Beside each
lie `wanted.pt`, what DeepSpeed's own zero_to_fp32 makes of it, and the losses of the job's next three steps.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

FOLDERS = Path(__file__).parent / "deepspeed_folders"
VOCABULARY, STEPS, MORE = 23, 3, 3
_ZERO: dict[str, dict[str, Any]] = {
    "zero1_bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "zero2": {"zero_optimization": {"stage": 2}},
    # sub-groups as a model of more than a billion elements has them
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 50}},
}


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.up, self.norm, self.down = nn.Linear(10, 13), nn.LayerNorm(13), nn.Linear(13, 10, bias=False)
        self.fixed, self.back = nn.Linear(10, 7).requires_grad_(False), nn.Linear(7, 10)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(10, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor([seed + 3, 1]))
        self.register_buffer("not_kept", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(self.norm(self.up(x)))
        return self.head(x + self.back(torch.tanh(self.fixed(x))) * self.scale)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}
    return [{"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1}, vectors]


def loss_of(model: nn.Module, step: int, batch: int) -> Tensor:
    """Of one batch; a step of the job has one for each of its ranks."""
    drawn = torch.Generator().manual_seed(100 * step + batch)
    tokens = torch.randint(0, VOCABULARY, (4, 6), generator=drawn)
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def main(kind: str) -> None:
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    model = Model(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_ZERO[kind],
    }
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, eps=1e-6)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step_once(step: int) -> float:
        loss = loss_of(engine, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        return loss.item()

    for step in range(STEPS):
        step_once(step)
    folder = FOLDERS / kind
    shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(folder), client_state={"epoch": 2})
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, [step_once(step) for step in range(STEPS, STEPS + MORE)])
    if dist.get_rank() == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            values = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        kept = {name: value.clone() for name, value in values.items()}  # not what else lies in the same memory
        torch.save({"values": kept, "losses": losses}, folder / "wanted.pt")
        for script in folder.glob("zero_to_*.py"):
            script.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
