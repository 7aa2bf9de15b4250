"""Two emulated nodes of two ranks each: is every strategy right across them, what does the border cost, who finds it?

    python benchmarks/nodes/run.py             # Linux, root
    python benchmarks/nodes/run.py --gpus      # over NCCL

Two `torchrun --nnodes 2` groups run in network namespaces of their own, with host names of their own, joined by a link
of 5 ms and 125 MB/s (1 Gbit/s). With `--gpus` they have host names of their own, and NCCL is told that they are two
hosts: between them it has sockets over loopback, no peer-to-peer copies and no shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from link import ADDRESSES, Link, inside, with_host_name

HERE = Path(__file__).parent
TIME_LIMIT_S = 300
PORT = 29400


def start(link: Link | None, node: int, words: list[str]) -> subprocess.Popen[str]:
    """One node's torchrun; no link: on GPUs."""
    host, address = f"node-{'ab'[node]}", ADDRESSES[0] if link else "127.0.0.1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    where = ["--node-rank", str(node), "--master-addr", address, "--master-port", str(PORT)]
    command, environment = [*torchrun, *where, *words], os.environ | {"OMP_NUM_THREADS": "1"}
    if link is None:
        # NCCL takes ranks of different ids for ranks of different hosts
        environment |= {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return subprocess.Popen([*with_host_name(host), *command, "--gpus"], env=environment, text=True)
    return subprocess.Popen(inside(link.names[node], host, command), env=environment, text=True)


def show_faults(link: Link, faults: list[str], save: Path | None) -> None:
    """What each fault of rank 3 is called on the other ranks, and when."""
    rows = []
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder, "told.json")
            words = [str(HERE / "job.py"), "--fault", fault, "--strategies", "hsdp", "--save", str(told)]
            nodes = [start(link, node, words) for node in (0, 1)]
            for node in nodes:
                node.wait(timeout=TIME_LIMIT_S)
            heard = {rank: told.with_suffix(f".{rank}") for rank in range(3)}
            said = {rank: json.loads(path.read_text()) for rank, path in heard.items() if path.exists()}
        rows.append({"fault": fault, "said": said})
        for rank, each in said.items():
            print(f"{fault:>9}: rank {rank} after {each['seconds']:.1f} s: {each['message'][:400]}")
    if save is not None:
        save.write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--megabytes-per-s", type=float, default=125.0)
    parser.add_argument("--strategies", default="zero3,hsdp,ddp")
    parser.add_argument("--gpus", action="store_true", help="over NCCL; ranks may share cards: tests/gpu/cards.py")
    parser.add_argument("--faults", default="", help="kill, stop, evaluate: what the last rank does; no timings then")
    parser.add_argument("--save", type=Path, default=None, help="write the table as JSON")
    options = parser.parse_args()
    if options.faults:
        with Link(options.delay_ms / 1e3, options.megabytes_per_s * 1e6) as link:
            show_faults(link, options.faults.split(","), options.save)
        return
    rows = []
    with contextlib.ExitStack() as stack:
        joined = Link(options.delay_ms / 1e3, options.megabytes_per_s * 1e6)
        link = None if options.gpus else stack.enter_context(joined)
        found = Path(stack.enter_context(tempfile.TemporaryDirectory()), "rows.json")
        for strategy in options.strategies.split(","):
            before = sum(link.bytes_sent) if link else 0
            words = [str(HERE / "job.py"), "--strategies", strategy, "--save", str(found)]
            nodes = [start(link, node, words) for node in (0, 1)]
            codes = [node.wait(timeout=TIME_LIMIT_S) for node in nodes]
            if any(codes):
                raise SystemExit(f"{strategy}: torchrun ended with {codes}")
            row = json.loads(found.read_text())[0]
            rows.append(row | {"megabytes": (sum(link.bytes_sent) - before) / 1e6 if link else None})
    between = f"{options.delay_ms:g} ms and {options.megabytes_per_s:g} MB/s" if link else "NCCL's sockets"
    print(f"2 nodes x 2 ranks, {between} between them")
    print(f"{'strategy':>10} {'ms a step':>10} {'MB over the link':>17} {'deviation':>10}  title")
    for row in rows:
        sent = row["megabytes"] or float("nan")
        print(f"{row['strategy']:>10} {row['ms']:10.1f} {sent:17.1f} {row['deviation']:10.1e}  {row['title']}")
    if options.save is not None:
        options.save.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
