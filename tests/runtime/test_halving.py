"""`Precision(halves=None)`: who gets masters in halves, who keeps whole ones, and never another number.

On CPUs lamina halves nothing by itself: here it is told that halves pay there, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.optim import AdamW, capture
from lamina.runtime import halving
from lamina.runtime.access import runtime_of
from optim.training import Block, Model, batch, groups_of
from runtime.test_halves import BF16, Life, are_whole, backward, bits_of, publish_ties_away, published_by
from transport.test_symmetric import shard_symmetrically


@contextmanager
def halves_pay() -> Iterator[None]:
    with patch.object(halving, "pays_on", lambda device: True):
        yield


def make(halves: bool | None = None, shard: Callable[..., nn.Module] = lamina.shard, **options: Any) -> nn.Module:
    precision = lamina.Precision(compute=BF16, halves=halves)
    choices = {"strategy": "zero3", "units": [Block], "transport": "peer", "precision": precision} | options
    return shard(Model(dtype=torch.float32), choices.pop("strategy"), **choices)


def clipping(model: nn.Module) -> AdamW:
    return AdamW(groups_of(model), max_norm=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def halved_units(model: nn.Module) -> list[bool]:
    return [bool(unit.halved) for unit in runtime_of(model).units]


def note_of(model: nn.Module) -> str:
    return next((note for note in lamina.report(model).notes if note.startswith("masters")), "")


# ---- who gets them -------------------------------------------------------------------------------------------------


def of_a_block(model: nn.Module) -> list[nn.Parameter]:
    return list(model.blocks[0].parameters())


def of_what_still_trains(model: nn.Module) -> AdamW:
    model.blocks[0].up.requires_grad_(False)
    return AdamW([p for p in model.parameters() if p.requires_grad], max_norm=1.0)


ALL, NONE = [True, True, True], [False, False, False]
HOLDERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], list[bool], str]] = {
    "clips": (clipping, ALL, "masters in halves, for lamina.optim.AdamW clips"),
    "clips nothing, in its step": (lambda m: AdamW(m.parameters(), max_norm=float("inf")), ALL, "masters in halves"),
    "does not clip": (lambda m: AdamW(m.parameters()), NONE, r"masters whole, for no lamina.optim.AdamW"),
    "torch's": (lambda m: torch.optim.AdamW(m.parameters()), NONE, "masters whole, for no lamina"),
    "of one block": (
        lambda m: AdamW(of_a_block(m), max_norm=1.0),
        [False, True, False],
        "masters in halves in 1 of 3 units.*; whole in 2",
    ),
    "of a matrix": (lambda m: AdamW([m.blocks[0].up.weight], max_norm=1.0), NONE, "masters whole, for no lamina"),
    "of what still trains": (of_what_still_trains, ALL, "masters in halves"),
    "of what is not frozen": (
        lambda m: AdamW([p for p in m.parameters() if p.requires_grad], max_norm=1.0),
        ALL,
        "masters in halves",
    ),
}


def held_by() -> list[str]:
    wrong = []
    for name, (optimizer_of, wanted, words) in HOLDERS.items():
        with halves_pay():
            model = make()
        optimizer = optimizer_of(model)
        seen = [halved_units(model)]
        for number in range(2):
            train(model, optimizer, range(number, number + 1))
            seen.append(halved_units(model))
        if seen != [NONE, wanted, wanted] or not re.match(words, note_of(model)):
            wrong.append(f"{name}: {seen}, {note_of(model)}")
        if wanted == ALL and are_whole(model):
            wrong.append(f"{name}: whole after its step")
    return wrong


def test_who_gets_halves() -> None:
    assert run_ranks(2, held_by) == [[], []]


WHOLE: list[tuple[dict[str, Any], str]] = [
    ({"precision": lamina.Precision(compute=BF16, halves=False)}, r"whole, for Precision\(halves=False\) asks for it"),
    ({"precision": "bf16", "strategy": "zero2"}, ""),
    ({"precision": "bf16", "strategy": lamina.Strategy(1, 1, 2)}, ""),
    ({"precision": "bf16", "strategy": lamina.Strategy(2, 2, 4)}, "whole, for optimizer state is not split like"),
    ({"precision": "bf16", "transport": "c10d"}, ""),
    ({"precision": "fp16"}, ""),
    ({"precision": None}, ""),
    ({"precision": lamina.Precision(compute=BF16, master=torch.float64)}, ""),
]


def keep_whole() -> list[str]:
    wrong = []
    for options, words in WHOLE if dist.get_world_size() == 4 else WHOLE[:1]:
        with halves_pay():
            model = make(**options)
        train(model, clipping(model), range(2))
        if any(halved_units(model)) or not re.fullmatch(f"masters {words}.*" if words else "", note_of(model)):
            wrong.append(f"{options}: {halved_units(model)}, {note_of(model)}")
    model = make()
    train(model, clipping(model), range(2))
    if any(halved_units(model)) or "takes longer on a CPU" not in note_of(model):
        wrong.append(f"as CPUs have it: {note_of(model)}")
    return wrong


def test_where_there_are_none() -> None:
    assert run_ranks(4, keep_whole) == [[]] * 4


# ---- the same numbers ----------------------------------------------------------------------------------------------


class Pair:
    """A model whose masters lamina halves, and one that keeps them whole and rounds ties as the first does."""

    def __init__(self, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> None:
        with halves_pay():
            self.free = make(**options)
        self.whole = make(halves=False, **options)
        publish_ties_away(self.whole, self.free)
        self.models = [self.free, self.whole]
        self.optimizers = [optimizer_of(model) for model in self.models]

    def each(self, act: Callable[..., Any], *more: Any) -> list[Any]:
        pairs = zip(self.models, self.optimizers, strict=True)
        return [act(model, optimizer, *more) for model, optimizer in pairs]

    def differ(self) -> bool:
        return not all(map(torch.equal, bits_of(self.free), bits_of(self.whole)))

    def publish_differently(self) -> bool:
        """Of the last step."""
        for model in self.models:
            model(batch(99, dist.get_rank(), torch.float32)).float().sum().backward()
            model.zero_grad()
        return not all(map(torch.equal, published_by(self.free), published_by(self.whole)))


def lives_equal(shard: Callable[..., nn.Module]) -> list[str]:
    """Everything that a `Life` does; it touches the head at steps 2 to 5, so the root's masters are whole from then."""
    pair, wrong = Pair(clipping, shard=shard), []
    lives = [Life(*both) for both in zip(pair.models, pair.optimizers, strict=True)]
    for number in range(Life.STEPS):
        for act in (Life.step, Life.edit):
            for life in lives:
                act(life, number)
            if pair.differ():
                wrong.append(f"{act.__name__} {number}")
        if not torch.equal(lives[0].seen, lives[1].seen):
            wrong.append(f"evaluated in step {number}")
        if halved_units(pair.free) != ([True, True, True] if number < 5 else [False, True, True]):
            wrong.append(f"step {number}: {halved_units(pair.free)}")
    if pair.publish_differently():
        wrong.append("published in the end")
    if "whole in 1 of 3 units, for something else touches" not in note_of(pair.free):
        wrong.append(note_of(pair.free))
    return wrong


