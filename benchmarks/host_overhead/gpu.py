"""Host time that a sharding runtime adds to one unit's forward and backward on a GPU; one GPU stands for a rank of two.

Communication is a fake process group (nothing is sent); for peers memory of the same GPU stands, and a small kernel for
each barrier. Streams, events, copies and kernels are the real ones. The model is narrow, so that the host is what a
step waits for: wall time, with a synchronisation every few steps.

    python benchmarks/host_overhead/gpu.py [--profile lamina-peer]
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.append(str(Path(__file__).parents[1] / "gpu_step"))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import model as models
import run

import lamina
import lamina.core.mesh
import lamina.runtime.api
from lamina.core.group_sets import GroupSet
from lamina.core.groups import GroupMaker
from lamina.runtime import direct, piece_sums
from lamina.runtime.publishing import inbox_bytes, published_places
from lamina.transport.symmetric import SymmetricPeers

LAYERS, TOKENS, STEPS = 24, 256, 10
models.SIZES["narrow"] = (256, LAYERS, 4, 2, 512, 512)
PRECISION = lamina.Precision(compute=torch.bfloat16, keep=())
Step = Callable[[], None]


class FakeGroups(GroupMaker):
    def __init__(self, groups: GroupSet, me: int, whole_world: bool, backend: str | None) -> None:
        super().__init__(groups, me, whole_world, "fake")


class LocalHandle:
    """Stands for torch's handle of a symmetric allocation."""

    def __init__(self, own: Tensor, pg: dist.ProcessGroup) -> None:
        self.other, self.cell = torch.zeros_like(own), torch.zeros(1, device=own.device)

    def get_buffer(self, place: int, shape: tuple[int], dtype: torch.dtype) -> Tensor:
        return self.other

    def barrier(self, channel: int) -> None:
        self.cell.zero_()


def local_peers(
    control: Any, mesh: Any, layouts: Any, meshes: Any, wire: Any = None, is_auto: bool = False
) -> SymmetricPeers:
    size_bytes = published_places(layouts, meshes)[1]
    return SymmetricPeers(mesh.gather[0], mesh.device, size_bytes, inbox_bytes(layouts, wire))


def build(way: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = models.Model("narrow")
    if way == "plain":
        return model.to(torch.bfloat16)
    if way == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cuda", (2,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    transport = "peer" if way == "lamina-peer" else "c10d"
    return lamina.shard(model, "zero3", precision=PRECISION, transport=transport, start="trust")


def step_of(model: nn.Module) -> Step:
    tokens = torch.randint(0, 512, (1, TOKENS + 1), device="cuda")

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        model.zero_grad()

    return step


def whole_step_of(model: nn.Module) -> Step:
    """With the optimizer, clipping in its step, and so publishing."""
    tokens = torch.randint(0, 512, (1, TOKENS + 1), device="cuda")
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-4, max_norm=1.0)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sums_one_by_one(step: Step) -> Step:
    """The same step with a launch for each piece that is summed."""
    run_together = piece_sums.PieceSums.run

    def changed() -> None:
        piece_sums.PieceSums.run = lambda *_: False  # type: ignore[assignment, method-assign]
        try:
            step()
        finally:
            piece_sums.PieceSums.run = run_together  # type: ignore[method-assign]

    return changed


def ms_of(step: Step) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS * 1e3


def show_profile(step: Step, rows: int, order: str) -> None:
    profile = cProfile.Profile()
    profile.enable()
    took = ms_of(step)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats(order).print_stats(rows)
    print(f"under cProfile {took:.2f} ms a step; the table is of {STEPS} steps")
    for line in text.getvalue().splitlines()[4:]:
        if line.strip():
            print(line.replace(str(Path(__file__).parents[2]), "")[:110])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", default="plain,lamina,lamina-peer,FSDP2")
    parser.add_argument("--profile", default="", help="a way whose functions are shown")
    parser.add_argument("--rows", type=int, default=45)
    parser.add_argument("--order", default="tottime")
    parser.add_argument("--save", type=Path, default=None, help="write the table as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    direct.LEAST_PIECE_BYTES = 0  # as for wide models
    lamina.runtime.api.Control = run.LoneControl
    lamina.runtime.api.open_peers = local_peers
    lamina.core.mesh.GroupMaker = FakeGroups
    symmetric_memory.empty = torch.zeros
    symmetric_memory.rendezvous = LocalHandle
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    steps = {way: step_of(build(way)) for way in options.ways.split(",")}
    if "lamina-peer" in steps:
        steps["lamina-peer, sums one by one"] = sums_one_by_one(steps["lamina-peer"])
        steps["lamina-peer, whole step"] = whole_step_of(build("lamina-peer"))
    times: dict[str, list[float]] = {way: [] for way in steps}
    for number in range(options.rounds + 1):
        for way, step in steps.items():
            took = ms_of(step)
            if number:
                times[way].append(took)
    units = LAYERS + 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {units} units, forward + backward")
    rows = []
    for way, found in times.items():
        added = [(t - p) / units * 1e3 for t, p in zip(found, times["plain"], strict=True)]
        middle = statistics.median
        rows.append({"way": way, "ms": round(middle(found), 2), "added_us_per_unit": round(middle(added), 1)})
        print(f"{way:>32} {middle(found):7.2f} ms {middle(added):7.1f} us a unit ({min(added):.1f} - {max(added):.1f})")
    if options.save is not None:
        facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "units": units, "rows": rows}
        options.save.write_text(json.dumps(facts, indent=1))
    if options.profile:
        show_profile(steps[options.profile], options.rows, options.order)


if __name__ == "__main__":
    main()
