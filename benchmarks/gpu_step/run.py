"""Step time, device memory and loss of sharded training on GPUs, beside FSDP2 and a hand-written loop.

    python benchmarks/gpu_step/run.py --gpus 2 --save benchmarks/gpu_step/results/NAME.json

Every way runs in processes of its own (so that device memory is its own), from the same weights on the same batches:
timed steps (10 between synchronisations, maximum over ranks, median of rounds), then 50 steps from the start whose
losses are compared with the hand-written loop (bf16 compute, fp32 masters, gradients averaged in fp32). All ways clip
at 1.0 and change the learning rate at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from model import SIZES, Block, Model

WAYS = ("bound", "reference", "fsdp2-fp32", "fsdp2-bf16", "lamina")
LENGTH = 2048
Step = Callable[[Tensor, Tensor, int], Tensor]


def learning_rate(step: int) -> float:
    return 1e-4 * min(1.0, (step + 1) / 10)


def reference(size: str) -> Step:
    """bf16 weights, fp32 masters, gradients averaged in fp32: nothing sharded."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.manual_seed(0)
        source = Model(size)
        model = Model(size).to(torch.bfloat16)
    masters = [p.detach().clone().requires_grad_() for p in source.parameters()]
    del source
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    copies = list(model.parameters())

    def publish() -> None:
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)

    publish()

    def step(tokens: Tensor, targets: Tensor, number: int) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        for master, copy in zip(masters, copies, strict=True):
            gradient = copy.grad.float()
            dist.all_reduce(gradient)
            master.grad = gradient / dist.get_world_size()
            copy.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        set_rate(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
        publish()
        return loss.detach()

    return step


def bound(size: str, captures: bool = False, compiles: bool = False) -> Step:
    """What no sharded step can beat: the same kernels on a whole bf16 model, AdamW over numel / W, no communication."""
    model = seeded(size).to(torch.bfloat16)
    for block in model.blocks if compiles else ():
        block.compile()
    wanted_numel = sum(p.numel() for p in model.parameters()) // dist.get_world_size()
    copies, masters = [], []
    for copy in model.parameters():
        if wanted_numel <= 0:
            break
        part = copy.detach().view(-1)[:wanted_numel]  # of the last one only as much as is missing
        wanted_numel -= part.numel()
        copies.append((copy, part))
        masters.append(part.float().requires_grad_())
    rate = torch.tensor(1e-4, device="cuda") if captures else 1e-4
    optimizer = torch.optim.AdamW(masters, lr=rate, fused=True, capturable=captures)

    def step(tokens: Tensor, targets: Tensor, number: int = -1) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        for (copy, part), master in zip(copies, masters, strict=True):
            master.grad = copy.grad.view(-1)[: part.numel()].float()
        model.zero_grad()
        nn.utils.clip_grad_norm_(masters, 1.0)
        if number >= 0:
            set_rate(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_([part for _, part in copies], masters)
        return loss.detach()

    return graphed(step, rate) if captures else step


def graphed(step: Callable[..., Tensor], rate: Tensor) -> Step:
    """A step as one CUDA graph, by hand."""
    kept: list = []

    def call(tokens: Tensor, targets: Tensor, number: int) -> Tensor:
        if not kept:
            inputs, graph, side = (tokens.clone(), targets.clone()), torch.cuda.CUDAGraph(), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step(*inputs)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                result = step(*inputs)
            kept.extend([inputs, graph, result])
        inputs, graph, result = kept
        inputs[0].copy_(tokens)
        inputs[1].copy_(targets)
        rate.fill_(learning_rate(number))
        graph.replay()
        return result

    return call


def fsdp2(size: str, reduce: torch.dtype, compiles: bool = False) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = seeded(size)
    for block in model.blocks if compiles else ():
        block.compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    blocks = list(model.blocks)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def fsdp1(size: str) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        seeded(size),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=True,
        forward_prefetch=True,
        device_id=torch.cuda.current_device(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return training_step(model, optimizer, clip=lambda: model.clip_grad_norm_(1.0))


def ddp(size: str) -> Step:
    """fp32 weights and gradients, computed under autocast: how DDP is used with mixed precision."""
    model = nn.parallel.DistributedDataParallel(seeded(size), gradient_as_bucket_view=True)
    return training_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), autocast=True)


def megatron_fsdp(size: str) -> Step:
    """bf16 weights and wire, fp32 masters and gradients."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    model = seeded(size).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16
    )
    model, optimizer = fully_shard(
        model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=3, mixed_precision_policy=policy
    )
    return training_step(model, optimizer)


def lamina_way(
    size: str, transport: str = "c10d", captures: bool = False, compiles: bool = False, halves: bool = False
) -> Step:
    import lamina

    precision = lamina.Precision(compute=torch.bfloat16, keep=(), halves=halves)
    model = lamina.shard(seeded(size), precision=precision, transport=transport, compile=compiles)
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-4, max_norm=1.0)

    def update(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if captures:
        update = lamina.capture(update)

    def step(tokens: Tensor, targets: Tensor, number: int) -> Tensor:
        set_rate(optimizer, number)
        loss = update(tokens, targets)
        return loss.clone() if captures else loss

    return step


def seeded(size: str) -> Model:
    with torch.device("cuda"):
        torch.manual_seed(0)
        return Model(size)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object] | None = None,
    autocast: bool = False,
) -> Step:
    if clip is None:
        clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)

    def step(tokens: Tensor, targets: Tensor, number: int) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(tokens, targets)
        loss.backward()
        clip()
        set_rate(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def set_rate(optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(number)


def batch(number: int, tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Batch `number` of this rank: a fixed stream with something to learn in it."""
    length = min(LENGTH, tokens)
    generator = torch.Generator(device="cuda").manual_seed(1000 * number + dist.get_rank())
    data = torch.randint(0, vocabulary // 64, (tokens // length, length + 1), device="cuda", generator=generator)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def measure(way: str, options: argparse.Namespace) -> dict:
    """One way on this rank."""
    vocabulary = SIZES[options.size][-1]
    step = BUILDERS[way](options.size)
    losses = []
    for number in range(options.steps):
        loss = step(*batch(number, options.tokens, vocabulary), number)
        dist.all_reduce(loss)
        losses.append(loss / dist.get_world_size())
    curve = [float(loss) for loss in losses]
    data = batch(0, options.tokens, vocabulary)
    milliseconds, host = [], []
    for _ in range(options.rounds):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for number in range(10):
            step(*data, number)
        issued = time.perf_counter()
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - started, issued - started], device="cuda") * 100
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        milliseconds.append(float(took[0]))
        host.append(float(took[1]))
    free, everything = torch.cuda.mem_get_info()
    return {
        "way": way,
        "ms": statistics.median(milliseconds),
        "ms_min": min(milliseconds),
        "ms_max": max(milliseconds),
        "host_ms": statistics.median(host),
        "used_gib": (everything - free) / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "losses": curve,
    }


