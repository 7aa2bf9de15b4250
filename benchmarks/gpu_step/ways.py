"""What `run.py` measures: one training step of each way, built from the same seed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from model import SIZES, Block, Model

LENGTH = 2048
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Step = Callable[[Tensor, Tensor, int], Tensor]  # tokens, targets (sequences, length), number of the step -> loss
Context = Callable[[bool], AbstractContextManager[Any]]  # of a micro-batch; whether it is the last


@dataclass(frozen=True)
class Job:
    """What all ways do alike."""

    size: str = "1b"
    tokens: int = 8192  # of a micro-batch, on one GPU
    clips: bool = True
    micro_batches: int = 1
    recomputes: bool = False  # every block's forward once more in its backward

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Batch `number` of this rank, (sequences, length) twice: a fixed stream with something to learn in it."""
        length, vocabulary = min(LENGTH, self.tokens), SIZES[self.size][-1]
        generator = torch.Generator(device=DEVICE).manual_seed(1000 * number + dist.get_rank())
        shape = (self.micro_batches * self.tokens // length, length + 1)
        data = torch.randint(0, max(8, vocabulary // 64), shape, device=DEVICE, generator=generator)
        return data[:, :-1].contiguous(), data[:, 1:].contiguous()

    def model(self) -> Model:
        with torch.device(DEVICE):
            torch.manual_seed(0)
            return Model(self.size, self.recomputes)

    def backward(
        self, model: Callable[..., Tensor], tokens: Tensor, targets: Tensor, context: Context | None = None
    ) -> Tensor:
        """Forward and backward of every micro-batch; their mean loss."""
        count, losses = self.micro_batches, []
        for place, part in enumerate(zip(tokens.chunk(count), targets.chunk(count), strict=True)):
            with context(place == count - 1) if context else nullcontext():
                loss = model(*part) if count == 1 else model(*part) / count
                loss.backward()
            losses.append(loss.detach())
        return losses[0] if count == 1 else torch.stack(losses).sum()


def learning_rate(step: int) -> float:
    return 1e-4 * min(1.0, (step + 1) / 10)


def set_rate(optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(number)


def reference(job: Job) -> Step:
    """bf16 weights, fp32 masters, gradients averaged in fp32: nothing sharded."""
    source = job.model()
    model = job.model().to(torch.bfloat16)
    masters = [p.detach().clone().requires_grad_() for p in source.parameters()]
    del source
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    copies = list(model.parameters())

    def publish() -> None:
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)

    publish()

    def step(tokens: Tensor, targets: Tensor, number: int) -> Tensor:
        losses = []
        for part in zip(tokens.chunk(job.micro_batches), targets.chunk(job.micro_batches), strict=True):
            loss = model(*part) / job.micro_batches
            loss.backward()
            losses.append(loss.detach())
            for master, copy in zip(masters, copies, strict=True):
                gradient = copy.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                copy.grad = None
        for master in masters:
            dist.all_reduce(master.grad)
            master.grad /= dist.get_world_size()
        if job.clips:
            nn.utils.clip_grad_norm_(masters, 1.0)
        set_rate(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
        publish()
        return torch.stack(losses).sum()

    return step


def bound(job: Job, captures: bool = False, compiles: bool = False) -> Step:
    """What no sharded step can beat: the same kernels on a whole bf16 model, AdamW over numel / W, no communication."""
    model = job.model().to(torch.bfloat16)
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
    rate: float | Tensor = torch.tensor(1e-4, device=DEVICE) if captures else 1e-4
    optimizer = torch.optim.AdamW(masters, lr=rate, fused=True, capturable=captures)

    def step(tokens: Tensor, targets: Tensor, number: int = -1) -> Tensor:
        loss = job.backward(model, tokens, targets)
        for (copy, part), master in zip(copies, masters, strict=True):
            master.grad = copy.grad.view(-1)[: part.numel()].float()
        model.zero_grad()
        if job.clips:
            nn.utils.clip_grad_norm_(masters, 1.0)
        if number >= 0:
            set_rate(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_([part for _, part in copies], masters)
        return loss

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


def fsdp2(job: Job, reduce: torch.dtype, compiles: bool = False, blocks_a_unit: int = 1) -> Step:
    """One unit a block or some blocks, one unit prefetched in both directions, micro-batches reduced once."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = job.model()
    for block in model.blocks if compiles else ():
        block.compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    blocks: list[Any] = list(model.blocks)
    units = [blocks[at : at + blocks_a_unit] for at in range(0, len(blocks), blocks_a_unit)]
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], mp_policy=policy)
    root = fully_shard(model, mp_policy=policy)
    for unit, following in pairwise(units):
        unit[-1].set_modules_to_forward_prefetch([following[0]])
        following[0].set_modules_to_backward_prefetch([unit[-1]])

    def reduced(is_last: bool) -> AbstractContextManager[None]:
        root.set_requires_gradient_sync(is_last)
        return nullcontext()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return training_step(job, model, optimizer, reduced if job.micro_batches > 1 else None)


def fsdp1(job: Job) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        job.model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=True,
        forward_prefetch=True,
        device_id=torch.cuda.current_device() if DEVICE == "cuda" else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    no_sync = lambda is_last: nullcontext() if is_last else model.no_sync()  # noqa: E731
    return training_step(job, model, optimizer, no_sync, clip=lambda: model.clip_grad_norm_(1.0))


def ddp(job: Job) -> Step:
    """fp32 weights and gradients, computed under autocast: how DDP is used with mixed precision."""
    model = nn.parallel.DistributedDataParallel(job.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    no_sync = lambda is_last: nullcontext() if is_last else model.no_sync()  # noqa: E731
    return training_step(job, torch.autocast(DEVICE, torch.bfloat16)(model), optimizer, no_sync)


def megatron_fsdp(job: Job) -> Step:
    """bf16 weights and wire, fp32 masters and gradients."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    model = job.model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16
    )
    model, optimizer = fully_shard(
        model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=3, mixed_precision_policy=policy
    )
    no_sync = lambda is_last: nullcontext() if is_last else model.no_sync()  # noqa: E731
    return training_step(job, model, optimizer, no_sync, clip=partial(clip_by_parts, optimizer, 1.0))


def clip_by_parts(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Gradients are DTensors of which a rank may have none: torch's clipping would meet other ranks once for each."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    parts = [grad.to_local() for grad in gradients]
    squares = torch.zeros((), device=DEVICE)
    if parts:
        squares += torch.stack(torch._foreach_norm(parts)).square().sum()
    dist.all_reduce(squares)
    torch._foreach_mul_(parts, (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0))


def training_step(
    job: Job,
    model: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    context: Context | None = None,
    clip: Callable[[], object] | None = None,
) -> Step:
    if clip is None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip = partial(nn.utils.clip_grad_norm_, parameters, 1.0)

    def step(tokens: Tensor, targets: Tensor, number: int) -> Tensor:
        loss = job.backward(model, tokens, targets, context)
        if job.clips:
            clip()
        set_rate(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def lamina_way(
    job: Job,
    strategy: str = "zero3",
    transport: str = "c10d",
    captures: bool = False,
    compiles: bool = False,
    halves: bool | None = None,
    blocks_a_unit: int = 1,
) -> Step:
    import lamina

    model: nn.Module = job.model() if not job.recomputes else Job(job.size).model()
    model = lamina.shard(
        model,
        strategy,
        units="auto" if blocks_a_unit == 1 else joined_units(model, blocks_a_unit),
        precision=lamina.Precision(compute=torch.bfloat16, keep=(), halves=halves),
        transport=transport,
        compile=compiles,
        recompute="full" if job.recomputes else "none",
    )
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-4, max_norm=1.0 if job.clips else None)
    context = partial(_micro_batch, model) if job.micro_batches > 1 else None

    def update(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = job.backward(model, tokens, targets, context)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if captures:
        update = lamina.capture(update)

    def step(tokens: Tensor, targets: Tensor, number: int) -> Tensor:
        set_rate(optimizer, number)
        loss = update(tokens, targets)
        return loss.clone() if captures else loss

    return step


def joined_units(model: nn.Module, blocks_a_unit: int) -> list[str | list[str]]:
    """The units that "auto" finds, but for blocks, of which some in a row share one."""
    blocks = [f"blocks.{number}" for number in range(len(model.blocks))]  # type: ignore[arg-type]
    return ["emb", "head", *(blocks[at : at + blocks_a_unit] for at in range(0, len(blocks), blocks_a_unit))]


def lamina_registered(
    job: Job, is_symmetric: bool = False, without_blocks: bool = False, most_blocks: int | None = None
) -> Step:
    """`c10d` whose slots lie in memory that NCCL's gather lane has registered, by its older call or as windows.

    `without_blocks`: the lane's zero-CTA policy, gathers by copy engines (NCCL 2.28 and later;
    https://docs.pytorch.org/docs/stable/distributed.html). Experiments: results/registered_1b_2xH200.json.
    """
    from lamina.core import groups
    from lamina.runtime import api

    options, place = groups.nccl_options, api.place_slots

    def by_lane(lane: str) -> Any:
        made = options(lane)
        if lane == "gather" and most_blocks is not None:
            made.config.max_ctas = most_blocks
        if lane == "gather" and without_blocks:
            made.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        return made

    def in_registered_memory(units: Any, packing: Any, device: torch.device) -> Tensor:
        group = next(unit.mesh.gather[0].pg for unit in units if not unit.plain)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # the communicator is made by its first call
        backend = group._get_backend(device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            arena = place(units, packing, device)
        backend.register_mem_pool(pool, symm=is_symmetric)
        POOLS.append(pool)
        return arena

    with (
        patch.object(groups, "nccl_options", by_lane),
        patch.object(api, "place_slots", in_registered_memory),
    ):
        return lamina_way(job)


POOLS: list[Any] = []  # live as long as the process


def _micro_batch(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    import lamina

    return lamina.accumulate(model, last=is_last)


BUILDERS: dict[str, Callable[[Job], Step]] = {
    "bound": bound,
    "reference": reference,
    "fsdp2-fp32": lambda job: fsdp2(job, torch.float32),
    "fsdp2-pairs": lambda job: fsdp2(job, torch.float32, blocks_a_unit=2),
    "fsdp2-bf16": lambda job: fsdp2(job, torch.bfloat16),
    "fsdp1": fsdp1,
    "ddp": ddp,
    "megatron": megatron_fsdp,
    "lamina": lamina_way,
    "lamina-registered": lamina_registered,
    "lamina-symmetric": partial(lamina_registered, is_symmetric=True),
    "lamina-symmetric-4": partial(lamina_registered, is_symmetric=True, most_blocks=4),
    "lamina-without-blocks": partial(lamina_registered, is_symmetric=True, without_blocks=True),
    "lamina-pairs": partial(lamina_way, blocks_a_unit=2),
    "lamina-peer-pairs": partial(lamina_way, transport="peer", blocks_a_unit=2),
    "lamina-peer-fours": partial(lamina_way, transport="peer", blocks_a_unit=4),
    "lamina-auto": lambda job: lamina_way(job, transport="auto"),
    "lamina-peer": lambda job: lamina_way(job, transport="peer"),
    "lamina-peer-whole": lambda job: lamina_way(job, transport="peer", halves=False),
    "lamina-ddp": lambda job: lamina_way(job, "ddp"),
    "lamina-zero1": lambda job: lamina_way(job, "zero1"),
    "lamina-zero2": lambda job: lamina_way(job, "zero2"),
    "bound-captured": lambda job: bound(job, captures=True),
    "lamina-captured": lambda job: lamina_way(job, captures=True),
    "lamina-peer-captured": lambda job: lamina_way(job, transport="peer", captures=True),
    "bound-compiled": lambda job: bound(job, compiles=True),
    "fsdp2-compiled": lambda job: fsdp2(job, torch.float32, compiles=True),
    "lamina-compiled": lambda job: lamina_way(job, compiles=True),
    "lamina-peer-compiled": lambda job: lamina_way(job, transport="peer", compiles=True),
}
