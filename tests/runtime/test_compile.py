"""`compile=True`: the runtime adds no graph break, nothing is compiled again after the first step, and numbers stay."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
from harness import run_ranks
from parity.models import UNITS, build, language_batch, language_loss
from parity.reference import TOLERANCE, gradient_deviation


def compiled(strategy: str, slots: int, recompute: str) -> tuple[float, int, int]:
    """Deviation of four steps' gradients, graph breaks, and graphs compiled after the first step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiler = torch.compile
    torch.compile = functools.partial(compiler, backend="aot_eager")  # what is looked at is the tracing
    try:
        model = lamina.shard(build(blocks=2), strategy, units=UNITS, slots=slots, recompute=recompute, compile=True)
        plain, worst, graphs = build(blocks=2), 0.0, []
        for step in range(4):
            for rank in range(dist.get_world_size()):
                (language_loss(plain, language_batch(10 * step + rank, 2)) / dist.get_world_size()).backward()
            language_loss(model, language_batch(10 * step + dist.get_rank(), 2)).backward()
            worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in plain.named_parameters()}))
            with torch.no_grad():
                for each in (plain, model):
                    for param in each.parameters():
                        param.sub_(param.grad, alpha=0.1)
                        param.grad = None
            graphs.append(counters["stats"]["unique_graphs"])
    finally:
        torch.compile = compiler
    assert graphs[0] >= 3, "nothing was compiled"
    return worst, sum(counters["graph_break"].values()), graphs[-1] - graphs[0]


@pytest.mark.parametrize(("strategy", "slots", "recompute"), [("zero3", 1, "none"), ("zero3", 3, "full")])
def test_compiled_units_equal_one_process_without_breaks(strategy: str, slots: int, recompute: str) -> None:
    for worst, breaks, again in run_ranks(2, compiled, strategy, slots, recompute, timeout=120):
        assert worst <= TOLERANCE
        assert (breaks, again) == (0, 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x))


def graphs_of(blocks: int) -> int:
    """How many graphs a step of so many equal blocks is compiled into, their norms computing wide."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiler = torch.compile
    torch.compile = functools.partial(compiler, backend="aot_eager")
    try:
        model = lamina.shard(
            nn.Sequential(*(Block() for _ in range(blocks))), units=[Block], precision="bf16", compile=True
        )
        model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    finally:
        torch.compile = compiler
    return counters["stats"]["unique_graphs"]


def test_equal_blocks_are_compiled_once() -> None:
    """torch compiles one function at most eight times; from then on it runs uncompiled, and says nothing."""
    for few, many in zip(run_ranks(2, graphs_of, 1), run_ranks(2, graphs_of, 12), strict=True):
        assert 0 < many == few


COMPILED_BY_THE_USER = {
    "blocks": lambda model: [block.compile(backend="aot_eager") for block in model.blocks],
    "all": lambda model: model.compile(backend="aot_eager"),
}


def compiled_by_the_user() -> list[tuple[float, int, bool]]:
    """By way: deviation of three steps' gradients, graphs, and whether the compiler went into the runtime's hooks."""
    from torch._dynamo.utils import counters

    from lamina.runtime.hooks import ModuleHooks

    found, entries = [], torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    for compile_parts in COMPILED_BY_THE_USER.values():
        torch._dynamo.reset()
        counters.clear()
        plain, model, worst = build(blocks=2), lamina.shard(build(blocks=2), units=UNITS), 0.0
        compile_parts(model)
        for step in range(3):
            for rank in range(dist.get_world_size()):
                (language_loss(plain, language_batch(10 * step + rank, 2)) / dist.get_world_size()).backward()
            language_loss(model, language_batch(10 * step + dist.get_rank(), 2)).backward()
            worst = max(worst, gradient_deviation(model, {name: p.grad for name, p in plain.named_parameters()}))
            plain.zero_grad()
            model.zero_grad()
        hooks = [getattr(each, "__wrapped__", each) for each in vars(ModuleHooks).values() if callable(each)]
        went_in = any(entries(hook.__code__) for hook in hooks if hasattr(hook, "__code__"))
        found.append((worst, counters["stats"]["unique_graphs"], went_in))
    return found


def test_modules_that_the_user_compiles() -> None:
    for found in run_ranks(2, compiled_by_the_user, timeout=120):
        for way, (worst, graphs, went_in) in zip(COMPILED_BY_THE_USER, found, strict=True):
            assert worst <= TOLERANCE and not went_in, (way, worst, went_in)
            assert graphs > 0 or way == "all", f"{way}: nothing was compiled"


class Counting(nn.Module):
    """A block that may change in each forward."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.up, self.changes, self.calls = nn.Linear(8, 8), changes, 0
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.calls += 1
            self.scale += 0.1
        return torch.tanh(self.up(x) * self.scale) * (1 + self.calls)


def compiled_and_recomputed(changes: bool, recompute: str) -> tuple[float, int]:
    """Deviation of a compiled model's gradients and buffers from the interpreted one's; operations compiled."""
    from torch._dynamo.utils import counters

    found = []
    for how, compile_model in (("none", lambda model: model), (recompute, COMPILED)):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), *(Counting(changes) for _ in range(2))).double()
        call = compile_model(lamina.shard(model, units=[Counting], recompute=how))
        for step in range(4):
            call(torch.full((2, 8), 0.1 * step + dist.get_rank(), dtype=torch.float64)).square().sum().backward()
        found.append([param.grad.full() for param in model.parameters()] + list(model.buffers()))
    worst = max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))
    return worst, counters["stats"]["calls_captured"]


COMPILED = functools.partial(torch.compile, backend="aot_eager")


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("changes", [False, True])
def test_a_compiled_model_whose_blocks_are_recomputed(changes: bool, recompute: str) -> None:
    """What changes is left to the interpreter, and what is kept selectively; other blocks are compiled."""
    for worst, operations in run_ranks(2, compiled_and_recomputed, changes, recompute, timeout=120):
        assert worst <= TOLERANCE
        assert operations >= 3 or changes or recompute == "selective"
