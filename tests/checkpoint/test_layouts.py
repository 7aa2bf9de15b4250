"""Saved in any layout, loaded in any other: the same values, and the same next three steps."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import lamina
from checkpoint.training import (
    UNITS,
    build,
    full_values,
    largest_difference,
    make_optimizer,
    own_bits,
    own_values,
    train,
)
from harness import run_ranks

BEFORE, AFTER = range(2), range(2, 5)
TOLERANCE = 1e-10
TRIPLES = {
    1: [(1, 1, 1)],
    2: [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)],  # ddp, zero1, zero2, zero3
    4: [(2, 2, 2), (1, 2, 4), (4, 4, 4)],  # hsdp, a triple without a name, zero3
}
LAYOUTS = [(world, triple) for world, triples in TRIPLES.items() for triple in triples]


class Saved(NamedTuple):
    folder: str
    world: int
    triple: tuple[int, int, int]
    optimizer: str
    at_save: dict[str, torch.Tensor]
    afterwards: dict[str, torch.Tensor]
    bits: list[torch.Tensor]  # of the rank that returned it, after the last step
    losses: list[float]


def optimizer_of(triple: tuple[int, int, int], world: int) -> str:
    """Kinds rotate over the layouts; torch's and lamina's AdamW read each other's states."""
    return ("torch", "lamina", "torch", "lamina", "sgd")[(sum(triple) + world) % 5]


def save_all(folder: str) -> list[Saved]:
    world = dist.get_world_size()
    made = []
    for triple in TRIPLES[world]:
        kind = optimizer_of(triple, world)
        model = lamina.shard(build(), lamina.Strategy(*triple), units=UNITS)
        optimizer = make_optimizer(kind, model)
        train(model, optimizer, BEFORE)
        path = f"{folder}/{world}-{'-'.join(map(str, triple))}"
        lamina.save(path, model, optimizer, extra={"step": 2, "who": dist.get_rank()})
        at_save = full_values(model)
        losses = train(model, optimizer, AFTER)
        made.append(Saved(path, world, triple, kind, at_save, full_values(model), own_bits(model, optimizer), losses))
    return made


def load_all(saved_by_rank: list[list[Saved]]) -> list[str]:
    """What is wrong, in words."""
    world, rank = dist.get_world_size(), dist.get_rank()
    wrong = []
    for triple in TRIPLES[world]:
        model = lamina.shard(build(seed=7), lamina.Strategy(*triple), units=UNITS)
        optimizers = {kind: make_optimizer(kind, model) for kind in ("torch", "lamina", "sgd")}
        for saved in saved_by_rank[0]:
            kind = {"torch": "lamina", "lamina": "torch"}.get(saved.optimizer, "sgd")
            same = (saved.world, saved.triple) == (world, triple)
            kind = saved.optimizer if same else kind
            what = f"{saved.world} {saved.triple} {saved.optimizer} -> {world} {triple} {kind}"
            extra = lamina.load(saved.folder, model, optimizers[kind])
            if extra != {"step": 2, "who": rank if saved.world == world else 0}:
                wrong.append(f"{what}: extra {extra}")
            if largest_difference(own_values(model), saved.at_save) != 0:
                wrong.append(f"{what}: other values")
            losses = train(model, optimizers[kind], AFTER)
            if (apart := largest_difference(own_values(model), saved.afterwards)) > TOLERANCE:
                wrong.append(f"{what}: {apart} after three steps")
            mine = next(s for s in saved_by_rank[rank] if s.folder == saved.folder) if same else None
            if mine is not None and losses != mine.losses:
                wrong.append(f"{what}: losses {losses}, were {mine.losses}")
            if mine is not None and not all(map(torch.equal, own_bits(model, optimizers[kind]), mine.bits)):
                wrong.append(f"{what}: other bits after three steps")
    return wrong


def test_every_layout_into_every_layout(tmp_path: Path) -> None:
    saved = {world: run_ranks(world, save_all, str(tmp_path)) for world in TRIPLES}
    ends = [made for by_rank in saved.values() for made in by_rank[0]]
    for made in ends:  # one run, whatever the layout: what follows compares like with like
        first = next(other for other in ends if (other.optimizer == "sgd") == (made.optimizer == "sgd"))
        assert largest_difference(made.afterwards, first.afterwards) < TOLERANCE
        assert largest_difference(made.afterwards, made.at_save) > 1e-3
    assert {made.optimizer for made in ends} == {"torch", "lamina", "sgd"}
    for world in TRIPLES:
        by_rank = [list(ends) for _ in range(world)]
        for rank in range(world):  # a rank compares bits with its own
            by_rank[rank] = [next((s for s in saved[world][rank] if s.folder == e.folder), e) for e in ends]
        for wrong in run_ranks(world, load_all, by_rank, timeout=120):
            assert not wrong, f"{len(wrong)}: {wrong[:6]}"
