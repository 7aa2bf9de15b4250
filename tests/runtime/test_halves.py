"""`Precision(halves=True)`: every master as its published bf16 weight and 16 bits more, and never another number."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.core.halves import halve, join
from lamina.core.lanes import Lanes
from lamina.core.shard_tensor import Shard
from lamina.errors import UsageError
from lamina.optim import AdamW, capture
from lamina.runtime.access import runtime_of
from lamina.runtime.halved import HalvedMaster, may_be_halved
from optim.training import Block, Model, batch, groups_of
from transport.test_symmetric import shard_symmetrically

BF16 = torch.bfloat16


# ---- numbers -------------------------------------------------------------------------------------------------------


def numbers_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def special_numbers() -> Tensor:
    """Every upper half with every kind of lower half: ties, their neighbours, both ends."""
    upper = torch.arange(-0x8000, 0x8000).view(-1, 1) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return numbers_of((upper | lower).flatten())


def test_every_number_comes_back() -> None:
    """Denormals, zeros of both signs, infinities, ties: bit for bit. NaN stay NaN."""
    numbers = torch.cat([special_numbers(), numbers_of(torch.arange(-(2**31), 2**31, 40_503))])
    weights, remainders = torch.empty_like(numbers, dtype=BF16), torch.empty_like(numbers, dtype=torch.int16)
    halve(numbers, weights, remainders)
    back = torch.empty_like(numbers)
    join(weights, remainders, back)
    bits, nan = numbers.view(torch.int32), numbers.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], bits[~nan])
    assert torch.equal(back.isnan(), nan) and torch.equal(weights.isnan(), nan)
    is_tie = (bits & 0xFFFF) == 0x8000
    cast = numbers.to(BF16)
    plain = ~nan & ~is_tie
    assert torch.equal(weights[plain].view(torch.int16), cast[plain].view(torch.int16)), "torch's rounding"
    ties = is_tie & ~nan
    away = numbers_of((bits[ties] + 0x8000) & ~0xFFFF)
    assert torch.equal(weights[ties].float(), away), "ties go away from zero"


def test_pigeons_have_no_other_hole() -> None:
    """Note [Ties]: with torch's rounding an even weight has one number more than 16 bits can tell apart."""
    around = numbers_of(torch.arange(0x3F7E0000, 0x3F820001))
    counts = [int((around.to(BF16) == weight).sum()) for weight in (1.0, numbers_of(torch.tensor([0x3F810000]))[0])]
    assert counts == [65_537, 65_535]


def test_two_forms() -> None:
    lanes = Lanes(torch.device("cpu"))
    numbers = torch.randn(1000)
    weights = torch.zeros(1000, dtype=BF16)
    master = HalvedMaster(numbers.clone(), weights, lanes)
    assert master.make_whole() is master.make_whole() and not weights.any(), "whole, and nothing published"
    kept = master.make_whole()[3:7]
    assert not master.make_halves(lanes.compute), "a piece is held"
    assert torch.equal(weights, numbers.to(BF16))
    kept.fill_(2.0)
    del kept
    assert master.make_halves(lanes.compute) and master.whole is None
    numbers[3:7] = 2.0
    assert torch.equal(weights, numbers.to(BF16)), "written after it was published"
    assert torch.equal(master.read(2, 9), numbers[2:9])
    master.write(5, torch.full((3,), -1.5))
    numbers[5:8] = -1.5
    assert torch.equal(master.make_whole(), numbers)
    assert torch.isnan(master.husk).all()


# ---- training ------------------------------------------------------------------------------------------------------


def make(halves: bool, strategy: Any = "zero3", shard: Callable[..., nn.Module] = lamina.shard) -> nn.Module:
    precision = lamina.Precision(compute=BF16, halves=halves)
    model = shard(Model(dtype=torch.float32), strategy, units=[Block], transport="peer", precision=precision)
    if not halves:
        publish_ties_away(model)
    return model


def publish_ties_away(model: nn.Module, twin: nn.Module | None = None) -> None:
    """In a model that keeps its masters whole; all else stays torch's cast. `twin`: only where it has halves."""
    runtime = runtime_of(model)
    gatherer: Any = runtime.engine.gatherer
    before = gatherer._cast

    def cast(units: Any) -> None:
        before(units)
        for unit in units:
            for number, segment in enumerate(unit.layout.segments):
                if may_be_halved(segment) if twin is None else number in runtime_of(twin).units[unit.index].halved:
                    master = unit.masters[number]
                    halve(master, unit.published[number], torch.empty_like(master, dtype=torch.int16))

    gatherer._cast = cast


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "clipped": lambda model: AdamW(groups_of(model), max_norm=0.5),
    "AdamW": lambda model: AdamW(groups_of(model)),
    "SGD": lambda model: torch.optim.SGD(groups_of(model), momentum=0.9),
}


def backward(model: nn.Module, step: int) -> None:
    model(batch(step, dist.get_rank(), torch.float32), step % 2 == 0).float().pow(2).mean().backward()


