"""Masters in halves against whole ones (docs/decisions/halves.md): bytes, and what an update takes.

torchrun --nproc-per-node 2 benchmarks/host_overhead/halves.py     # CPU ranks: bytes, CPU time of a step
python benchmarks/host_overhead/halves.py --kernel                 # one GPU: lamina's kernel over 400 M elements
"""

from __future__ import annotations

import argparse
import resource
import statistics

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from lamina.core.halves import halve

ROUNDS = 10


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(1000, 512), *blocks, nn.Linear(512, 1000))


def cpu_ms() -> float:
    return 1e3 * resource.getrusage(resource.RUSAGE_SELF).ru_utime


def on_cpu_ranks() -> None:
    """The ways take turns, so that whatever else the machine does meets both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = {}
    for halves in (False, True):
        precision = lamina.Precision(compute=torch.bfloat16, halves=halves)
        model = lamina.shard(build(), "zero3", transport="peer", precision=precision)
        ways[halves] = model, lamina.optim.AdamW(model.parameters(), lr=1e-3, max_norm=1.0), [], []
    tokens = torch.randint(1000, (4, 8))
    for _ in range(ROUNDS):
        for model, optimizer, steps_ms, publishing_ms in ways.values():
            model(tokens).float().pow(2).mean().backward()
            begin = cpu_ms()
            optimizer.step()
            steps_ms.append(cpu_ms() - begin)
            optimizer.zero_grad(set_to_none=False)
            begin = cpu_ms()
            with lamina.keep(model):  # publishes
                publishing_ms.append(cpu_ms() - begin)
    for halves, (model, _, steps_ms, publishing_ms) in ways.items():
        if dist.get_rank() == 0:
            numel, held = sum(p.numel() for p in model.parameters()), lamina.report(model).memory
            bytes_each = (held["masters"] + held["published"]) / numel * dist.get_world_size()
            step, publishing = (statistics.median(values[2:]) for values in (steps_ms, publishing_ms))
            print(
                f"{'halves' if halves else 'whole':<7} {numel / 1e6:.1f} M parameters: masters and published weights "
                f"{bytes_each:.3f} bytes an own element; CPU ms of a step {step:.1f}, "
                f"to publish and gather {publishing:.1f}"
            )
    dist.destroy_process_group()


def on_one_gpu(numel: int) -> None:
    from lamina.optim.adamw_kernel import Table, launch

    means, squares = (torch.zeros(numel, device="cuda") for _ in range(2))
    params, grads = (torch.randn(numel, device="cuda") for _ in range(2))
    weights, copies = (torch.empty(numel, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    remainders, step = torch.empty(numel, dtype=torch.int16, device="cuda"), torch.ones((), device="cuda")
    halve(params, weights, remainders)
    whole = Table(([params], [grads], [means], [squares], [step]), [copies])
    halved = Table(([means], [grads], [means], [squares], [step]), [weights], [remainders])
    times: dict[str, list[float]] = {"whole": [], "halves": []}
    for _ in range(ROUNDS):
        for name, table in (("whole", whole), ("halves", halved)):
            times[name].append(_kernel_ms(table, launch))
    for name, bytes_each in (("whole", 30), ("halves", 28)):
        median = statistics.median(times[name])
        rate = numel * bytes_each / median / 1e9
        print(f"{name:<7} {numel / 1e6:.0f} M elements: {median:.3f} ms, {rate:.2f} TB/s of {bytes_each} bytes each")


def _kernel_ms(table: object, launch: object) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    factor: Tensor = torch.tensor(0.5, device="cuda")
    torch.cuda.synchronize()
    begin.record()
    for _ in range(5):
        launch(table, 1e-3, factor, None, (0.9, 0.95), 1e-8, 0.1, False, True)  # type: ignore[operator]
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="store_true", help="on one GPU")
    parser.add_argument("--numel", type=int, default=400_000_000)
    arguments = parser.parse_args()
    on_one_gpu(arguments.numel) if arguments.kernel else on_cpu_ranks()