BUILDERS: dict[str, Callable[[str], Step]] = {
    "bound": bound,
    "reference": reference,
    "fsdp2-fp32": lambda size: fsdp2(size, torch.float32),
    "fsdp2-bf16": lambda size: fsdp2(size, torch.bfloat16),
    "fsdp1": fsdp1,
    "ddp": ddp,
    "megatron": megatron_fsdp,
    "lamina": lamina_way,
    "lamina-peer": lambda size: lamina_way(size, "peer"),
    "lamina-peer-halves": lambda size: lamina_way(size, "peer", halves=True),
    "bound-captured": lambda size: bound(size, captures=True),
    "lamina-captured": lambda size: lamina_way(size, captures=True),
    "lamina-peer-captured": lambda size: lamina_way(size, "peer", captures=True),
    "bound-compiled": lambda size: bound(size, compiles=True),
    "fsdp2-compiled": lambda size: fsdp2(size, torch.float32, compiles=True),
    "lamina-compiled": lambda size: lamina_way(size, compiles=True),
    "lamina-peer-compiled": lambda size: lamina_way(size, "peer", compiles=True),
}


def child(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a card: see tests/gpu/cards.py
    dist.init_process_group("cuda:nccl,cpu:gloo")
    result = measure(options.way, options)
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--save", type=Path, default=None)
    parser.add_argument("--way", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--result", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        child(options)
        return
    rows = []
    for way in options.ways.split(","):
        with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, "--nproc-per-node", str(options.gpus)]
            command += [__file__, "--way", way, "--result", result.name, "--size", options.size]
            command += ["--tokens", str(options.tokens), "--steps", str(options.steps), "--rounds", str(options.rounds)]
            done = subprocess.run(command, capture_output=True, text=True)
            text = result.read()
            if done.returncode or not text:
                print(f"{way}: failed\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
                continue
            rows.append(json.loads(text))
    show(rows, options)


def show(rows: list[dict], options: argparse.Namespace) -> None:
    card = torch.cuda.get_device_name()
    print(f"{options.size}, {options.tokens} tokens a GPU, {options.gpus} x {card}, torch {torch.__version__}")
    bounds = {row["way"].removeprefix("bound"): row["ms"] for row in rows if row["way"].startswith("bound")}
    base = next((row["losses"] for row in rows if row["way"] == "reference"), None)
    sizes = f"{'used':>6} {'alloc':>6} {'resv':>6}"
    print(f"{'way':>20} {'ms':>7} {'(min':>6} - {'max)':>6} {'host':>6} {sizes}  of bound  deviation  last loss")
    for row in rows:
        learns = base is not None and not row["way"].startswith("bound")  # the bound's ranks go their own ways
        row["deviation"] = max(abs(a - b) for a, b in zip(row["losses"], base, strict=True)) if learns else None
        kind = next((f"-{word}" for word in ("captured", "compiled") if row["way"].endswith(word)), "")
        row["of_bound"] = bounds[kind] / row["ms"] if kind in bounds else None
        print(
            f"{row['way']:>20} {row['ms']:7.1f} {row['ms_min']:6.1f} - {row['ms_max']:6.1f} {row['host_ms']:6.1f} "
            f"{row['used_gib']:6.2f} {row['allocated_gib']:6.2f} {row['reserved_gib']:6.2f}  "
            f"{row['of_bound'] or float('nan'):8.3f}  "
            f"{row['deviation'] if row['deviation'] is None else round(row['deviation'], 6)}  {row['losses'][-1]:.4f}"
        )
    if options.save is not None:
        facts = {"card": card, "torch": torch.__version__, "command": " ".join(sys.argv), "rows": rows}
        options.save.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
