"""The runs behind the README's table on two GPUs, each ended by a limit: what it has by then is saved.

python benchmarks/gpu_step/tables.py                                    # all, some forty minutes
python benchmarks/gpu_step/tables.py core_1b compiled_1b --out FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
EAGER = "bound,lamina,lamina-peer,fsdp2-fp32"
RUNS = {  # seconds, arguments of run.py
    "core_1b": (240, "--ways bound,reference,lamina,lamina-peer,fsdp2-fp32"),
    "compiled_1b": (170, "--steps 10 --ways bound-compiled,lamina-compiled,lamina-peer-compiled,fsdp2-compiled"),
    "copies_by_nccl_1b": (120, "--steps 5 --rounds 3 --ways bound,lamina,lamina-without-blocks,lamina-peer"),
    "registered_1b": (
        130,
        "--steps 5 --rounds 3 --ways bound,lamina,lamina-symmetric,lamina-symmetric-4,lamina-registered",
    ),
    "megatron_1b": (120, "--steps 10 --rounds 3 --ways bound,megatron"),
    "compiled_8b": (
        240,
        "--size 8b --tokens 4096 --steps 2 --rounds 3 --ways bound-compiled/lamina-peer-compiled/fsdp2-compiled",
    ),
    "eager_1b_2048": (140, f"--tokens 2048 --steps 5 --ways {EAGER},lamina-peer-whole"),
    "captured_1b_2048": (
        130,
        "--tokens 2048 --steps 20 --ways bound-captured,lamina-captured,lamina-peer-captured",
    ),
    "micro_batches_1b": (200, f"--micro-batches 4 --tokens 2048 --steps 2 --rounds 3 --ways {EAGER}"),
    "unclipped_1b": (100, f"--unclipped --steps 2 --rounds 3 --ways {EAGER}"),
    "strategies_1b": (190, "--steps 5 --rounds 3 --ways bound,ddp,fsdp1,lamina-ddp,lamina-zero1,lamina-zero2"),
    "recompute_3b": (
        160,
        f"--size 3b --tokens 4096 --recompute --rounds 3 --steps 3 --ways {EAGER},lamina-peer-whole",
    ),
    "auto_3b": (
        110,
        "--size 3b --tokens 4096 --recompute --rounds 3 --steps 3 --ways bound,lamina-auto,lamina-peer",
    ),
    "recompute_8b": (
        160,
        "--size 8b --tokens 4096 --recompute --rounds 3 --steps 2 --ways bound/lamina-peer/fsdp2-fp32",
    ),
    "experts": (110, f"--size experts --steps 10 --rounds 3 --ways {EAGER}"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--card", default="H200", help="as files are named: NAME_2xCARD.json")
    options = parser.parse_args()
    if unknown := set(options.names) - set(RUNS):
        parser.error(f"no such run: {', '.join(sorted(unknown))}")
    began = time.monotonic()
    for name in options.names or RUNS:
        limit_s, arguments = RUNS[name]
        print(f"== {name}, at {time.monotonic() - began:.0f} s", flush=True)
        save = options.out / f"{name}_2x{options.card}.json"
        run = subprocess.Popen([sys.executable, str(HERE / "run.py"), "--save", str(save), *arguments.split()])
        try:
            run.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            run.terminate()
            run.wait()


if __name__ == "__main__":
    main()
