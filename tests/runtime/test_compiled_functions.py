"""Functions of the user's that are compiled: with the model inside, with a backward and a step, with shards.

What waits for other ranks is not compiled, wherever it is called from; among operations that the compiler traces it
would be dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.core.uncompiled import uncompiled
from parity.reference import TOLERANCE

DIM, STEPS = 4, 2


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), nn.Linear(DIM, DIM, bias=False)).double()


def whole(value: Tensor) -> Tensor:
    return value.full() if isinstance(value, lamina.Shard) else value.detach().clone()


class Run:
    """One way to train: plain on all ranks' data, or sharded on this rank's."""

    def __init__(self, sharded: bool) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.ranks = [rank] if sharded else list(range(world))
        self.share = 1 if sharded else world
        self.model = lamina.shard(build(), units=["0", "1"], slots=1, transport="c10d") if sharded else build()
        self.sharded = sharded
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, backend="aot_eager") if self.sharded else fn

    def loss(self, step: int, rank: int) -> Tensor:
        x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        return self.model(x).square().mean() / self.share

    def values(self) -> list[Tensor]:
        return [whole(p) for p in self.model.parameters()]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def of_model_and_loss(run: Run) -> list[Tensor]:
    compiled = run.compile(lambda model, x: model(x).square().mean() / run.share)
    for step in range(STEPS):
        for rank in run.ranks:
            compiled(run.model, torch.full((3, DIM), 0.1 * rank + step + 1, dtype=torch.float64)).backward()
        run.update()
    return run.values()


def of_whole_step(run: Run) -> list[Tensor]:
    """Scopes, backward, clipping and update inside."""

    def train(step: int) -> None:
        if run.sharded:
            with lamina.accumulate(run.model, last=True), lamina.keep(run.model):
                run.loss(step, run.ranks[0]).backward()
            lamina.clip_grad_norm_(run.model, 0.1)
        else:
            for rank in run.ranks:
                run.loss(step, rank).backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        with torch.no_grad():
            for param in run.model.parameters():
                param.sub_(param.grad)
                param.grad = None

    compiled = run.compile(train)
    for step in range(STEPS):
        compiled(step)
    return run.values()


def of_clipping(run: Run) -> list[Tensor]:
    """By hand, over gradients."""

    def measure(grads: list[Tensor]) -> list[Tensor]:
        return [*torch._foreach_norm(grads), grads[0].abs().max(), grads[1].norm(), grads[2].square().sum()]

    compiled, seen = run.compile(measure), []
    for step in range(STEPS):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        with torch.no_grad():
            grads = [param.grad for param in run.model.parameters()]
            compiled(grads)
            seen += (norms := compiled(grads))  # it was traced already
            torch._foreach_mul_(grads, (0.01 / torch.stack(norms).norm()).clamp(max=1.0))
        run.update()
    return [*run.values(), *seen]


def of_penalties(run: Run) -> list[Tensor]:
    """Elementwise with a gradient, a sum, a norm: each alone and as a part of the loss."""

    def penalties(params: list[Tensor]) -> list[Tensor]:
        return [2 * params[0], params[1].pow(2).sum(), params[2].norm()]

    compiled, seen = run.compile(penalties), []
    for step in range(STEPS):
        for rank in run.ranks:
            product, squares, norm = compiled(list(run.model.parameters()))
            (run.loss(step, rank) + (product.sum() + squares + norm) / run.share).backward()
        seen += [whole(product), squares.detach(), norm.detach()]
        run.update()
    return [*run.values(), *seen]


def of_whole_values(run: Run) -> list[Tensor]:
    def look(param: Tensor) -> Tensor:
        if not run.sharded:
            return 2 * param.detach()[0]
        with lamina.gathered(param) as full:
            return full[0] + param.full()[0]

    return [run.compile(look)(param) for param in run.model.parameters()]


CASES = (of_model_and_loss, of_whole_step, of_clipping, of_penalties, of_whole_values)


def deviations() -> dict[str, float]:
    found = {}
    for case in CASES:
        torch._dynamo.reset()
        pairs = zip(case(Run(True)), case(Run(False)), strict=True)
        found[case.__name__] = max((got - want).abs().max().item() for got, want in pairs)
    return found


def test_compiled_functions_equal_one_process() -> None:
    for found in run_ranks(2, deviations, timeout=300):
        assert max(found.values()) <= TOLERANCE, found


def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3 * output


COMPILE_BLOCKS: dict[str, Callable[[nn.Module], Any]] = {
    "lamina's": lambda model: None,
    "in place": lambda model: [block.compile(backend="aot_eager") for block in model],
    "forwards": lambda model: [
        setattr(block, "forward", torch.compile(block.forward, backend="aot_eager")) for block in model
    ],
}


def hooked_layers() -> dict[str, float]:
    """Outputs where a layer in one of several equal blocks has a hook, from the start, later, and no more."""
    found, compiler = {}, torch.compile
    torch.compile = functools.partial(compiler, backend="aot_eager")
    try:
        for way, compile_blocks in COMPILE_BLOCKS.items():
            torch._dynamo.reset()
            plain, model = (nn.Sequential(*(build() for _ in range(3))) for _ in range(2))
            handles = [each[1][0][0].register_forward_hook(scaled) for each in (plain, model)]
            lamina.shard(model, units=["[0-2]"], compile=way == "lamina's")
            compile_blocks(model)
            worst = 0.0
            for step in range(4):
                if step == 1:
                    [each[2][1].register_forward_hook(scaled) for each in (plain, model)]
                if step == 2:
                    [handle.remove() for handle in handles]
                x = torch.full((2, DIM), step + 1.0, dtype=torch.float64)
                worst = max(worst, (plain(x) - model(x)).abs().max().item())
            found[way] = worst
    finally:
        torch.compile = compiler
    return found


def test_hooks_on_layers_of_equal_compiled_blocks_are_called() -> None:
    for found in run_ranks(2, hooked_layers, timeout=120):
        assert max(found.values()) <= TOLERANCE, found


def messages() -> list[str]:
    """Of what is refused without the compiler, and of fullgraph=True."""
    run, said = Run(True), []
    weight = run.model[1].weight
    detached = weight.detach()
    for fn, options in (
        (lambda: torch.ones(1, DIM, dtype=torch.float64) @ weight, {}),
        (lambda: run.model(torch.ones(1, DIM, dtype=torch.float64)), {"fullgraph": True}),
        (lambda: detached.norm(), {"fullgraph": True}),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception) as raised:
            torch.compile(fn, backend="aot_eager", **options)()
        said.append(f"{type(raised.value).__name__}: {raised.value}")
    return said


def test_what_is_not_compiled_is_named() -> None:
    for refused, model, norm in run_ranks(2, messages, timeout=120):
        assert refused.startswith("ShardOpError: `") and "`1.weight`" in refused
        assert "lamina.shard(..., compile=True)" in model
        assert "waits for other ranks" in norm and "`1.weight`" in norm


def test_a_torch_with_other_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")
    method = uncompiled(lambda self, number: number + 1)
    assert method(None, 1) == 2 and method._torchdynamo_disable
    assert type("Owner", (), {"method": method})().method(1) == 2, "it is bound like any other"
