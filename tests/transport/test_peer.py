"""The `peer` transport on the CPU: right weights, one-sided in fact, and an end to every wait."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from hangs.training import under_short_limits
from harness import RankFailure, expect_error, run_ranks
from lamina.core.slots import SlotState
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.publishing import PeerGatherer
from lamina.transport.peer import Counter, check_epochs
from parity.models import UNITS, build, language_batch
from parity.reference import TOLERANCE, Recipe, of_language, sharded

TRIPLES = {
    2: [(2, 2, 2)],
    3: [(3, 3, 3)],
    4: [(2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4)],
}


def shard_by_peer(model: nn.Module, strategy: Any = "zero3", **choices: Any) -> nn.Module:
    return lamina.shard(model, strategy, units=UNITS, transport="peer", **choices)


def gatherer_of(model: nn.Module) -> PeerGatherer:
    gatherer = RUNTIMES[model].engine.gatherer
    assert isinstance(gatherer, PeerGatherer)
    return gatherer


def tokens() -> Tensor:
    return language_batch(7, 2)[:, :-1]


def hold(model: nn.Module, block: int, act: Any) -> Any:
    """Call `act` once, inside the next forward, before a block's own computation."""
    handle: Any = None

    def hook(module: nn.Module, args: Any) -> None:
        handle.remove()
        act()

    handle = model.blocks[block].up.register_forward_pre_hook(hook)  # type: ignore[union-attr, index]
    return handle


def say(word: str) -> None:
    dist.distributed_c10d._get_default_store().set(f"{word} {dist.get_rank()}", "said")


def await_word(word: str, ranks: list[int]) -> None:
    store = dist.distributed_c10d._get_default_store()
    names = [f"{word} {rank}" for rank in ranks]
    store.wait(names, datetime.timedelta(seconds=15))
    dist.barrier()
    for name in names if dist.get_rank() == 0 else ():
        store.delete_key(name)


# ---- right weights -------------------------------------------------------------------------------------------------


def gather_every_unit(triple: tuple[int, int, int], precision: str | None) -> list[tuple[str, bool, int, int]]:
    model = shard_by_peer(build(), lamina.Strategy(*triple), precision=precision, slots=9)
    reference = dict(build().named_parameters())
    gatherer, found = gatherer_of(model), []
    units = RUNTIMES[model].units
    gatherer.publish(units)
    for unit in units:
        assert unit.slot is not None
        before = gatherer.bytes_moved
        gatherer.start(unit, unit.slot)
        assert unit.slot.state is SlotState.GATHERING
        gatherer.finish(unit.slot)
        assert unit.slot.state is SlotState.WEIGHTS
        pairs = zip(unit.layout.params, unit.slot.fulls, strict=True)
        equal = all(torch.equal(full, reference[spec.name].detach().to(spec.compute)) for spec, full in pairs)
        found.append((unit.name, equal, gatherer.bytes_moved - before, unit.layout.buffer_bytes))
    check_epochs(gatherer.peers)
    return found


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world", sorted(TRIPLES))
def test_slots_hold_the_weights_bit_for_bit(world: int, precision: str | None) -> None:
    for triple in TRIPLES[world]:
        for found in run_ranks(world, gather_every_unit, triple, precision):
            assert len(found) == 6
            for name, equal, moved_bytes, buffer_bytes in found:
                assert equal, (triple, name)
                assert buffer_bytes - 256 < moved_bytes <= buffer_bytes, (triple, name)


def train_both_ways(triple: tuple[int, int, int], slots: int) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
    """Three AdamW steps in bf16 through each transport: the ranges of the masters, and bytes gathered."""
    ends, moved = [], []
    for make in (shard_by_peer, lambda *a, **k: lamina.shard(*a, units=UNITS, **k)):
        model = make(build().float(), lamina.Strategy(*triple), precision="bf16", slots=slots)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            nn.functional.cross_entropy(model(tokens()).flatten(0, 1).float(), tokens().flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.local.clone() for p in model.parameters()])
        report = lamina.report(model)
        moved.append((report.bytes_gathered, report.gathers))
    return all(map(torch.equal, *ends)), moved[0], moved[1]


@pytest.mark.parametrize(("triple", "slots"), [((2, 2, 2), 1), ((2, 2, 4), 3), ((4, 4, 4), 2)])
def test_training_is_bitwise_what_c10d_gives(triple: tuple[int, int, int], slots: int) -> None:
    for equal, by_peer, by_c10d in run_ranks(triple[2], train_both_ways, triple, slots):
        assert equal
        assert by_peer == by_c10d


