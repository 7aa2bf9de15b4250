"""Thousands of small steps while ranks and lanes are held up at random, in debug mode: no wrong number, no hang.

    python benchmarks/soak/run.py [--steps 2000] [--ways zero3-c10d,zero3-peer,hsdp-c10d] [--device cuda]

On GPUs lanes are stalled, too. Where there are more ranks than cards they share these, if the switches of
tests/gpu/cards.py are set.

Between steps happens what users do: forwards that evaluate, weights swapped for their moving average and back, a state
loaded, weights edited, gradients given up, other learning rates, several micro-batches. The same happens to a plain
model on the whole batch in the same process, in float64.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from lamina.runtime.assemble import RUNTIMES

DIM = 24
LONGEST_DELAY_S = 0.02
LONGEST_STALL_CYCLES = 20_000_000  # of a GPU lane, about 10 ms
COMPARE_EVERY = 50
TOLERANCE = 1e-10  # of losses and parameters
ACTIONS = ("evaluate", "average", "swap", "save", "load", "edit", "give up", "rate")
RANKS = {"zero3": 2, "zero1": 2, "hsdp": 4}
SHARING = ("NCCL_MULTI_RANK_GPU_ENABLE", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")  # of a card by several ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, DIM), *[Block() for _ in range(4)], nn.Linear(DIM, 4)).double().to(device)


class HoldUps:
    """Delays of this rank, its own, and on a GPU of its lanes."""

    def __init__(self, model: nn.Module, seed: int, device: str) -> None:
        self.random, self.on_gpu, self.count, self.seconds = random.Random(seed), device == "cuda", 0, 0.0
        self.lanes = [RUNTIMES[model].engine.lanes.gather, RUNTIMES[model].engine.lanes.reduce]
        for module in model:
            module.register_forward_pre_hook(lambda *_: self.maybe())
            module.register_full_backward_hook(lambda *_: self.maybe())

    def maybe(self) -> None:
        if self.random.random() > 0.02:
            return
        self.count += 1
        if self.on_gpu and self.random.random() < 0.5:
            with self.random.choice(self.lanes).running():
                torch.cuda._sleep(self.random.randrange(LONGEST_STALL_CYCLES))
        else:
            seconds = self.random.uniform(0, LONGEST_DELAY_S)
            self.seconds += seconds
            time.sleep(seconds)


class Job:
    """One model with its optimizer, moving average and saved state; the sharded one or the plain one."""

    def __init__(self, model: nn.Module, rank: int | None) -> None:
        self.model, self.rank = model, rank  # None: the whole batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.average = [p.detach().clone() for p in model.parameters()]
        self.saved = copy.deepcopy(model.state_dict())

    def step(self, data: Tensor, micro_batches: int, gives_up: bool) -> float:
        total = 0.0
        for number, part in enumerate(data.chunk(micro_batches)):
            mine = part if self.rank is None else part.chunk(dist.get_world_size())[self.rank]
            if self.rank is None:
                loss = self.model(mine).pow(2).mean() / micro_batches
                loss.backward()
            else:
                with lamina.accumulate(self.model, last=number == micro_batches - 1):
                    loss = self.model(mine).pow(2).mean() / micro_batches
                    loss.backward()
            total += float(loss.detach())
        if gives_up:
            self.optimizer.zero_grad()
            return total
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def do(self, action: str, number: int, data: Tensor) -> float:
        """An action between steps; what an evaluation gives."""
        params = list(self.model.parameters())
        with torch.no_grad():
            if action == "evaluate":
                mine = data if self.rank is None else data.chunk(dist.get_world_size())[self.rank]
                return float(self.model(mine).pow(2).mean())
            if action == "average":
                for mean, param in zip(self.average, params, strict=True):
                    mean.lerp_(param, 0.1)
            elif action == "swap":
                for mean, param in zip(self.average, params, strict=True):
                    kept = param.detach().clone()
                    param.copy_(mean)
                    mean.copy_(kept)
            elif action == "save":
                self.saved = copy.deepcopy(self.model.state_dict())
            elif action == "load":
                self.model.load_state_dict(self.saved)
            elif action == "edit":
                params[number % len(params)].mul_(0.9)
            elif action == "rate":
                for group in self.optimizer.param_groups:
                    group["lr"] = 1e-3 * (1 + number % 3)
        return 0.0


def soak(rank: int, world: int, folder: str, way: str, steps: int, device: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    strategy, transport = way.split("-")
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard")) if strategy == "hsdp" else None
    lamina.debug(True)
    choices: dict[str, Any] = {"units": [Block], "recompute": 2, "slots": 2}
    model = lamina.shard(build(device), strategy, mesh, transport=transport, **choices)
    hold_ups = HoldUps(model, rank, device)
    sharded, plain = Job(model, rank), Job(build(device), None)
    drawn, worst, actions, started = random.Random(1), 0.0, dict.fromkeys(ACTIONS, 0), time.perf_counter()
    for number in range(steps):
        data = torch.randn(4 * world, 8, generator=torch.Generator().manual_seed(number)).double().to(device)
        action = drawn.choice(ACTIONS) if drawn.random() < 0.4 else ""
        micro_batches = drawn.choice((1, 1, 2))
        losses = [job.step(data, micro_batches, action == "give up") for job in (sharded, plain)]
        if action:
            actions[action] += 1
        both = [job.do(action, number, data) for job in (sharded, plain)]
        mean = torch.tensor([losses[0], both[0]], dtype=torch.float64)
        dist.all_reduce(mean)
        found = [abs(float(value) / world - wanted) for value, wanted in zip(mean, (losses[1], both[1]), strict=True)]
        if number % COMPARE_EVERY == COMPARE_EVERY - 1:
            with lamina.gathered(model):
                pairs = list(zip(model.parameters(), plain.model.parameters(), strict=True))
                found += [float((p.detach() - q.detach()).abs().max()) for p, q in pairs]
        worst = max(worst, *found)
        hold_ups.maybe()
    result = {
        "way": way, "ranks": world, "steps": steps, "worst": worst, "actions": actions, "hold_ups": hold_ups.count,
        "seconds_held_up": round(hold_ups.seconds, 1), "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    Path(folder, f"result-{rank}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def check_cards(way: str, world: int) -> None:
    cards = torch.cuda.device_count()
    missing = [f"{name}=1" for name in SHARING if os.environ.get(name) != "1"]
    if cards == 0 or (cards < world and missing):
        cure = f": set {' '.join(missing)} to share them" if cards else ""
        raise SystemExit(f"{way} needs {world} cards, and there are {cards}{cure}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ways", default="zero3-c10d,zero3-peer,hsdp-c10d")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--save", type=Path, default=None, help="write the table as JSON")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    print(f"{'way':>12} {'ranks':>5} {'steps':>6} {'worst':>8} {'hold-ups a rank':>16} {'s':>7}", flush=True)
    for way in options.ways.split(","):
        world = RANKS[way.split("-")[0]]
        if options.device == "cuda":
            check_cards(way, world)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(soak, (world, folder, way, options.steps, options.device), nprocs=world)
            found = [json.loads(Path(folder, f"result-{rank}").read_text()) for rank in range(world)]
        row = found[0] | {"worst": max(each["worst"] for each in found)}
        row["hold_ups"] = [each["hold_ups"] for each in found]
        rows.append(row)
        counts = "/".join(map(str, row["hold_ups"]))
        print(
            f"{way:>12} {world:5} {row['steps']:6} {row['worst']:8.1e} {counts:>16} {row['seconds']:7.1f}", flush=True
        )
    print("between steps:", ", ".join(f"{count} x {action}" for action, count in rows[0]["actions"].items()))
    if options.save is not None:
        facts = {"torch": torch.__version__, "device": options.device, "rows": rows}
        options.save.write_text(json.dumps(facts, indent=1))
    if max(row["worst"] for row in rows) > TOLERANCE:
        raise SystemExit(f"off by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
