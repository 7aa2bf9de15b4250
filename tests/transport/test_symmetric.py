"""The protocol of the `peer` transport on GPUs, over memory that processes on a CPU share.

torch's symmetric memory needs GPUs. What is ours (offsets, barriers, who pushes what where, which part stays) is the
same over any memory that all ranks can write, so here a file stands for it and Gloo's barrier for its barrier.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn

import lamina
from harness import run_ranks
from lamina.optim import adamw
from lamina.optim.update import by_torch
from lamina.runtime import api, direct, late_peers
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.publishing import SymmetricGatherer, inbox_bytes, published_places
from lamina.transport.symmetric import GATHER_CHANNEL, REDUCE_CHANNEL, Pushes, SymmetricPeers
from parity.models import UNITS, build, language_batch
from parity.reference import TOLERANCE, Recipe, of_language, sharded


class SharedFiles:
    """Stands for torch's handle of one symmetric allocation."""

    def __init__(self, own: Tensor, pg: dist.ProcessGroup) -> None:
        names: list[Any] = [None] * pg.size()
        dist.all_gather_object(names, own.path, group=pg)  # type: ignore[attr-defined]
        self.buffers = [map_file(name, own.numel()) for name in names]
        self.groups = {channel: group_like(pg) for channel in (0, 1)}
        self.met: list[int] = []

    def get_buffer(self, place: int, shape: tuple[int], dtype: torch.dtype) -> Tensor:
        return self.buffers[place][: shape[0]].view(dtype)

    def barrier(self, channel: int) -> None:
        self.met.append(channel)
        dist.barrier(self.groups[channel])


def group_like(pg: dist.ProcessGroup) -> Any:
    """Another group of the same ranks. Collective over the world.

    A group that its members make by themselves is named by how many groups a rank has: by a name that was there before
    torch's store gives the addresses of a group that is gone, and ranks wait for each other for ever.
    """
    mine = dist.get_process_group_ranks(pg)
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(map(tuple, theirs)))}
    return made[tuple(mine)]


def map_file(name: str, numel: int) -> Tensor:
    return torch.from_file(name, shared=True, size=numel, dtype=torch.uint8)


@contextmanager
def files_for_gpus(folders: list[Any]) -> Iterator[None]:
    """Peers of GPUs, whose memory is files in `folders`."""

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        folders.append(tempfile.TemporaryDirectory())
        tensor = map_file(str(Path(folders[-1].name, "memory")), numel)
        tensor.path = str(Path(folders[-1].name, "memory"))  # type: ignore[attr-defined]
        return tensor

    def open_peers(
        control: Any, mesh: Any, layouts: Any, meshes: Any, wire: Any = None, is_auto: bool = False
    ) -> SymmetricPeers:
        size_bytes = published_places(layouts, meshes)[1]
        return SymmetricPeers(mesh.gather[0], mesh.device, size_bytes, inbox_bytes(layouts, wire))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "empty", empty)
        patch.setattr(symmetric_memory, "rendezvous", SharedFiles)
        for module in (api, late_peers):
            patch.setattr(module, "open_peers", open_peers)
        yield


def shard_symmetrically(model: nn.Module, strategy: Any, **choices: Any) -> nn.Module:
    folders: list[Any] = []
    with files_for_gpus(folders):
        model = lamina.shard(model, strategy, **{"units": UNITS, "transport": "peer", **choices})
    model.folders = folders  # type: ignore[assignment]
    engine = RUNTIMES[model].engine
    assert isinstance(engine.gatherer, SymmetricGatherer) and isinstance(engine.reducer.transport, Pushes)
    return model


TRIPLES = {2: [(2, 2, 2)], 3: [(3, 3, 3)], 4: [(2, 2, 2), (2, 2, 4), (4, 4, 4)]}


def parity_rows() -> list[tuple[str, float]]:
    world, found = dist.get_world_size(), []
    for number, triple in enumerate(TRIPLES[world]):
        ways = (("none", "none"), ("full", "each"), ("none", "defer"))
        for recompute, accumulation in ways if world < 4 else ways[1:2]:
            recipe = Recipe(accumulation=accumulation)
            # gradients are reduced from where they are, laid out, or on each rank in another way
            direct.LEAST_PIECE_BYTES = 1 << 20 if accumulation == "each" and dist.get_rank() else 0
            lamina.debug(recompute == "full")
            strategy = lamina.Strategy(*triple)
            model = shard_symmetrically(build(), strategy, recompute=recompute, slots=1 + number % 3)
            lamina.debug(False)
            found.append((f"{triple} {accumulation}", sharded(model, of_language(world, recipe), recipe)))
            routes = [route for _, route in RUNTIMES[model].engine.reducer._routes.values()]
            assert any(routes) == (triple[0] == world and direct.LEAST_PIECE_BYTES == 0), (triple, accumulation)
    return found


@pytest.mark.parametrize("world", sorted(TRIPLES))
def test_three_steps_equal_one_process(world: int) -> None:
    for found in run_ranks(world, parity_rows):
        assert all(worst <= TOLERANCE for _, worst in found), found


