"""`lamina.adopt`: a model that gains parameters while it trains equals one process that gains them.

Every job trains two steps, changes the model, and trains three more. The same function makes the change on both sides;
the optimizer that was there goes on, and gets a group for what is new.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lamina
from harness import run_ranks
from lamina.runtime.assemble import RUNTIMES
from parity.models import HIDDEN, UNITS, VOCABULARY, WIDTH, Block, LanguageModel, language_batch
from parity.reference import TOLERANCE, gradient_deviation, language_loss_of, parameter_deviation


class LowRank(nn.Module):
    """An adapter in peft's manner: it holds the layer that it adapts."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, 3, bias=False)
        self.lora_b = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


class Beside(nn.Module):
    """An adapter that takes the layer's weight over, and drops the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.low = nn.Parameter(torch.randn(3, base.in_features) * 0.2)
        self.high = nn.Parameter(torch.randn(base.out_features, 3) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + x @ self.low.t() @ self.high.t()


class Thick(nn.Module):
    """A head large enough for a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, 3 * HIDDEN), nn.Linear(3 * HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.up(x)))


def freeze_and_wrap(model: nn.Module) -> None:
    """The common case: a frozen base, and adapters in every block."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.mix = LowRank(block.up), LowRank(block.mix)


def wrap_everywhere(model: nn.Module) -> None:
    """A trained base; the layer that is wrapped is a unit by itself, or the weight moves into the adapter."""
    model.head = LowRank(model.head)
    model.blocks[0].down = Beside(model.blocks[0].down)
    model.blocks[2] = nn.Sequential(model.blocks[2], nn.Linear(WIDTH, WIDTH))


def replace_head(model: nn.Module) -> None:
    model.head = Thick()


def add_block(model: nn.Module) -> None:
    model.blocks.append(Block())
    model.blocks[0].norm.requires_grad_(False)


def wrap_anew(model: nn.Module) -> None:
    """Called a second time, replaces what it has added."""
    block = model.blocks[1]
    block.up = LowRank(block.up.base_layer if isinstance(block.up, LowRank) else block.up).double()


def replace_one(model: nn.Module) -> None:
    """One parameter of a unit goes, the others stay."""
    model.blocks[1].up = nn.Linear(WIDTH, HIDDEN)
    model.norm = nn.LayerNorm(WIDTH, bias=False)


CHANGES = {f.__name__: f for f in (freeze_and_wrap, wrap_everywhere, replace_head, add_block, replace_one)}


class Way(NamedTuple):
    strategy: str
    transport: str = "c10d"
    slots: int = 3
    optimizer: str = "torch"


class Job:
    """One side of the comparison."""

    def __init__(self, way: Way | None) -> None:
        torch.manual_seed(0)
        self.way, self.model = way, LanguageModel().double()
        if way is not None:
            mesh = None
            if way.strategy == "hsdp":
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            lamina.shard(self.model, way.strategy, mesh=mesh, units=UNITS, transport=way.transport, slots=way.slots)
        kind = lamina.optim.AdamW if way is not None and way.optimizer == "lamina" else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)

    def change(self, change: Callable[[nn.Module], None], **adopt: str) -> None:
        before = set(self.model.parameters())
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        try:
            change(self.model)
        finally:
            torch.set_default_dtype(torch.float32)
        new = [p for p in self.model.parameters() if p not in before]
        if self.way is not None:
            assert {id(p) for p in lamina.adopt(self.model, self.model, **adopt)} == {id(p) for p in new}
        self.optimizer.add_param_group({"params": new})

    def forget(self) -> None:
        """Take what was replaced out of the optimizer: a checkpoint has no name for it."""
        here = set(self.model.parameters())
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in here]
        for param in [p for p in self.optimizer.state if p not in here]:
            del self.optimizer.state[param]

    def end_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(plain: Job, job: Job, steps: range) -> float:
    """The largest difference of gradients and parameters on this rank."""
    worst = 0.0
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for step in steps:
        for other in range(world):
            (language_loss_of(plain.model, step, other, 0) / world).backward()
        language_loss_of(job.model, step, rank, 0).backward()
        worst = max(worst, gradient_deviation(job.model, {n: p.grad for n, p in plain.model.named_parameters()}))
        plain.end_step()
        job.end_step()
        worst = max(worst, parameter_deviation(job.model, {n: p.detach() for n, p in plain.model.named_parameters()}))
    return worst


def run(change: str, ways: list[Way]) -> dict[str, float]:
    found = {}
    for way in ways:
        plain, job = Job(None), Job(way)
        worst = train(plain, job, range(2))
        for each in (plain, job):
            each.change(CHANGES[change])
        worst = max(worst, train(plain, job, range(2, 5)))
        lamina.check(job.model)
        found[f"{change} {way}"] = worst
    return found


WAYS = [Way("zero3", slots=1), Way("zero1"), Way("zero3", "peer", optimizer="lamina"), Way("ddp"), Way("zero2", "peer")]


@pytest.mark.parametrize(
    ("change", "ways"),
    [
        ("freeze_and_wrap", WAYS),
        ("wrap_everywhere", WAYS[:2]),
        ("replace_head", WAYS[2:4]),
        ("add_block", [WAYS[0], WAYS[2]]),
        ("replace_one", WAYS[1:4]),
    ],
)
def test_adopted_parameters_train_as_in_one_process(change: str, ways: list[Way]) -> None:
    for found in run_ranks(2, run, change, ways):
        assert max(found.values()) <= TOLERANCE, found


def test_on_four_ranks_and_on_one() -> None:
    ways = [Way("hsdp", "peer", optimizer="lamina")]
    assert max(value for found in run_ranks(4, run, "freeze_and_wrap", ways) for value in found.values()) <= TOLERANCE
    assert max(run("wrap_everywhere", [Way("zero3")]).values()) <= TOLERANCE


def grow() -> None:
    """Gradients that wait for the optimizer stay; units come, are dropped and come again; a copy goes its own way."""
    rank = dist.get_rank()
    plain, job = Job(None), Job(Way("zero3", "peer", optimizer="lamina"))
    model, worst = job.model, train(plain, job, range(1))
    for other in range(2):
        (language_loss_of(plain.model, 1, other, 0) / 2).backward()
    language_loss_of(model, 1, rank, 0).backward()
    for each in (plain, job):
        each.change(wrap_anew)
        each.end_step()
    worst = max(worst, train(plain, job, range(2, 4)))
    rounds = RUNTIMES[model].engine.lockstep.rounds
    worst = max(worst, train(plain, job, range(4, 5)))
    assert RUNTIMES[model].engine.lockstep.rounds == rounds + 1, "but for its backward's end: programs were agreed on"
    for change in (wrap_anew, add_block, replace_one):
        for each in (plain, job):
            each.change(change)
        worst = max(worst, train(plain, job, range(5, 7)))
    assert worst <= TOLERANCE
    units = ["root+added", "embedding", "blocks.0", "blocks.1", "blocks.1+added", "blocks.2", "blocks.3", "head"]
    found = [unit.name for unit in lamina.report(model).units]
    assert found == units, found
    adopted = [RUNTIMES[model].units[number] for number in (0, 4, 6)]
    assert RUNTIMES[model].adopted_arena.nbytes == sum(unit.layout.buffer_bytes for unit in adopted)

    twin = copy.deepcopy(model)
    for each in (model, twin):
        language_loss_of(each, 8, rank, 0).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert not p.requires_grad or torch.equal(p.grad.local, q.grad.local)
    wrap_anew(twin)
    lamina.adopt(twin, twin, start="broadcast")
    language_loss_of(twin, 8, rank, 0).backward()
    assert twin.blocks[1].up.lora_b.weight.grad is not None


def test_again_and_again() -> None:
    run_ranks(2, grow)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def alike(job: Job, steps: range) -> None:
    """Steps whose batches do not depend on the rank."""
    for step in steps:
        language_loss_of(job.model, step, 0, 0).backward()
        job.end_step()


def save(path: Path, way: Way) -> None:
    job = Job(way)
    alike(job, range(2))
    job.change(wrap_everywhere)
    job.change(replace_one)
    job.forget()
    alike(job, range(2, 4))
    lamina.save(path, job.model, job.optimizer)


def load(path: Path, way: Way) -> float:
    """A new job makes the same change before it loads."""
    job, plain = Job(way), Job(None)
    job.change(wrap_everywhere)
    job.change(replace_one)
    job.forget()
    lamina.load(path, job.model, job.optimizer)
    alike(job, range(4, 6))
    alike(plain, range(2))
    plain.change(wrap_everywhere)
    plain.change(replace_one)
    plain.forget()
    alike(plain, range(2, 6))
    return parameter_deviation(job.model, {n: p.detach() for n, p in plain.model.named_parameters()})


def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path / "step-4", Way("zero3", "peer"))
    assert load(tmp_path / "step-4", Way("zero3")) <= TOLERANCE
    assert max(run_ranks(2, load, tmp_path / "step-4", Way("zero1"))) <= TOLERANCE


# ---- where values come from, dtypes --------------------------------------------------------------------------------


def begin(how: str) -> list[Tensor]:
    """The first adapter's values, from a generator that stands elsewhere on every rank."""
    model = Job(Way("zero3")).model
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(11 if how != "broadcast" or rank == 0 else 12)
    context = {"meta": torch.device("meta"), "deferred": lamina.deferred(seed=3)}.get(how, contextlib.nullcontext())
    with context:
        model.blocks[0].up = LowRank(model.blocks[0].up)
        model.statistics = nn.BatchNorm1d(2)
    torch.manual_seed(13 + rank)
    taken = lamina.adopt(model, model, start="broadcast" if how == "broadcast" else "check")
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    found = {"meta": "reset_parameters"}.get(how, "given" if how == "broadcast" else how)
    assert lamina.report(model).initialised["blocks.0.up.lora_a.weight"] == found
    return [p.full() if isinstance(p, lamina.Shard) else p.detach() for p in taken]