def parity_rows() -> list[tuple[str, float]]:
    world, found = dist.get_world_size(), []
    for number, triple in enumerate(TRIPLES[world]):
        for recompute in ("none", "full"):
            recipe = Recipe(accumulation="each" if recompute == "full" else "none")
            lamina.debug(recompute == "full")
            slots = 1 + number % 3
            model = shard_by_peer(build(), lamina.Strategy(*triple), recompute=recompute, slots=slots)
            lamina.debug(False)
            worst = sharded(model, of_language(world, recipe), recipe)
            found.append((f"{triple} {recompute} {slots}", worst))
    return found


@pytest.mark.parametrize("world", sorted(TRIPLES))
def test_three_steps_equal_one_process(world: int) -> None:
    for found in run_ranks(world, parity_rows):
        assert all(worst <= TOLERANCE for _, worst in found), found


def train_unsplit(strategy: str) -> tuple[float, str]:
    recipe = Recipe()
    model = shard_by_peer(build(), strategy)
    return sharded(model, of_language(2, recipe), recipe), lamina.report(model).transport


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_parameters_that_are_not_split_go_through_c10d(strategy: str) -> None:
    for worst, name in run_ranks(2, train_unsplit, strategy):
        assert worst <= TOLERANCE and name == "c10d"


# ---- publishing ----------------------------------------------------------------------------------------------------


def change_on_one_rank(triple: tuple[int, int, int], rank: int) -> tuple[float, float, int]:
    """One rank doubles its range of a matrix: the others see it at the next forward, unchanged themselves."""
    model = shard_by_peer(build(), lamina.Strategy(*triple))
    plain = build()
    with torch.no_grad():
        before = (model(tokens()) - plain(tokens())).abs().max().item()
        param = model.blocks[1].up.weight
        if dist.get_rank() == rank:
            param.mul_(2)
        bounds = param.spec.ranges[rank]  # group and world are the same ranks here
        plain.blocks[1].up.weight.view(-1)[slice(*bounds)] *= 2
        after = (model(tokens()) - plain(tokens())).abs().max().item()
    return before, after, bounds[1] - bounds[0]


@pytest.mark.parametrize("triple", [(2, 2, 2), (2, 2, 4), (2, 4, 4)])
def test_a_change_on_one_rank_reaches_all(triple: tuple[int, int, int]) -> None:
    for rank in range(triple[2]):
        results = run_ranks(triple[2], change_on_one_rank, triple, rank)
        for before, after, changed_numel in results:
            assert before <= TOLERANCE and after <= TOLERANCE, (rank, changed_numel)


def change_after_publishing() -> list[tuple[bool, bool]]:
    """Whether gathers after a change give the old weights before the next `publish()`, and the new ones after it."""
    model = shard_by_peer(build(), slots=9)
    gatherer, units = gatherer_of(model), RUNTIMES[model].units
    old = {name: p.detach() for name, p in build().named_parameters()}

    def gather(scale: float) -> list[bool]:
        equal = []
        for unit in units:
            assert unit.slot is not None
            gatherer.start(unit, unit.slot)
            gatherer.finish(unit.slot)
            pairs = zip(unit.layout.params, unit.slot.fulls, strict=True)
            equal.append(all(torch.equal(full, scale * old[spec.name]) for spec, full in pairs))
        return equal

    gatherer.publish(units)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
        before = gather(1.0)
        gatherer.publish(units)
        return list(zip(before, gather(2.0), strict=True))


def test_a_version_holds_until_the_next_publish() -> None:
    for found in run_ranks(2, change_after_publishing):
        assert found == [(True, True)] * 6


def keep_after_a_change() -> tuple[float, float]:
    model, plain = shard_by_peer(build(), slots=9), build()
    with torch.no_grad():
        model(tokens())  # leaves weights in the slots
        for p in [*model.parameters(), *plain.parameters()]:
            p.mul_(0.5)
        with lamina.keep(model):
            kept = (model(tokens()) - plain(tokens())).abs().max().item()
        return kept, (model(tokens()) - plain(tokens())).abs().max().item()


def test_keep_publishes_too() -> None:
    for kept, after in run_ranks(2, keep_after_a_change):
        assert kept <= TOLERANCE and after <= TOLERANCE


def overtake() -> float:
    """Rank 1 has ended its forward and changed its weights while rank 0 still gathers: rank 0 reads the old ones."""
    model, plain = shard_by_peer(build(), slots=1), build()
    with torch.no_grad():
        for _ in range(2):  # the second follows the program
            model(tokens())
        expected = plain(tokens())
        if dist.get_rank() == 0:
            hold(model, 0, lambda: let_pass(gatherer_of(model), 1, gatherer_of(model).epoch + 1))
        first = (model(tokens()) - expected).abs().max().item()
        for p in [*model.parameters(), *plain.parameters()]:
            p.mul_(2)
        return max(first, (model(tokens()) - plain(tokens())).abs().max().item())


