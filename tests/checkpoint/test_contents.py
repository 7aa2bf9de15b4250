"""What belongs to ranks, what is written once, what is refreshed: the parts of a checkpoint one by one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import lamina
from checkpoint.training import UNITS, build, make_optimizer, own_bits, train
from harness import expect_error, run_ranks
from lamina.checkpoint.commands import main
from lamina.checkpoint.snapshot import restore_random_states
from parity.models import build as language_model
from parity.models import language_batch, language_loss

STRATEGIES = {1: ["zero3"], 2: ["ddp", "zero3"], 4: ["ddp", lamina.Strategy(2, 2, 2)]}


# -- once


def save_simply(path: str, strategy: Any) -> int:
    """Returns the bytes of all that is saved, each element once."""
    model = lamina.shard(build(), strategy, units=UNITS)
    optimizer = make_optimizer("torch", model)
    train(model, optimizer, range(1))
    lamina.save(path, model, optimizer)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() * p.element_size() for p in model.parameters()) + model.forwards.element_size()
    return whole + 2 * trained  # and two moments


def test_every_element_is_written_once_and_by_all_ranks(tmp_path: Path) -> None:
    for world, strategies in STRATEGIES.items():
        for number, strategy in enumerate(strategies):
            path = tmp_path / f"{world}-{number}"
            wanted_bytes = run_ranks(world, save_simply, str(path), strategy)[0]
            manifest = json.loads((path / "manifest.json").read_text())
            written_bytes = []
            for file in manifest["files"]:
                tensors = load_file(path / file["name"])  # safetensors reads them without lamina
                kept = [t for key, t in tensors.items() if not key.startswith("random")]
                written_bytes.append(sum(t.numel() * t.element_size() for t in kept))
            assert sum(written_bytes) == wanted_bytes, (world, strategy)
            if strategy == "ddp":  # elsewhere the layout's alignment decides, which is coarse for a model so small
                assert len(written_bytes) == world and min(written_bytes) > 0.6 * max(written_bytes), written_bytes
            assert "head.weight" not in manifest["parameters"] and manifest["ties"] == {
                "head.weight": "embedding.weight"
            }
            assert "not_kept" not in manifest["buffers"] and manifest["buffers"]["forwards"]["file"] is not None


# -- what belongs to a rank


class Statistics(nn.Module):
    """Buffers that differ over ranks, buffers that do not, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        self.register_buffer("same", torch.arange(3))
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))

    def get_extra_state(self) -> Any:
        return {"notes": self.notes, "at": torch.tensor([len(self.notes)])}

    def set_extra_state(self, state: Any) -> None:
        self.notes = state["notes"]


def dice() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def save_what_differs(path: str) -> tuple[Tensor, list[float]]:
    rank = dist.get_rank()
    model = lamina.shard(Statistics())
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)))
    model.notes = ["a", 1]
    for _ in range(rank):
        dice()
    lamina.save(path, model, extra={"position": torch.tensor([10 + rank])})
    return model.norm.running_mean.clone(), dice()


def load_what_differs(path: str) -> tuple[Tensor, list[float], Any, Any]:
    model = lamina.shard(Statistics())
    extra = lamina.load(path, model)
    return model.norm.running_mean.clone(), dice(), int(extra["position"]), model.notes


def test_values_that_differ_over_ranks_come_back_to_their_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    saved = run_ranks(2, save_what_differs, path)
    assert not torch.equal(saved[0][0], saved[1][0]) and saved[0][1] != saved[1][1]
    buffers = json.loads((tmp_path / "a" / "manifest.json").read_text())["buffers"]
    assert buffers["norm.running_mean"]["file"] is None and buffers["same"]["file"] is not None
    for rank, (mean, rolled, position, notes) in enumerate(run_ranks(2, load_what_differs, path)):
        assert torch.equal(mean, saved[rank][0]) and rolled == saved[rank][1]
        assert position == 10 + rank and notes == ["a", 1]
    torch.manual_seed(0)
    untouched = run_ranks(1, only_dice)[0]
    mean, rolled, position, notes = run_ranks(1, load_what_differs, path)[0]
    assert torch.equal(mean, saved[0][0]) and position == 10 and notes == ["a", 1]
    assert rolled[:2] == untouched[:2]  # another world: random states are left as they are (torch's moved by the model)


