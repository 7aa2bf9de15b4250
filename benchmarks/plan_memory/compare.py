"""Forecasts beside everything that was measured, as a table. Needs no GPU.

python benchmarks/plan_memory/compare.py                                 # results/*.json, and lamina's rows of gpu_step
python benchmarks/plan_memory/compare.py benchmarks/plan_memory/results/NAME.json

The jobs of gpu_step build their model on the device before they shard it, and have a communicator of their own, whose
size is what the unsharded loop of the same run, or of the core run on that machine, takes beside its context. Rows of
gradients that kept their memory, and captured steps, are other programs: left out.

Rows of runtimes that made no room for gradients (src/lamina/core/room.py) are forecast without, and those of runtimes
that summed norms over a communicator of 16 blocks with what such a one took, be it that of the reductions.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from predict import measured
from rows import Row, wire_of

from lamina.core import room
from lamina.core.strategy import Factors, resolve
from lamina.planner.machine import Machine, load_machine
from lamina.planner.memory import NCCL_BYTES, communicators, forecast_memory, nccl_bytes
from lamina.planner.reserved import reserve
from lamina.planner.workload import Choice

GIB = 1 << 30
HERE = Path(__file__).parent
BEFORE = ("nccl_1b_2xH100_second", "peer_1b_2xH200", "peer_1b_2048_2xH200")  # runtimes that did not give back
WITHOUT_ROOM = (
    *(f"before_room_{name}_2xH200" for name in ("1b", "strategies_1b", "1b_2048")),
    "recompute_8b_2xH200",
)
BIG_SUMS = tuple(
    f"{name}_2xH200"
    for name in (
        "before_sums_1b",
        "strategies_1b",
        "before_sums_1b_2048",
        "before_sums_recompute_3b",
        "deep",
        "deep_2048",
    )
)
ROOM_FOR_SOME = ("sums_1b_2xH200",)  # none where all is recomputed, some with halves
HALVES_ASKED_FOR = ("halves_1b_2xH200",)  # `lamina-peer` had whole masters, and the other way halves
TODAY = (
    *HALVES_ASKED_FOR,
    *(
        f"{name}_2xH200"
        for name in (
            "core_1b",
            "eager_1b_2048",
            "recompute_3b",
            "auto_3b",
            "experts",
            "unclipped_1b",
            "expandable_1b",
            "slow_host_core_1b",
            "slow_host_eager_1b_2048",
            "slow_host_auto_3b",
        )
    ),
)
SUMMING_BYTES = 421 << 20  # of a communicator of 16 blocks that sums, too
WAYS = {  # of gpu_step, as strategy and transport
    "lamina": ("zero3", "c10d"),
    "lamina-peer": ("zero3", "peer"),
    "lamina-peer-whole": ("zero3", "peer"),
    "lamina-auto": ("zero3", "peer"),
    "lamina-peer-halves": ("zero3", "peer"),
    **{f"lamina-{strategy}": (strategy, "c10d") for strategy in ("ddp", "zero1", "zero2")},
}


class Found(NamedTuple):
    """One measured row; GiB."""

    row: Row
    gpus: int
    machine: Machine
    allocated: float
    reserved: float
    used: float
    transport: str = "c10d"
    halved: bool = False
    given: bool = False  # the model lay on the device
    gives_back: bool = False  # the runtime gives that memory back
    room_part: float = 0.0
    has_small_sums: bool = False
    expandable: bool = False
    own_bytes: int = 0  # of a communicator of the job's


def own_rows(path: Path) -> Iterator[Found]:
    data = json.loads(path.read_text())
    gpus = 1 if path.stem.startswith("one") else 2
    for entry in data["rows"]:
        if entry.get("fits"):
            yield Found(
                Row(**entry["row"]),
                gpus,
                machine_of(data["card"]),
                *(entry[k] for k in ("allocated", "reserved", "used")),
            )


def gpu_step_rows() -> Iterator[Found]:
    loop: dict[str, float] = {}
    for name in (*BEFORE, *WITHOUT_ROOM, *BIG_SUMS, *ROOM_FOR_SOME, *TODAY):
        data = json.loads((HERE.parent / "gpu_step" / "results" / f"{name}.json").read_text())
        by_way = {entry["way"]: entry for entry in data["rows"]}
        machine, loop = machine_of(data["card"]), by_way.get("reference", loop)
        own_bytes = int((loop["used_gib"] - loop["reserved_gib"]) * GIB - machine.fixed_bytes - NCCL_BYTES)
        tokens, size = re.search(r"--tokens (\d+)", data["command"]), re.search(r"(\db|deep|experts)_", name)
        assert size is not None
        recompute = "full" if "--recompute" in data["command"] else "none"
        for way, (strategy, transport) in WAYS.items():
            if way in by_way and not (name in BEFORE and transport == "peer"):
                row = Row(size[1], int(tokens[1]) if tokens else 8192, strategy, recompute)
                sizes = (by_way[way][f"{key}_gib"] for key in ("allocated", "reserved", "used"))
                halved = way.endswith("-halves") or has_halves(name, way, data["command"])
                room_part = room.KEPT if recompute == "none" and name not in (*BEFORE, *WITHOUT_ROOM) else 0.0
                if name in TODAY:
                    room_part = room.part(recompute, 2, halved)
                lay = name not in BEFORE, room_part, name in (*ROOM_FOR_SOME, *TODAY), "expandable" in data["command"]
                yield Found(row, 2, machine, *sizes, transport, halved, True, *lay, own_bytes)


def has_halves(name: str, way: str, command: str) -> bool:
    """Masters lie in halves by themselves where the optimizer clips, since `TODAY`."""
    is_default = name in TODAY and name not in HALVES_ASKED_FOR and "--unclipped" not in command
    return is_default and way in ("lamina-peer", "lamina-auto")


def machine_of(card: str) -> Machine:
    return load_machine("h200" if "H200" in card else "h100")


def more_bytes(factors: Factors, peers: bool, machine: Machine) -> int:
    """That communicators of runtimes took whose sums were big."""
    then = max(communicators(factors, peers), int(factors.optimizer > 1)) * SUMMING_BYTES
    once_bytes = NCCL_BYTES if then else 0
    return int(once_bytes + then - nccl_bytes(factors, peers, machine))


def line(found: Found) -> str:
    row = found.row
    model = measured(row.size, row.tokens, row.recompute)
    choice = Choice(
        row.strategy,
        found.gpus,
        recompute=row.recompute,
        wire=wire_of(row),
        transport=found.transport,
        halved=found.halved,
    )
    forecast = forecast_memory(model, choice, found.machine)
    beside_bytes = forecast.used_bytes - forecast.reserved_bytes
    factors = resolve(row.strategy, found.gpus)
    if not found.has_small_sums:
        beside_bytes += more_bytes(factors, forecast.state.is_one_sided, found.machine)
    lay = {"given": found.given, "gives_back": found.gives_back, "room_part": found.room_part}
    lay["expandable"] = found.expandable
    run = reserve(model, forecast.state, factors, **lay)
    assert run is not None
    pairs = (
        (run.allocated_bytes, found.allocated),
        (run.reserved_bytes, found.reserved),
        (run.reserved_bytes + beside_bytes + found.own_bytes, found.used),
    )
    where = f"{found.gpus} x {found.machine.name}"
    where += f", `{found.transport}`{', masters in halves' * found.halved}, built on the device" if found.given else ""
    where += ", expandable segments" * found.expandable
    figures = (f"{forecast / GIB:.2f} / {seen:.2f} ({forecast / GIB / seen - 1:+.1%})" for forecast, seen in pairs)
    return "| " + " | ".join([where, *map(str, row), *figures]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path, nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| where | model | tokens a GPU | strategy | recompute | wire | allocated | reserved | used |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in options.results or sorted((HERE / "results").glob("*.json")):
        for found in own_rows(path):
            print(line(found))
    for found in [] if options.results else gpu_step_rows():
        print(line(found), flush=True)


if __name__ == "__main__":
    main()