class Life:
    """What people do with a model between and in steps; `held` is a piece of memory that they keep."""

    STEPS = 9

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.held = model, optimizer, torch.empty(0)
        self.seen = torch.empty(0)  # what a late rank's evaluation gave

    def step(self, number: int) -> None:
        backward(self.model, number)
        if number == 1:
            self._evaluate()
        self._before(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def _evaluate(self) -> None:
        """One rank is late: the others have come to their step, and may not change what it reads."""
        late = self.model.blocks[0].register_forward_hook(lambda *_: time.sleep(0.2 * dist.get_rank()))
        self.seen = self.model(batch(50, dist.get_rank(), torch.float32))
        late.remove()

    @torch.no_grad()
    def _before(self, number: int) -> None:
        """Between backward and step."""
        weight = self.model.head.weight
        if number == 2:
            float(weight.norm())
        if number == 3:
            weight.mul_(1.01)
        if number == 4:
            self.held = weight.local

    @torch.no_grad()
    def edit(self, number: int) -> None:
        """After step `number`."""
        model = self.model
        if number in (4, 5):  # 5: after it has been published once
            self.held.add_(0.01)
            lamina.sync(model)
        if number == 5:
            self.held = torch.empty(0)
        if number == 6:
            model.load_state_dict({n: v * 2 for n, v in model.state_dict().items() if "head" in n}, strict=False)
        if number == 7:
            with lamina.gathered(model.blocks, write=True):
                model.blocks[0].up.weight.clamp_(-0.2, 0.2)


def bits_of(model: nn.Module) -> list[Tensor]:
    """Of all masters, without making any whole."""
    return [t.view(torch.int32).clone() for unit in runtime_of(model).units for t in unit.read_masters()]


def published_by(model: nn.Module) -> list[Tensor]:
    return [t.clone().view(torch.uint8) for unit in runtime_of(model).units for t in unit.published]


def are_whole(model: nn.Module) -> bool:
    return any(unit.has_whole_masters for unit in runtime_of(model).units)


def lives_equal(kind: str, strategy: Any, shard: Callable[..., nn.Module] = lamina.shard) -> list[str]:
    """Where masters, or what forwards read, are not bit for bit those of masters that are kept whole."""
    whole, halved = models = [make(halves, strategy, shard) for halves in (False, True)]
    lives = [Life(model, OPTIMIZERS[kind](model)) for model in models]
    differ = []
    for number in range(Life.STEPS):
        for act in (Life.step, Life.edit):
            for life in lives:
                act(life, number)
            if not all(map(torch.equal, bits_of(whole), bits_of(halved))):
                differ.append(f"{kind}: {act.__name__} {number}")
        if not torch.equal(lives[0].seen, lives[1].seen):
            differ.append(f"{kind}: evaluated in step {number}")
        if kind.startswith("clipped") and number in (0, 1, 8):
            assert not are_whole(halved), f"{kind}: the step writes both halves"
    for model in models:
        model(batch(99, dist.get_rank(), torch.float32)).float().sum().backward()
    if not all(map(torch.equal, published_by(whole), published_by(halved))):
        differ.append(f"{kind}: published in the end")
    assert not are_whole(halved), kind
    theirs, ours = (lamina.report(model).memory["masters"] for model in models)
    numel = sum(master.numel for unit in runtime_of(halved).units for master in unit.halved.values())
    assert numel > 0 and theirs - ours == 2 * numel, (theirs, ours, numel)
    return differ


def all_lives() -> list[str]:
    found = [line for kind in ("clipped", "AdamW") for line in lives_equal(kind, "zero3")]
    return found + [f"as on GPUs, {line}" for kind in ("clipped", "SGD") for line in lives_symmetric(kind)]


def lives_symmetric(kind: str) -> list[str]:
    return lives_equal(kind, "zero3", shard_symmetrically)


def test_training_is_bitwise_that_of_whole_masters() -> None:
    assert run_ranks(2, all_lives) == [[], []]


def test_replicas() -> None:
    assert run_ranks(4, lives_equal, "clipped", lamina.Strategy(2, 2, 2)) == [[]] * 4


# ---- beside training -----------------------------------------------------------------------------------------------


def trained(halves: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(halves)
    optimizer = OPTIMIZERS["clipped"](model)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def exchange(folder: str) -> list[str]:
    """A checkpoint of either kind goes on as the other, bit for bit; `state_dict` shows the same numbers."""
    wrong = []
    for halves in (False, True):
        model, optimizer = trained(halves)
        lamina.save(Path(folder) / str(halves), model, optimizer)
        other, of_other = make(not halves), None
        of_other = OPTIMIZERS["clipped"](other)
        lamina.load(Path(folder) / str(halves), other, of_other)
        for number in (2, 3):
            if not all(map(torch.equal, bits_of(model), bits_of(other))):
                wrong.append(f"saved with halves={halves}, before step {number}")
            for each, steps in ((model, optimizer), (other, of_other)):
                backward(each, number)
                steps.step()
                steps.zero_grad()
        if are_whole(model) or are_whole(other):
            wrong.append("whole again")
        pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        wrong += [f"state_dict {a.name}" for a, b in pairs if not torch.equal(a.full(), b.full())]
    return wrong


def copies() -> list[str]:
    """A deep copy, an average that is swapped in, a pickled parameter, an adopted layer: all of one model in halves."""
    model, optimizer = trained(True)
    wrong, before = [], bits_of(model)
    with pytest.raises(UsageError, match="does not record"):
        capture.keep_masters_whole()  # what a captured step does first, on GPUs
    twin = copy.deepcopy(model)
    x = batch(7, dist.get_rank(), torch.float32)
    if not torch.equal(twin(x), model(x)) or not all(map(torch.equal, bits_of(twin), before)):
        wrong.append("deepcopy")
    if not runtime_of(twin).units[0].halved or are_whole(twin):
        wrong.append("the copy has whole masters")
    with torch.no_grad():
        average = [p.detach().clone().mul_(0.5) for p in model.parameters()]
        wanted = model(x)
        for _ in range(2):
            for p, ema in zip(model.parameters(), average, strict=True):
                kept = p.detach().clone()
                p.copy_(ema)
                ema.copy_(kept)
            seen = model(x)
    if not torch.equal(seen, wanted) or not all(map(torch.equal, bits_of(model), before)):
        wrong.append("average")
    weight = model.head.weight
    alias = weight.detach()
    with torch.no_grad():
        alias.add_(1.0)
        model(x)
        alias.sub_(1.0)
        weight.mul_(2)
        if not torch.equal(alias, weight) or are_whole(twin):
            wrong.append("alias")
        weight.data = weight.data * 2  # other memory, as in torch: an alias keeps its values
        if not torch.equal(alias * 2, weight):
            wrong.append("alias of what was there")
        before = [p.detach().clone() for p in model.parameters()]
        model.to_empty(device="cpu")
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
        wanted = model(x)
        again = [p.detach().clone() for p in model.parameters()]
        if not all(map(torch.equal, before, again)) or not torch.equal(model(x), wanted) or are_whole(model):
            wrong.append("memory of its own, or what was only read stays whole")
    model.extra = nn.Linear(13, 3)
    optimizer.add_param_group({"params": lamina.adopt(model, model.extra, start="broadcast")})
    whole = [p.full() for p in model.parameters()]
    backward(model, 4)
    for p, value in zip(model.parameters(), whole, strict=True):
        if not torch.equal(p.full(), value):
            wrong.append(f"adopt: {p.name}")
    lamina.check(model)
    return wrong


def from_a_fork() -> list[str]:
    """What the child of a rank, which trains on, reads of a parameter in halves and of one that was whole."""
    model, optimizer = trained(True)
    params = {"halved": model.blocks[0].up.weight, "whole": model.head.weight}
    before, said = params["whole"].local.clone(), []
    for param in params.values():
        (go, start), (answer, reply) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.read(go, 1)
                os.write(reply, str(torch.equal(param.local, before)).encode())
            except BaseException as error:
                os.write(reply, str(error).encode())
            finally:
                os._exit(0)
        backward(model, 3)
        optimizer.step()
        optimizer.zero_grad()
        os.write(start, b"!")
        said.append(os.read(answer, 1000).decode())
        os.waitpid(child, 0)
        for end in (go, start, answer, reply):
            os.close(end)
        before = params["whole"].local.clone()
    return said


def test_a_forked_process_reads_no_halves_that_its_rank_goes_on_writing() -> None:
    for rank, (halved, whole) in enumerate(run_ranks(2, from_a_fork, timeout=60)):
        assert halved.startswith(f"this process was forked from rank {rank}, which goes on writing"), halved
        assert whole == "True"


def beside(folder: str) -> list[str]:
    return exchange(folder) + copies()


def test_what_is_made_of_the_masters() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(2, beside, folder) == [[], []]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"compute": torch.float16}, {}, r"halves=True, compute=torch.float16.*compute=torch.bfloat16"),
    ({"compute": None}, {}, "Type compute=torch.bfloat16"),
    ({"master": torch.float64}, {}, "master=torch.float32"),
    ({}, {"transport": "c10d"}, "type transport='peer'"),
    ({}, {"strategy": "ddp"}, r"not over 1 and 1 ranks.*'zero3'"),
    ({}, {"strategy": "zero2"}, r"not over 1 and 2 ranks"),
]


def refusals() -> None:
    for dtypes, options, words in REFUSED:
        model = Model(dtype=torch.float32)
        with pytest.raises(UsageError, match=words):
            lamina.shard(model, precision=lamina.Precision(**({"compute": BF16, "halves": True} | dtypes)), **options)
        assert not isinstance(model.head.weight, Shard), "nothing has been changed"
    model = lamina.shard(Model(dtype=torch.float32), precision=lamina.Precision(compute=BF16, halves=True))
    assert lamina.report(model).transport == "peer", "auto is, where halves are asked for"


def test_refusals() -> None:
    run_ranks(2, refusals)


def alone() -> str:
    model = lamina.shard(Model(dtype=torch.float32), precision=lamina.Precision(compute=BF16, halves=True))
    model(batch(0, 0, torch.float32)).sum().backward()
    return lamina.report(model).transport


def test_one_rank_has_nothing_to_halve() -> None:
    assert run_ranks(1, alone) == ["c10d"]