def all_lives() -> list[str]:
    return lives_equal(lamina.shard) + [f"as on GPUs, {line}" for line in lives_equal(shard_symmetrically)]


def test_lives_are_bitwise_those_of_whole_masters() -> None:
    assert run_ranks(2, all_lives) == [[], []]


# ---- who touches them at every step --------------------------------------------------------------------------------


@torch.no_grad()
def average(model: nn.Module, optimizer: Any, averages: dict[nn.Module, list[Tensor]], step: int) -> None:
    params = list(model.parameters())
    held = averages.setdefault(model, [p.detach().clone() for p in params])
    for p, ema in zip(params, held, strict=True):
        ema.lerp_(p, 0.1)


@torch.no_grad()
def log(model: nn.Module, optimizer: Any, held: Any, step: int) -> None:
    for p in model.parameters():
        p.norm()


@torch.no_grad()
def log_seldom(model: nn.Module, optimizer: Any, held: Any, step: int) -> None:
    if step % 3 == 2:
        log(model, optimizer, held, step)


@torch.no_grad()
def swap_to_evaluate(model: nn.Module, optimizer: Any, held: Any, step: int) -> None:
    """As an average is, again and again, but at two steps only."""
    if step in (1, 4):
        for _ in range(2):
            for factor in (0.5, 2.0):
                for p in model.parameters():
                    p.mul_(factor)
                model(batch(60, dist.get_rank(), torch.float32))


@torch.no_grad()
def keep_a_piece(model: nn.Module, optimizer: Any, held: dict[nn.Module, Any], step: int) -> None:
    """A `p.local` and an alias from the beginning on, written to throughout."""
    weight = model.blocks[0].up.weight
    local, alias = held.setdefault(model, (weight.local, model.blocks[1].up.weight.detach()))
    local.mul_(0.9)
    lamina.sync(model)
    alias.mul_(0.9)
    if not torch.equal(local, weight.local) or not torch.equal(alias.local, model.blocks[1].up.weight.local):
        raise AssertionError(f"at step {step} what is held is not the parameter")