def train_both_ways() -> tuple[bool, list[int], int]:
    """Three AdamW steps in bf16: are the masters those of c10d? Barriers of the last step; the number of units."""
    tokens = language_batch(7, 2)[:, :-1]
    ends = []
    for make in (lambda *a, **k: lamina.shard(*a, units=UNITS, **k), shard_symmetrically):
        model = make(build().float(), "zero3", precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            if make is shard_symmetrically:
                RUNTIMES[model].engine.gatherer.peers._handle.met.clear()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.local.clone() for p in model.parameters()])
    runtime = RUNTIMES[model]
    assert any(len(unit.layout.segments) > 1 for unit in runtime.units)
    return all(map(torch.equal, *ends)), runtime.engine.gatherer.peers._handle.met, len(runtime.units)


def test_training_is_bitwise_what_c10d_gives() -> None:
    for equal, met, units in run_ranks(2, train_both_ways):
        assert equal
        # one change of the published ranges, in two parts; then two for each unit's reduction
        assert met == [GATHER_CHANNEL, GATHER_CHANNEL, REDUCE_CHANNEL] + [REDUCE_CHANNEL] * 2 * units


def what_lies_between() -> list[bool]:
    """Of rubbish in inboxes and gradients, what is left after a reduction? By turn, some ranks lay gradients out."""
    model = shard_symmetrically(build(), "zero3")
    engine = RUNTIMES[model].engine
    tokens, peers, ends = language_batch(7, 2)[:, :-1], engine.gatherer.peers, []
    for turn in range(3):
        direct.LEAST_PIECE_BYTES = 1 << 20 if (dist.get_rank() + turn) % 2 else 0
        engine.reducer._routes.clear()
        peers._own[peers._data_bytes :].fill_(255)  # NaN in every dtype
        for unit in engine.units:
            unit.gradients.make()
            unit.gradients.wants_squares = True
            for grad in unit.gradients.ranges:
                grad.fill_(torch.nan)
        dist.barrier()
        model(tokens).sum().backward()
        for unit in engine.units:
            assert unit.gradients.has_squares
            for grad, squares in zip(unit.gradients.ranges, unit.gradients.squares, strict=True):
                ends.append(torch.isclose(squares.sum(), grad.double().pow(2).sum(), rtol=1e-6).item())
        model.zero_grad()
    return ends


def test_nothing_comes_from_between_parameters() -> None:
    for ends in run_ranks(3, what_lies_between):
        assert ends and all(ends)


def kernel_that_publishes(call: Any, group: Any, lr: Any, scaling: Any, publishes: bool = False) -> bool:
    """Stands for the GPU's kernel, which does both at once."""
    by_torch(call, group, lr, scaling)
    if publishes:
        assert len(call.published) == len(call.params)
        for copy, param in zip(call.published, call.params, strict=True):
            copy.copy_(param)
    return True


def note_casts(patch: pytest.MonkeyPatch, gatherer: SymmetricGatherer, by_step: list[list[str]]) -> None:
    cast = gatherer._cast

    def noted(units: Any) -> None:
        by_step[-1].extend(unit.name for unit in units)
        cast(units)

    patch.setattr(gatherer, "_cast", noted)


def publish_in_the_step() -> tuple[bool, list[list[str]]]:
    """Six clipped steps with edits in between: are the masters those of c10d? Which units were cast, by step."""
    ends: list[list[Tensor]] = []
    cast_by_step: list[list[str]] = []
    for make in (lambda *a, **k: lamina.shard(*a, units=UNITS, **k), shard_symmetrically):
        model = make(build().float(), "zero3", precision="bf16")
        optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2, max_norm=0.1)
        edited = dict(model.named_parameters())["blocks.0.mix.weight"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adamw, "by_own_kernel", kernel_that_publishes)
            if make is shard_symmetrically:
                note_casts(patch, RUNTIMES[model].engine.gatherer, cast_by_step)
            for step in range(6):
                cast_by_step.append([])
                tokens = language_batch(10 * step + dist.get_rank(), 2)[:, :-1]
                nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
                if step == 4:  # before the step: what it writes is not all that has changed
                    with torch.no_grad():
                        edited.mul_(1.1)
                optimizer.step()
                if step == 2:
                    with torch.no_grad():
                        edited.mul_(0.9)
                if step == 3:
                    optimizer.step()  # with the same gradients: nobody has read what the first one published
                optimizer.zero_grad()
        ends.append([p.local.clone() for p in model.parameters()])
    return all(map(torch.equal, *ends)), cast_by_step[6:]


@pytest.mark.parametrize("world", [2, 3])
def test_the_step_publishes_what_it_writes(world: int) -> None:
    for equal, cast in run_ranks(world, publish_in_the_step):
        assert equal
        assert len(cast[0]) > 2 and cast[1:5] == [[], [], ["blocks.0"], []] and "blocks.0" in cast[5], cast


def train_one_number() -> float:
    """Largest deviation from one process: only the first rank holds an element of the model's one parameter."""
    plain = nn.Linear(1, 1, bias=False).double()
    model = nn.Linear(1, 1, bias=False).double()
    model.load_state_dict(plain.state_dict())
    model = shard_symmetrically(model, lamina.Strategy(2, 2, 4), units="auto")
    optimizers = [torch.optim.AdamW(plain.parameters(), lr=0.1), lamina.optim.AdamW(model.parameters(), lr=0.1)]
    worst = 0.0
    for step in range(3):
        data = torch.full((1, 1), 1.0 + step, dtype=torch.float64)
        losses = [trained(data).pow(2).sum() for trained in (plain, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, (losses[0] - losses[1]).abs().item())
    return worst


def test_a_rank_without_elements_takes_part_in_publishing() -> None:
    assert run_ranks(4, train_one_number, timeout=60) == [0.0] * 4