class Counting(torch.optim.SGD):
    """Has an entry of its own in its `state_dict()`, and a state of no parameter."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict(state_dict)


def test_converting_keeps_what_stands_beside_tensors(tmp_path: Path) -> None:
    model = lamina.shard(Statistics())
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    model.notes, optimizer.count, optimizer.state["all"] = ["a", 1], 7, {"b": 2}  # type: ignore[index]
    lamina.save(tmp_path / "a", model, optimizer)
    for source, kind in (("a", "torch"), ("torch", "lamina")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / kind), "--to", kind]) == 0
        other = lamina.shard(Statistics())
        loaded = Counting(other.parameters(), lr=0.1, momentum=0.9)
        lamina.load(tmp_path / kind, other, loaded)
        assert (other.notes, loaded.count, loaded.state["all"]) == (["a", 1], 7, {"b": 2})  # type: ignore[index]
    saved, plain = torch.load(tmp_path / "torch"), Statistics()
    plain.load_state_dict(saved["model"])
    assert plain.notes == ["a", 1] and saved["optimizer"]["count"] == 7


def only_dice() -> list[float]:
    return dice()


def test_random_states_are_exact() -> None:
    python, numpy, mine = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    assert run_ranks(1, random_states_there_and_back)[0]
    assert random.getstate() == python and torch.equal(torch.get_rng_state(), mine)
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], numpy["state"]["key"])


def random_states_there_and_back() -> bool:
    from lamina.checkpoint.snapshot import random_states
    from lamina.runtime.access import runtime_of

    random.gauss(0, 1)  # leaves half of a pair behind
    runtime = runtime_of(lamina.shard(nn.Linear(2, 2)))
    states = random_states(runtime)
    first = [*dice(), random.gauss(0, 1)]
    restore_random_states(states, runtime.device)
    return first == [*dice(), random.gauss(0, 1)]


# -- every copy is refreshed


def load_into_a_used_model(folder: str, strategy: Any, precision: str | None, transport: str) -> list[float]:
    """Losses before a save, and after a load into a model that has gathered other weights already."""
    options: dict[str, Any] = {"units": ["0", "1"], "precision": precision, "transport": transport}

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return lamina.shard(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), strategy, **options)

    x = torch.ones(2, 9)
    model, other = made(0), made(1)
    wanted, before = float(model(x).square().sum()), float(other(x).square().sum())
    lamina.save(f"{folder}/a", model)
    kept = [float(other(x).square().sum())]
    lamina.load(f"{folder}/a", other)
    return [wanted, float(other(x).square().sum()), before, *kept]


def test_a_load_refreshes_masters_published_shards_and_slots(tmp_path: Path) -> None:
    cases = [("ddp", None, "c10d"), ("ddp", "bf16", "c10d"), ("zero3", "bf16", "c10d"), ("zero3", None, "peer")]
    cases += [(lamina.Strategy(1, 2, 2), "bf16", "c10d")]
    for case in cases:
        for wanted, found, before, kept in run_ranks(2, load_into_a_used_model, str(tmp_path), *case):
            assert found == wanted and before == kept != wanted, case


def load_before_the_backward(path: str) -> list[str]:
    said = []
    for strategy in ("ddp", "zero3"):
        model = lamina.shard(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), strategy)
        lamina.save(path, model)
        loss = model(torch.ones(2, 9)).square().sum()
        lamina.load(path, model)
        try:
            loss.backward()
            said.append(f"{strategy}: no error")
        except (RuntimeError, lamina.StateError) as error:
            said.append(str(error))
    return said


def test_a_load_between_a_forward_and_its_backward_is_an_error(tmp_path: Path) -> None:
    for replicated, sharded in run_ranks(2, load_before_the_backward, str(tmp_path / "a")):
        assert "modified by an inplace operation" in replicated and "changed between its forward" in sharded


def go_on_in_bf16(folder: str) -> list[bool]:
    """Masters in fp32 and compute in bf16: bitwise at the same layout, clipping and a schedule included."""

    def steps(model: nn.Module, optimizer: Any, schedule: Any, numbers: range) -> list[float]:
        losses = []
        for step in numbers:
            loss = language_loss(model, language_batch(10 * step + dist.get_rank(), 2))
            loss.backward()
            lamina.clip_grad_norm_(model, 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def made(seed: int) -> tuple[nn.Module, Any, Any]:
        model = lamina.shard(language_model(seed=seed).float(), "zero3", precision="bf16")
        optimizer = make_optimizer("lamina", model)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    model, optimizer, schedule = made(0)
    steps(model, optimizer, schedule, range(2))
    lamina.save(f"{folder}/a", model, optimizer, extra=schedule.state_dict())
    losses = steps(model, optimizer, schedule, range(2, 5))
    other, other_optimizer, other_schedule = made(1)
    steps(other, other_optimizer, other_schedule, range(1))
    other_schedule.load_state_dict(lamina.load(f"{folder}/a", other, other_optimizer))
    again = steps(other, other_optimizer, other_schedule, range(2, 5))
    return [losses == again, *map(torch.equal, own_bits(model, optimizer), own_bits(other, other_optimizer))]


def test_going_on_in_bf16_is_bitwise(tmp_path: Path) -> None:
    assert all(map(all, run_ranks(2, go_on_in_bf16, str(tmp_path))))


# -- ties, and parameters that lamina leaves alone


class Pair(nn.Module):
    def __init__(self, tied: bool, equal: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.left = nn.Linear(5, 5).requires_grad_(False)
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight if equal else self.a.weight + 1)
        if tied:
            self.b.weight = self.a.weight


def load_ties(folder: str, saved_tied: bool, equal: bool) -> list[Tensor]:
    torch.manual_seed(0)
    saved = Pair(saved_tied, equal)
    wanted, left = saved.a.weight.detach().clone(), saved.left.weight.detach().clone()
    lamina.save(f"{folder}/a", lamina.shard(saved, ignore=["left*"]))
    other = lamina.shard(Pair(not saved_tied))
    lamina.load(f"{folder}/a", other)
    with lamina.gathered([other.a.weight, other.b.weight, other.left.weight]) as (a, b, c):
        return [a, b, wanted, c, left]


def test_ties_that_come_and_go(tmp_path: Path) -> None:
    for saved_tied in (True, False):
        for a, b, wanted, c, left in run_ranks(2, load_ties, str(tmp_path), saved_tied, True):
            assert torch.equal(a, wanted) and torch.equal(b, wanted) and torch.equal(c, left)
    words = ["`a.weight`", "`b.weight`", "different values"]
    expect_error(2, load_ties, str(tmp_path), False, False, error="CheckpointError", contains=words)


# -- states that are not cut like their parameter


class Odd(torch.optim.Optimizer):
    """Keeps a vector, a number and nothing beside each matrix."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5), "names": ("x", None)})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "row": torch.full((3,), float(p.ndim)),
                    "count": 7,
                    "none": None,
                    "at": torch.tensor(2.5),
                }