def hold_an_average_of_one(model: nn.Module, optimizer: Any, held: Any, step: int) -> None:
    with torch.no_grad():
        model.head.weight.clamp_(-0.3, 0.3)


TOUCHES: dict[str, tuple[Callable[..., None], bool]] = {  # and whether halves are given up
    "average": (average, True),
    "log": (log, True),
    "log_seldom": (log_seldom, False),
    "swap_to_evaluate": (swap_to_evaluate, False),
    "keep_a_piece": (keep_a_piece, True),
    "hold_an_average_of_one": (hold_an_average_of_one, True),
}


def touched(name: str, moment: str, shard: Callable[..., nn.Module] = lamina.shard) -> list[str]:
    act, gives_up = TOUCHES[name]
    pair, held, wrong, forms = Pair(clipping, shard=shard), {}, [], []
    for number in range(8):
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            for micro_batch in range(2):
                with lamina.accumulate(model, last=micro_batch == 1):
                    backward(model, 2 * number + micro_batch)
            if moment == "before":
                act(model, optimizer, held, number)
            optimizer.step()
            optimizer.zero_grad()
            if moment == "behind":
                act(model, optimizer, held, number)
        if pair.differ():
            wrong.append(f"{name} {moment} step {number}")
        forms.append(all(halved_units(pair.free)))
    if pair.publish_differently():
        wrong.append(f"{name} {moment}: published")
    if forms[:3] != [True] * 3 or forms[-1] is gives_up:
        wrong.append(f"{name} {moment}: {forms}")
    if forms[-1] and sum(u.halving.touched_steps for u in runtime_of(pair.free).units) > 3:
        wrong.append("counts evaluations")
    return wrong


def all_touched() -> list[str]:
    wrong = [line for name in TOUCHES for moment in ("before", "behind") for line in touched(name, moment)]
    return wrong + touched("average", "behind", shard_symmetrically) + touched("log", "before", shard_symmetrically)


def test_who_touches_all_at_every_step_gets_whole_masters_for_good() -> None:
    assert run_ranks(2, all_touched) == [[], []]


# ---- changes of form at every moment -------------------------------------------------------------------------------


def late_holder() -> list[str]:
    """An optimizer that is built, or clips, or gets the rest of its parameters, after steps and evaluations."""
    wrong = []
    for way in ("built", "clips", "grows", "loaded", "before shard"):
        if way == "before shard":
            models = [Model(dtype=torch.float32) for _ in range(2)]
            optimizers = [clipping(model) for model in models]
            precisions = [lamina.Precision(compute=BF16, halves=halves) for halves in (None, False)]
            with halves_pay():
                for model, precision in zip(models, precisions, strict=True):
                    lamina.shard(model, units=[Block], transport="peer", precision=precision)
            publish_ties_away(models[1], models[0])
            pair = Pair.__new__(Pair)
            pair.free, pair.whole, pair.models, pair.optimizers = models[0], models[1], models, optimizers
        elif way == "grows":
            pair = Pair(lambda model: AdamW(groups_of(model)[:1], max_norm=0.5))
        else:
            pair = Pair(lambda model: AdamW(groups_of(model)))
        for number in range(8):
            if number == 3:
                for model, optimizer in zip(pair.models, list(pair.optimizers), strict=True):
                    if way == "clips":
                        optimizer.max_norm = 0.5
                    if way == "grows":
                        for group in groups_of(model)[1:]:
                            optimizer.add_param_group(group)
                    if way in ("built", "loaded"):
                        made = copy.deepcopy(optimizer.state_dict())
                        optimizer = clipping(model)
                        optimizer.load_state_dict(made)
                        pair.optimizers[pair.models.index(model)] = optimizer
            for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
                if number % 2:
                    with torch.no_grad():
                        model(batch(70, dist.get_rank(), torch.float32))
                train(model, optimizer, range(number, number + 1))
            if pair.differ():
                wrong.append(f"{way}: step {number}")
            if all(halved_units(pair.free)) != (number >= 3 or way == "before shard"):
                wrong.append(f"{way}: step {number}: {halved_units(pair.free)}")
        if pair.publish_differently() or are_whole(pair.free):
            wrong.append(f"{way}: in the end")
    return wrong


def test_holders_that_come_late() -> None:
    assert run_ranks(2, late_holder) == [[], []]