@pytest.mark.parametrize("how", ["meta", "deferred", "broadcast"])
def test_values_are_the_same_on_every_number_of_ranks(how: str) -> None:
    one, *ranks = begin(how), *run_ranks(2, begin, how)
    for values in ranks:
        assert all(map(torch.equal, one, values)), how


def adapters(late: bool, strategy: str, is_narrow: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Three steps in bf16 of adapters that were there before `shard()`, or are adopted."""
    torch.manual_seed(0)
    model = LanguageModel().to(torch.bfloat16 if is_narrow else torch.float32).requires_grad_(not is_narrow)

    def add() -> None:
        torch.manual_seed(5)
        for block in model.blocks:
            block.up, block.down = LowRank(block.up), nn.Sequential(block.down, LayerNormed())
        model.norm = nn.Sequential(model.norm, nn.LayerNorm(WIDTH))

    if not late:
        add()
    lamina.shard(model, strategy, units=UNITS, precision="bf16")
    if late:
        add()
        lamina.adopt(model, model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for step in range(3):
        language_loss_of(model, step, dist.get_rank(), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {n: p.full() if isinstance(p, lamina.Shard) else p.detach() for n, p in model.named_parameters()}
    return values, [unit.dtypes for unit in lamina.report(model).units if "added" in unit.name]


class LayerNormed(nn.Module):
    """Its `norm` is kept wide, by precision's pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.norm(x))


@pytest.mark.parametrize(("strategy", "is_narrow"), [("zero3", True), ("ddp", False)])
def test_late_adapters_are_those_that_were_there_from_the_start(strategy: str, is_narrow: bool) -> None:
    (early, _), *_ = run_ranks(2, adapters, False, strategy, is_narrow)
    (late, dtypes), *_ = run_ranks(2, adapters, True, strategy, is_narrow)
    assert dtypes == ["fp32 (fp32)", *["bf16 (fp32), fp32 (fp32)"] * 3]
    assert early.keys() == late.keys()
    for name, value in early.items():
        assert value.dtype is late[name].dtype and torch.equal(value, late[name]), name


# ---- the rest of the interface -------------------------------------------------------------------------------------


class Encoder(LanguageModel):
    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.encode(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


def use_everything(strategy: str, transport: str, options: dict[str, Any]) -> float:
    world, rank = dist.get_world_size(), dist.get_rank()

    def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
        return language_loss_of(model, step, rank, 0) + model.encode(language_batch(step + rank, 2)).pow(2).mean()

    def backward(model: nn.Module, step: int, parts: int = 1) -> None:
        ranks = range(world) if model is plain else [rank]
        for each in ranks:
            (loss_of(model, each, step) / parts / len(ranks)).backward()

    def compare() -> float:
        return gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()})

    torch.manual_seed(0)
    plain = Encoder().double()
    model = copy.deepcopy(plain)
    lamina.shard(model, strategy, transport=transport, entry_points=("encode",), **options)
    for each in (plain, model):
        backward(each, 0)
        each.zero_grad()
        each.requires_grad_(False)
        torch.manual_seed(1)
        for block in each.blocks:
            block.up = LowRank(block.up).double()
        each.blocks[1] = nn.Sequential(each.blocks[1], Recurrent().double())
    lamina.adopt(model, model)
    worst = 0.0
    for defer in (False, True):
        for micro in range(2):
            backward(plain, micro, 2)
            with lamina.accumulate(model, last=micro == 1, defer=defer):
                backward(model, micro, 2)
        worst = max(worst, compare())
    with lamina.keep(model):
        backward(model, 4)
        backward(model, 5)
    backward(plain, 4)
    backward(plain, 5)
    worst = max(worst, compare())
    for each in (plain, model):
        each.zero_grad()
        each.requires_grad_(True)
        backward(each, 6)
    return max(worst, compare())


@pytest.mark.parametrize(
    ("strategy", "transport", "options"),
    [
        ("zero3", "peer", {"slots": 1, "recompute": "full"}),
        ("zero1", "c10d", {"replicate": ["*norm*"], "recompute": 2}),
    ],
)
def test_scopes_entry_points_and_recomputation(strategy: str, transport: str, options: dict[str, Any]) -> None:
    assert max(run_ranks(2, use_everything, strategy, transport, options)) <= TOLERANCE
