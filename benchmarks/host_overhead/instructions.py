"""Instructions that a sharding runtime adds to one unit's forward and backward. Time scatters, instructions do not.

Three steps of `run.py`'s model under valgrind, after eighteen that are not counted; each contestant in a process of its
own. Takes some minutes and needs valgrind.

    python benchmarks/host_overhead/instructions.py [--save benchmarks/host_overhead/results/instructions.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import run
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import lamina.runtime.api

BEFORE, COUNTED = 18, 3  # steps; by the end of the former ranks do not meet at the ends of programs any more
CONTESTANTS = {"plain": run.model_of, "lamina": run.sharded_by_lamina, "FSDP2": run.sharded_by_fsdp2}


def control(*what: str) -> None:
    subprocess.run(["callgrind_control", *what, str(os.getpid())], stdout=subprocess.DEVNULL, check=True)


def steps_of(name: str, parameters: int) -> None:
    """What runs under valgrind."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lamina.runtime.api.Control = run.LoneControl
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.WORLD)
    step = run.step_of(CONTESTANTS[name](parameters))
    for _ in range(BEFORE):
        step()
    gc.collect()  # else one that was due may fall among the counted steps, or not
    control("-i", "on")
    control("-z")
    for _ in range(COUNTED):
        step()
    control("-d")
    os._exit(0)


def count(name: str, options: argparse.Namespace) -> int:
    """Of one contestant's steps."""
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        command = [*valgrind, sys.executable, __file__, "--child", name]
        command += ["--parameters", str(options.parameters), "--units", str(options.units)]
        said = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", said.stderr)
    if found is None:
        raise SystemExit(said.stderr)
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, default=9, help="a unit")
    parser.add_argument("--units", type=int, default=run.UNITS)
    parser.add_argument("--save", type=Path, default=None, help="write the figures as JSON")
    parser.add_argument("--child", default="", help="for this script itself")
    options = parser.parse_args()
    run.UNITS = options.units
    if options.child:
        steps_of(options.child, options.parameters)
    counts = {name: count(name, options) for name in CONTESTANTS}
    lamina_adds, fsdp2_adds = counts["lamina"] - counts["plain"], counts["FSDP2"] - counts["plain"]
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.parameters} parameters a unit")
    print(f"millions in {COUNTED} steps of {run.UNITS} units: plain {counts['plain'] / 1e6:.1f}, lamina adds")
    print(f"{lamina_adds / 1e6:.1f}, FSDP2 adds {fsdp2_adds / 1e6:.1f}: {lamina_adds / fsdp2_adds:.3f}")
    if options.save is not None:
        where = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        options.save.write_text(
            json.dumps(
                {**where, "parameters": options.parameters, "units": run.UNITS, "steps": COUNTED, **counts}, indent=1
            )
        )


if __name__ == "__main__":
    main()