def shard_partly_frozen(model: Model, strategy: Any, **options: Any) -> nn.Module:
    model.blocks[1].requires_grad_(False)
    return lamina.shard(model, strategy, **options)


def thawed() -> list[str]:
    """A unit that was frozen when the model was sharded, and trains later."""
    pair, wrong = Pair(clipping, shard=shard_partly_frozen), []
    for number in range(6):
        if number == 3:
            for model in pair.models:
                model.blocks[1].requires_grad_(True)
        pair.each(train, range(number, number + 1))
        if pair.differ() or halved_units(pair.free) != [True, True, number > 3]:
            wrong.append(f"step {number}: {halved_units(pair.free)}")
    if pair.publish_differently() or are_whole(pair.free) or "; whole" in note_of(pair.free):
        wrong.append(f"in the end: {note_of(pair.free)}")
    asked = make(halves=True, shard=shard_partly_frozen)
    asked.blocks[1].requires_grad_(True)
    train(asked, clipping(asked), range(1))
    if "whole in 1 of 3 units, for they were frozen when the model was sharded" not in note_of(asked):
        wrong.append(note_of(asked))
    return wrong


def test_what_trains_later() -> None:
    assert run_ranks(2, thawed) == [[], []]


def replaced() -> list[str]:
    """Optimizers that are thrown away: what comes after them steps the same masters."""
    wrong = []
    pair = Pair(clipping)
    others: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
        clipping,
    ]
    for turn, optimizer_of in enumerate([None, *others]):
        if optimizer_of is not None:
            pair.optimizers = [optimizer_of(model) for model in pair.models]
        for number in range(5):
            pair.each(train, range(number, number + 1))
            if pair.differ():
                wrong.append(f"turn {turn}, step {number}")
        if all(halved_units(pair.free)) != (turn == 0):
            wrong.append(f"turn {turn}: {halved_units(pair.free)}")
    if pair.publish_differently():
        wrong.append("published")
    return wrong


def test_optimizers_that_are_replaced() -> None:
    assert run_ranks(2, replaced) == [[], []]


def between_forwards() -> list[str]:
    """A regulariser reads masters between two forwards of one backward: what is published may not change then."""
    pair, wrong = Pair(clipping), []
    for number in range(6):
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            loss = model(batch(number, dist.get_rank(), torch.float32)).float().sum()
            size = sum(p.norm() for p in model.parameters() if p.requires_grad)
            loss = loss + model(batch(50 + number, dist.get_rank(), torch.float32)).float().sum() + 0.01 * size
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if pair.differ():
            wrong.append(f"step {number}")
    if any(halved_units(pair.free)):
        wrong.append("never given up")
    late = Pair(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for model in late.models:
        losses = [model(batch(0, dist.get_rank(), torch.float32)).float().sum()]
        optimizer = clipping(model)  # between two forwards
        losses.append(model(batch(1, dist.get_rank(), torch.float32)).float().sum())
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(2))
    if late.differ() or not all(halved_units(late.free)):
        wrong.append("an optimizer that is built between them")
    kept = Pair(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for model in kept.models:
        with lamina.keep(model.blocks[0]):
            optimizer = clipping(model)  # weights that are kept may not change
            backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(2))
    if kept.differ() or not all(halved_units(kept.free)):
        wrong.append("an optimizer that is built while weights are kept")
    return wrong


def test_two_forwards_of_one_backward() -> None:
    assert run_ranks(2, between_forwards) == [[], []]


def captured() -> list[str]:
    """What `lamina.capture` does first: whole masters from then on, and the same training."""
    wrong = []
    for shard in (lamina.shard, shard_symmetrically):
        pair = Pair(clipping, shard=shard)
        for number in range(6):
            pair.each(train, range(number, number + 1))
            if number == 2:
                weight = pair.free.head.weight
                before, alias = bits_of(pair.free), weight.detach()
                with torch.no_grad():
                    weight.mul_(1.0)  # whole in one unit, halved in the others
                capture.keep_masters_whole()
                if not all(map(torch.equal, before, bits_of(pair.free))) or any(halved_units(pair.free)):
                    wrong.append("put together")
                if pair.differ() or not torch.equal(alias.local, weight.local):
                    wrong.append("right after it")
            if pair.differ() or any(halved_units(pair.free)) != (number < 2):
                wrong.append(f"step {number}")
        if pair.publish_differently() or "capture" not in note_of(pair.free):
            wrong.append(f"published, {note_of(pair.free)}")
    return wrong


def test_a_captured_step_has_whole_masters() -> None:
    assert run_ranks(2, captured) == [[], []]
