"""What the ranks of `run.py` do: each strategy against one process, then the time of its steps. Started by torchrun."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lamina

DIM, LAYERS, VOCABULARY, LENGTH = 256, 8, 128, 32
STEPS = 6
DEVICE = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), *blocks, nn.Linear(DIM, VOCABULARY)).to(DEVICE, dtype)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(number: int) -> Tensor:
    """Two rows a rank."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCABULARY, (2 * dist.get_world_size(), LENGTH), generator=generator).to(DEVICE)


def deviation(strategy: str) -> float:
    """Largest difference of a parameter from one process, after three clipped steps in float64."""
    model, plain = lamina.shard(build(torch.float64), strategy, units=[Block]), build(torch.float64)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    rank = dist.get_rank()
    for number in range(3):
        tokens = batch(number)
        loss_of(model, tokens[2 * rank : 2 * rank + 2]).backward()
        loss_of(plain, tokens).backward()
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    with lamina.gathered(model):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return max(float((p - q).detach().abs().max()) for p, q in pairs)


def time_steps(strategy: str) -> tuple[float, str]:
    """Milliseconds a step in float32, and the strategy and transport as the report names them."""
    model = lamina.shard(build(torch.float32), strategy, units=[Block])
    optimizer, rank = lamina.optim.AdamW(model.parameters(), lr=1e-3), dist.get_rank()
    for number in range(3 + STEPS):
        if number == 3:
            finish()
            started = time.perf_counter()
        loss_of(model, batch(number)[2 * rank : 2 * rank + 2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    finish()
    report = lamina.report(model)
    return (time.perf_counter() - started) / STEPS * 1e3, f"{report.strategy}, {report.transport}"


def finish() -> None:
    """Come to the same point on all ranks, with nothing left to do."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def train_with_a_fault(how: str, strategy: str, told: Path) -> None:
    """The last rank fails in step 4; every other one notes how long it took to hear of it, and what it heard."""
    model = lamina.shard(build(torch.float32), strategy, units=[Block])
    optimizer, rank = lamina.optim.AdamW(model.parameters(), lr=1e-3), dist.get_rank()
    moment = told.with_suffix(".moment")
    try:
        for number in range(12):
            if number == 4 and rank == dist.get_world_size() - 1:
                moment.write_text(str(time.time()))
                if how == "evaluate":
                    with torch.no_grad():
                        model(batch(0)[:2, :-1])
                else:
                    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            loss_of(model, batch(number)[2 * rank : 2 * rank + 2]).backward()
            optimizer.step()
            optimizer.zero_grad()
    except lamina.LaminaError as error:
        seconds = time.time() - float(moment.read_text())
        told.with_suffix(f".{rank}").write_text(json.dumps({"seconds": seconds, "message": str(error)}))
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=["kill", "stop", "evaluate"], default=None)
    parser.add_argument("--strategies", default="zero3,hsdp,ddp")
    parser.add_argument("--gpus", action="store_true", help="over NCCL; ranks may share cards")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.gpus:
        global DEVICE
        DEVICE = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("cuda:nccl,cpu:gloo")
    if options.fault is not None:
        train_with_a_fault(options.fault, options.strategies, options.save)
        return
    rows = []
    for strategy in options.strategies.split(","):
        found = deviation(strategy)
        milliseconds, title = time_steps(strategy)
        rows.append({"strategy": strategy, "deviation": found, "ms": milliseconds, "title": title})
    if dist.get_rank() == 0:
        options.save.write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
