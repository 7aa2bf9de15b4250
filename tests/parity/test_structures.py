"""Models of every structure that has broken a sharding runtime equal one process: weights read late, ties, frozen and
odd parameters, modules used twice, ranks that take different paths."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, Recipe, one_process, sharded
from parity.structures import STRUCTURES, WIDTH, build_structure

SHARDED = ("zero3", "zero2", "ddp")  # parameters split, gradients split, plain


def batch(step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4 - micro, WIDTH, generator=generator, dtype=torch.float64)


def run_structure(name: str, recipes: list[Recipe], strategies: list[str]) -> dict[str, float]:
    structure = STRUCTURES[name]

    def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        return structure.loss(model, batch(step, rank, micro), rank)

    found = {}
    for recipe in recipes:
        expected = one_process(build_structure(name), dist.get_world_size(), recipe, loss_of)
        for number, strategy in enumerate(strategies):
            label = f"{strategy} {recipe.optimizer} {recipe.accumulation}"
            lamina.debug(number % 2 == (recipe.accumulation == "none"))
            model = lamina.shard(build_structure(name), strategy, units=list(structure.units), slots=1 + number)
            try:
                found[label] = sharded(model, expected, recipe, loss_of)
            except Exception as error:
                error.add_note(f"in {label}")
                raise
    return found


def recipes_of(name: str) -> list[Recipe]:
    if name == "motley":  # a complex parameter: torch has no norm over complex and real gradients in one call
        return [Recipe("sgd", "none", max_norm=None), Recipe("sgd", "twice", max_norm=None)]
    return [Recipe("adamw", "none"), Recipe("sgd", "each")]


# An odd world, too, where ranks differ in what they use, or elements fall unevenly.
UNEVEN = ("skipping", "experts", "sometimes", "unused", "motley", "tied", "lora int8", "batch norm")


@pytest.mark.parametrize(("world", "name"), [(2, n) for n in STRUCTURES] + [(3, n) for n in UNEVEN])
def test_structure_equals_one_process(world: int, name: str) -> None:
    strategies = ["zero3", "ddp", "zero2"] if world == 2 else ["zero3", "zero3", "zero1"]
    for found in run_ranks(world, run_structure, name, recipes_of(name), strategies):
        assert max(found.values()) <= TOLERANCE, found


def frozen_bytes() -> tuple[bool, int, int]:
    model = build_structure("lora int8")
    before = [block.base.detach().clone() for block in model.blocks]
    model = lamina.shard(model, units=["blocks.*"])
    for step in range(2):
        model(batch(step, dist.get_rank(), 0)).pow(2).mean().backward()
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(param.grad)
                    param.grad = None
    with lamina.gathered(model):
        same = all(torch.equal(block.base, old) for block, old in zip(model.blocks, before, strict=True))
    units = {unit.name: unit for unit in lamina.report(model).units}
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert units["blocks.0"].reduces == 2
    return same, lamina.report(model).memory["gradients"], trainable * 8


def test_frozen_int8_stays_bit_for_bit_and_has_no_gradient_memory() -> None:
    for same, gradient_bytes, trainable_bytes in run_ranks(4, frozen_bytes):
        assert same
        padding_bytes = 4 * 2 * 256 * 8  # one or two aligned parameters a unit, and their rest, over four ranks
        assert gradient_bytes <= trainable_bytes / 4 + padding_bytes


def tied_identity() -> list[bool]:
    model = lamina.shard(build_structure("tied"), units=["emb", "mid", "head"])
    optimizer = torch.optim.Adam(model.parameters())
    seen = [model.head.weight is model.emb.weight]
    STRUCTURES["tied"].loss(model, batch(0, dist.get_rank(), 0), 0).backward()
    optimizer.step()
    seen.append(model.head.weight is model.emb.weight)
    seen.append([name for name, _ in model.named_parameters()] == ["emb.weight", "mid.weight", "mid.bias"])
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_tied_parameters_stay_one_object(world: int) -> None:
    assert run_ranks(world, tied_identity) == [[True, True, True]] * world


def none_or_not() -> tuple[dict[str, bool], dict[str, bool]]:
    """Which parameters have a gradient, where an expert is used by one rank, by none, or in part of a unit."""
    found = []
    for name, call in (("experts", dist.get_rank()), ("unused", None)):
        model = lamina.shard(build_structure(name), units=["blocks.*"])
        for step in range(2):
            for param in model.parameters():
                param.grad = None
            arguments = () if call is None else (call,)
            model(batch(step, dist.get_rank(), 0), *arguments).sum().backward()
        found.append({n: p.grad is not None for n, p in model.named_parameters()})
    return found[0], found[1]


def test_no_gradient_only_where_no_rank_used_the_parameter() -> None:
    for experts, unused in run_ranks(2, none_or_not):
        for name, has in experts.items():
            assert has == (not name.startswith(("blocks.2", "blocks.3", "blocks.4"))), name
        for name, has in unused.items():
            assert has == (not name.endswith("idle")), name


def batch_norm_buffers() -> float:
    """Running statistics are this rank's own, in their own dtype."""
    plain, data = build_structure("batch norm"), batch(0, dist.get_rank(), 0)
    plain(data)
    model = lamina.shard(build_structure("batch norm"), units=["blocks.*"], precision="bf16")
    precise = lamina.shard(build_structure("batch norm"), units=["blocks.*"])
    precise(data)
    model(data.float())
    assert all(b.dtype in (torch.float64, torch.int64) for b in model.buffers())
    pairs = zip(plain.buffers(), precise.buffers(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_batch_norm_statistics_are_the_ranks_own() -> None:
    assert max(run_ranks(2, batch_norm_buffers)) <= TOLERANCE
