"""Host time that a sharding runtime adds to one unit's forward and backward.

Communication is a fake process group (nothing is sent), the modules are tiny and do almost nothing, so what is left
over the plain model is the runtime's own Python. lamina and FSDP2 in one process, interleaved; medians over rounds.

    python benchmarks/host_overhead/run.py
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lamina
import lamina.core.control
import lamina.runtime.api

WORLD = 2
UNITS = 12
DIM = 8


class Block(nn.Module):
    """A unit of `count` small parameters whose forward touches each once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(DIM)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


class LoneControl(lamina.core.control.Control):
    """Agreement in a world whose other ranks are fake: they say what this one says."""

    def exchange(self, values: list[int], about: str = "") -> list[list[int]]:
        return [values] * self.world

    def exchange_text(self, text: str) -> list[str]:
        return [text] * self.world


def model_of(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(count) for _ in range(UNITS)])


def sharded_by_lamina(count: int) -> nn.Module:
    return lamina.shard(model_of(count), "zero3", units=[Block], transport="c10d", start="trust")


def sharded_by_fsdp2(count: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(count)
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step_of(model: nn.Module) -> Callable[[], None]:
    data = torch.randn(4, DIM)

    def step() -> None:
        model(data).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def per_unit_us(step: Callable[[], None], repeats: int) -> float:
    started = time.process_time()  # not the wall clock: other processes on the machine must not count
    for _ in range(repeats):
        step()
    return (time.process_time() - started) / repeats / UNITS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--save", type=Path, default=None, help="write the table as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lamina.runtime.api.Control = LoneControl
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    rows = []
    for count in (3, 9, 30):
        steps = {
            "plain": step_of(model_of(count)),
            "lamina": step_of(sharded_by_lamina(count)),
            "FSDP2": step_of(sharded_by_fsdp2(count)),
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds + 1):
            for name, step in steps.items():
                times[name].append(per_unit_us(step, options.repeats))
        added = {
            name: [t - p for t, p in zip(times[name][1:], times["plain"][1:], strict=True)]
            for name in ("lamina", "FSDP2")
        }
        ratios = [a / b for a, b in zip(added["lamina"], added["FSDP2"], strict=True)]
        rows.append(
            {
                "parameters": count,
                "plain_us": round(statistics.median(times["plain"][1:]), 1),
                "lamina_added_us": round(statistics.median(added["lamina"]), 1),
                "fsdp2_added_us": round(statistics.median(added["FSDP2"]), 1),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
            }
        )
    where = f"torch {torch.__version__}, {platform.machine()}"
    print(f"{where}, {UNITS} units, added host time per unit, forward + backward")
    print(f"{'parameters':>10} {'plain us':>9} {'lamina +us':>11} {'FSDP2 +us':>10} {'ratio':>7}  (min - max)")
    for row in rows:
        print(
            f"{row['parameters']:>10} {row['plain_us']:>9} {row['lamina_added_us']:>11} {row['fsdp2_added_us']:>10} "
            f"{row['ratio_median']:>7}  ({row['ratio_min']} - {row['ratio_max']})"
        )
    if options.save is not None:
        saved = {"torch": torch.__version__, "machine": platform.machine(), "rows": rows}
        options.save.write_text(json.dumps(saved, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
