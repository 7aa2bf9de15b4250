"""Host time of one fused AdamW step, and of clipping, over 300 small parameters: torch's and lamina's.

    torchrun --nproc-per-node 2 benchmarks/host_overhead/optimizer.py            # prints the table
    torchrun --nproc-per-node 2 benchmarks/host_overhead/optimizer.py --write    # replaces results/optimizer.md

Under plain python it is one rank, which holds all elements. README.md says what is measured.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Dim

import lamina
from lamina.core.shard_tensor import Shard
from lamina.optim import AdamW, clip_grad_norm_

RESULTS = Path(__file__).parent / "results" / "optimizer.md"
BLOCKS, PARAMETERS_PER_BLOCK = 30, 10
DIM = 16


class Block(nn.Module):
    """Six matrices and four vectors, as in a transformer block; tiny, so that the host is what counts."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM) / DIM) for _ in range(6))
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(DIM)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x @ matrix
        for vector in self.vectors:
            x = x + vector
        return x


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def groups_of(params: list[Tensor]) -> list[dict]:
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


@dataclass
class Contestant:
    name: str
    step: Callable[[], object]
    clip: Callable[[], object]


def contestants() -> list[Contestant]:
    """The same shapes four times; plain tensors hold as many elements as one rank's Shards."""
    world = dist.get_world_size()
    sharded_model = lamina.shard(model_of(), units=[Block])
    sharded_model(torch.ones(2, DIM)).sum().backward()
    sharded = list(sharded_model.parameters())
    for param in sharded:  # what came through 180 products is denormal, and slow to calculate with
        assert param.grad is not None
        param.grad.normal_()
    plain: list[Tensor] = []
    for param in sharded:  # dim 0 cut, so that matrices stay matrices
        part = nn.Parameter(torch.randn(max(param.shape[0] // world, 1), *param.shape[1:]))
        part.grad = torch.randn_like(part)
        plain.append(part)
    found = [_of("torch, plain tensors", torch.optim.AdamW(groups_of(plain), fused=True), plain)]
    where = "Shards" if isinstance(sharded[0], Shard) else "plain (one rank)"
    found.append(_of(f"torch, {where}", torch.optim.AdamW(groups_of(sharded), fused=True), sharded))
    ours = AdamW(groups_of(sharded))
    # the closure holds the model: without it nobody would know where its parameters lie
    found.append(Contestant(f"lamina, {where}", ours.step, lambda: clip_grad_norm_(sharded_model, 1.0)))
    mesh = dist.init_device_mesh("cpu", (world,))
    spread: list[Tensor] = []
    for param in sharded:
        value = nn.Parameter(distribute_tensor(torch.randn(param.shape), mesh, [Dim(0)]))
        value.grad = distribute_tensor(torch.randn(param.shape), mesh, [Dim(0)])
        spread.append(value)
    assert isinstance(spread[0], DTensor)
    found.append(_of("torch, DTensors", torch.optim.AdamW(groups_of(spread), fused=True), spread))
    assert all(len(list(params)) == BLOCKS * PARAMETERS_PER_BLOCK for params in (sharded, plain, spread))
    return found


def _of(name: str, optimizer: torch.optim.Optimizer, params: list[Tensor]) -> Contestant:
    return Contestant(name, optimizer.step, lambda: nn.utils.clip_grad_norm_(params, 1.0))


def measure(rounds: int, calls: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds a call, a number per round: each round visits every contestant, in turn from either end."""
    entries = [(c.name, what, getattr(c, what)) for c in contestants() for what in ("step", "clip")]
    for _, _, call in entries:
        for _ in range(3):
            call()
    times: dict[tuple[str, str], list[float]] = {(name, what): [] for name, what, _ in entries}
    for number in range(rounds):
        for name, what, call in entries if number % 2 == 0 else reversed(entries):
            dist.barrier()
            each = []
            for _ in range(calls):
                start = time.thread_time()
                call()
                each.append(time.thread_time() - start)
            times[name, what].append(statistics.median(each) * 1000)
    return times


def table(times: dict[tuple[str, str], list[float]], world: int, command: str) -> str:
    first = next(iter(times))[0]
    lines = [
        f"`{command}`: {world} rank(s), torch {torch.__version__}, Python {platform.python_version()}, "
        f"{_processor()}, one thread a rank; shared machine.",
        "",
        "| 300 parameters | AdamW step, ms | to plain | clip, ms | to plain |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(name for name, _ in times):
        cells = []
        for what in ("step", "clip"):
            mine, base = times[name, what], times[first, what]
            ratios = sorted(a / b for a, b in zip(mine, base, strict=True))
            cells.append(f"{statistics.median(mine):.2f} ({min(mine):.2f}-{max(mine):.2f})")
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="replace results/optimizer.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    launcher = f"torchrun --nproc-per-node {world}" if dist.is_torchelastic_launched() else "python"
    command = f"{launcher} benchmarks/host_overhead/optimizer.py --rounds {arguments.rounds} --calls {arguments.calls}"
    text = table(measure(arguments.rounds, arguments.calls), world, command)
    if dist.get_rank() == 0:
        print(text)
        if arguments.write:
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text("# Host time of the optimizer\n\n" + text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
