"""A 10 M-parameter GPT on 2 Gloo ranks: lamina beside FSDP2 and DDP, interleaved in one run.

    python benchmarks/cpu_step/run.py
    python benchmarks/cpu_step/run.py --ranks 4 --dim 768 --layers 6
    python benchmarks/cpu_step/run.py --dim 64 --layers 24 --save benchmarks/cpu_step/results/narrow_two_ranks.json

With 12 layers or more lamina joins small ones; *apart* and *joined* are the same with a unit a block, and FSDP2 with as
many blocks to a unit.

All ways train the same model on the same batches in the same two processes; a round times a few steps of each in turn,
so that a disturbance of the machine hits all alike. Ratios are per round, of time and of CPU time: all threads of a
rank, the larger rank, which counts less of what others do on the machine. Peak memory is the growth of the process's
resident set above what it was before that way's model was built, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import lamina

HEADS, VOCABULARY, LENGTH, BATCH = 8, 256, 128, 4
WAYS = ("lamina", "lamina c10d", "lamina ddp", "fsdp2", "ddp")
DEEP_WAYS = ("lamina apart", "lamina c10d apart", "lamina ddp apart", "fsdp2 joined")
DEEP, DEEP_UNITS = 12, 6


@dataclass(frozen=True)
class Size:
    ranks: int
    dim: int
    layers: int

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS + (DEEP_WAYS if self.layers >= DEEP else ())


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.emb, self.positions = nn.Embedding(VOCABULARY, size.dim), nn.Embedding(LENGTH, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(way: str, size: Size) -> tuple[nn.Module, torch.optim.Optimizer, Callable]:
    torch.manual_seed(0)
    model: nn.Module = GPT(size)
    if way.startswith("lamina"):
        words = way.split()
        model = lamina.shard(
            model,
            "ddp" if "ddp" in words else "zero3",
            transport="c10d" if "c10d" in words else "auto",
            units=["blocks.*"] if "apart" in words else "auto",
        )
        return model, lamina.optim.AdamW(model.parameters(), lr=1e-3), lamina.clip_grad_norm_
    if way.startswith("fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size.ranks,))
        together = size.layers // DEEP_UNITS if way == "fsdp2 joined" else 1
        for first in range(0, size.layers, together):
            fully_shard(list(model.blocks[first : first + together]), mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), nn.utils.clip_grad_norm_


def step_of(way: str, size: Size) -> Callable[[int], float]:
    model, optimizer, clip = build(way, size)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number * size.ranks + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def start(rank: int, folder: str, size: Size) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size.ranks)


def time_ways(rank: int, folder: str, size: Size, rounds: int, steps: int) -> None:
    start(rank, folder, size)
    ways = {way: step_of(way, size) for way in size.ways}
    times: dict[str, list[list[float]]] = {way: [] for way in size.ways}
    losses = {way: [step(number) for number in range(3)] for way, step in ways.items()}
    for _ in range(rounds):
        for way, step in ways.items():
            dist.barrier()
            started = time.perf_counter(), time.process_time()
            for number in range(steps):
                step(number)
            took_s = time.perf_counter() - started[0], time.process_time() - started[1]
            took = torch.tensor(took_s, dtype=torch.float64) * 1e3 / steps
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times[way].append(took.tolist())
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps({"times": times, "losses": losses}))
    dist.destroy_process_group()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory_of(rank: int, folder: str, size: Size, way: str, steps: int) -> None:
    start(rank, folder, size)
    torch.ones(1).add_(1)
    before, peak, done = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident_bytes())

    step = step_of(way, size)
    step(0)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(steps):
        step(number)
    done.set()
    watcher.join()
    (Path(folder) / f"{way}-{rank}").write_text(str(peak[0] - before))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--save", type=Path, default=None)
    options = parser.parse_args()
    size = Size(options.ranks, options.dim, options.layers)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(time_ways, (folder, size, options.rounds, options.steps), nprocs=size.ranks)
        found = json.loads((Path(folder) / "times.json").read_text())
    memory = {}
    for way in size.ways:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(memory_of, (folder, size, way, 6), nprocs=size.ranks)
            memory[way] = max(int((Path(folder) / f"{way}-{rank}").read_text()) for rank in range(size.ranks))
    parameters = sum(p.numel() for p in GPT(size).parameters())
    title = f"{parameters / 1e6:.1f} M parameters, {size.ranks} CPU ranks, {BATCH} x {LENGTH} tokens a rank"
    print(f"{title}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"{'way':>17} {'ms':>8} {'of lamina':>10}  (min - max)   {'CPU ms':>8} {'of lamina':>10}  {'peak MiB':>9}")
    rows = []
    for way in size.ways:
        rounds = zip(found["times"][way], found["times"]["lamina"], strict=True)
        ratios, cpu_ratios = zip(*((t / base, c / base_c) for (t, c), (base, base_c) in rounds), strict=True)
        row = {
            "way": way,
            "ms": statistics.median(t for t, _ in found["times"][way]),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "cpu_ms": statistics.median(c for _, c in found["times"][way]),
            "cpu_ratio": statistics.median(cpu_ratios),
            "peak_mib": memory[way] / 2**20,
            "losses": found["losses"][way],
        }
        rows.append(row)
        print(
            f"{way:>17} {row['ms']:8.1f} {row['ratio']:10.3f}  ({row['ratio_min']:.3f} - {row['ratio_max']:.3f}) "
            f"{row['cpu_ms']:8.1f} {row['cpu_ratio']:10.3f}  {row['peak_mib']:9.1f}"
        )
    if options.save is not None:
        facts = {
            "what": title,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "rows": rows,
        }
        options.save.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