def let_pass(gatherer: PeerGatherer, rank: int, epoch: int) -> None:
    """Wait until another rank has come to its `publish()` of an epoch, and has had time to go on if it wrongly does."""
    while gatherer.peers.others[rank].counters[Counter.ARRIVED] < epoch:
        time.sleep(1e-3)
    time.sleep(0.05)


def test_a_version_stays_until_all_have_read_it() -> None:
    assert max(run_ranks(2, overtake)) <= TOLERANCE


def come_too_early() -> float:
    """Rank 1, which has nothing to change, begins its forward before rank 0 has published what it has changed."""
    model, plain = shard_by_peer(build()), build()
    rank = dist.get_rank()
    with torch.no_grad():
        for _ in range(2):
            model(tokens())
        for name, p in plain.named_parameters():
            shard = model.get_parameter(name)
            assert isinstance(shard, lamina.Shard)
            p.view(-1)[slice(*shard.spec.ranges[0])] *= 2
            if rank == 0:
                shard.mul_(2)
        if rank == 0:
            let_pass(gatherer_of(model), 1, gatherer_of(model).epoch + 1)
        return (model(tokens()) - plain(tokens())).abs().max().item()


def test_a_reader_waits_for_the_new_version() -> None:
    assert max(run_ranks(2, come_too_early)) <= TOLERANCE


# ---- one-sided -----------------------------------------------------------------------------------------------------


def stay_inside(gradients: bool) -> tuple[float, list[str]]:
    """Rank 0 stays inside its forward until all others have come out of theirs: with collectives nobody ever would."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model, seen = shard_by_peer(build(), slots=1), []
    plain = build()
    with torch.set_grad_enabled(gradients):
        for _ in range(2):  # the second follows the program
            model(tokens())
        if rank == 0:
            store = dist.distributed_c10d._get_default_store()
            names = [f"out {other}" for other in range(1, world)]
            hold(model, 0, lambda: (store.wait(names), seen.append("others are out")))
        found = model(tokens())
        say("out")
        worst = (found - plain(tokens())).abs().max().item()
    await_word("out", list(range(world)))
    if gradients:
        found.square().sum().backward()  # and the step goes on
    return worst, seen


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gathers_end_while_a_rank_stays_inside_its_forward(world: int, gradients: bool) -> None:
    results = run_ranks(world, stay_inside, gradients)
    assert results[0][1] == ["others are out"]
    assert all(worst <= TOLERANCE for worst, _ in results)


# ---- every wait has an end -----------------------------------------------------------------------------------------


def be_killed(folder: Path) -> None:
    model = shard_by_peer(build())
    with torch.no_grad():
        model(tokens())
        (folder / str(dist.get_rank())).write_text(Path("/proc/self/maps").read_text())
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model.blocks[0].up.weight.mul_(2)
        model(tokens())


def test_a_killed_rank_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, be_killed, tmp_path, timeout=20)  # and within the harness's grace once rank 1 is gone
    errors = caught.value.errors
    assert errors[0].type_name == "Disagreement" and "rank 1 has died" in errors[0].message
    assert "forward" in errors[0].message and errors[1].type_name == "Died"
    # what these two had mapped counts: other processes use /dev/shm too
    mapped = [line for rank in range(2) for line in (tmp_path / str(rank)).read_text().splitlines()]
    named = {Path(line[line.index("/dev/shm") :]) for line in mapped if "/dev/shm" in line}
    assert not [path for path in named - before if path.exists()]
    assert any(line.endswith("/memfd:lamina (deleted)") for line in mapped)


def drop_on_rank_1(has_changed: bool) -> str:
    model = shard_by_peer(build())
    with torch.no_grad():
        model(tokens())
        if dist.get_rank() == 1:
            del model
            gc.collect()
            return ""
        if has_changed:
            model.blocks[0].up.weight.mul_(2)
        with pytest.raises(lamina.LaminaError, match="rank 1 ended or dropped the model") as caught:
            model(tokens())
    return type(caught.value).__name__


@pytest.mark.parametrize("has_changed", [False, True], ids=["in the gather", "in publish"])
def test_a_rank_that_dropped_its_model_is_not_waited_for(has_changed: bool) -> None:
    assert run_ranks(2, drop_on_rank_1, has_changed) == ["Disagreement", ""]


def one_forward_more_on_rank_0() -> None:
    model = shard_by_peer(build())
    for _ in range(2):  # the second follows the program: nothing is agreed any more
        model(tokens()).sum().backward()
        model.zero_grad()
    loss = model(tokens()).sum()
    if dist.get_rank() == 0:
        loss = model(tokens()).sum()
    loss.backward()


def test_an_extra_forward_on_one_rank_is_a_named_error() -> None:
    words = ["rank 0", "rank 1", "forward", "backward"]
    expect_error(2, under_short_limits, one_forward_more_on_rank_0, error="Disagreement", contains=words, timeout=20)
