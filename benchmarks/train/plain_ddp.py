"""What a loop over torch's DistributedDataParallel needs for the job of `lamina train`: memory and speed, no quality.

    torchrun --standalone --nproc-per-node 2 benchmarks/train/plain_ddp.py FOLDER --length 256 --batch 2 [--steps 12]

Same model, length and batch (sequences of all ranks together), fp32 masters; on GPUs bf16 by autocast, a fused AdamW,
clipping at 1. Tokens are drawn at random: neither depends on them. Prints one JSON line, of the rank that has most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

WARM = 4  # steps that are not timed


def used_bytes(device: torch.device) -> int:
    """As `lamina train` counts it: reserved by the allocator, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32).to(device)
    model.train()
    wrapped = DistributedDataParallel(model, device_ids=[device] if on_gpu else None, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.1, fused=on_gpu)
    draw = torch.Generator().manual_seed(rank)
    begin = 0.0
    for step in range(given.steps):
        if step == WARM:
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
        tokens = torch.randint(0, 1000, (given.batch // world, given.length), generator=draw).to(device)
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            loss = wrapped(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
    took_s = time.perf_counter() - begin
    most = torch.tensor(used_bytes(device), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        tokens_per_s = (given.steps - WARM) * given.batch * given.length / took_s
        print(json.dumps({"way": "plain DDP", "tokens_per_s": round(tokens_per_s), "memory_bytes": int(most)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