def odd_states(folder: str) -> list[bool]:
    model = lamina.shard(build(), "zero3", units=UNITS)
    optimizer = Odd([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    lamina.save(f"{folder}/a", model, optimizer)
    rate = torch.tensor(0.1)
    other = Odd([p for p in model.parameters() if p.requires_grad])
    other.param_groups[0]["lr"] = rate
    lamina.load(f"{folder}/a", model, other)
    group = other.param_groups[0]
    right = [group["lr"] is rate, float(rate) == 0.5, group["names"] == ("x", None)]
    for p in group["params"]:
        mine, theirs = other.state[p], optimizer.state[p]
        right.append(torch.equal(mine["row"], theirs["row"]) and torch.equal(mine["at"], theirs["at"]))
        right.append(mine["count"] == 7 and mine["none"] is None and mine.keys() == theirs.keys())
    return right


def test_odd_optimizer_states(tmp_path: Path) -> None:
    assert all(map(all, run_ranks(2, odd_states, str(tmp_path))))


class Strided(nn.Module):
    """Buffers whose elements do not lie one after the other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        torch.manual_seed(seed)
        self.register_buffer("turned", torch.randn(3, 4).t())
        self.register_buffer("every_other", torch.randn(8)[::2])
        self.register_buffer("repeated", torch.randn(3, 1).expand(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_buffers_that_are_views(tmp_path: Path) -> None:
    saved, model = lamina.shard(Strided(0)), lamina.shard(Strided(1))
    lamina.save(tmp_path / "a", saved)
    before = dict(model.named_buffers())
    lamina.load(tmp_path / "a", model)
    for name, buffer in model.named_buffers():
        assert buffer is before[name] and torch.equal(buffer, saved.get_buffer(name)), name
    saved.repeated = torch.randn(3, 5)
    lamina.save(tmp_path / "b", saved)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(lamina.CheckpointError, match="`repeated` is an expanded tensor here"):
        lamina.load(tmp_path / "b", model)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
