"""After the first step: gathers and reductions as the program counts them, and no memory that grows."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist

import lamina
from harness import run_ranks
from parity.models import UNITS, build
from parity.reference import Recipe, language_loss_of, scope

BLOCKS = 5
ALL_IN_UNITS = ["embedding", "blocks.*", ["norm", "head"]]  # nothing is left to the root


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, recipe: Recipe) -> None:
    for micro in range(recipe.micro_batches):
        with scope(model, recipe.accumulation, micro == recipe.micro_batches - 1):
            language_loss_of(model, step, dist.get_rank(), micro).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def count_a_step(slots: int, strategy: str, accumulation: str) -> dict[str, tuple[int, int, int]]:
    """Gathers, reductions and overflows of the blocks in each of four steps; embedding and head belong to the root."""
    model = lamina.shard(build(blocks=BLOCKS), strategy, units=["blocks.*"], slots=slots)
    optimizer = torch.optim.AdamW(model.parameters())
    counts, before = {}, (0, 0, 0)
    for step in range(4):
        train_step(model, optimizer, step, Recipe(accumulation=accumulation))
        blocks = [unit for unit in lamina.report(model).units if unit.name.startswith("blocks")]
        assert len(blocks) == BLOCKS
        now = (sum(u.gathers for u in blocks), sum(u.reduces for u in blocks), sum(u.overflows for u in blocks))
        counts[f"step {step}"] = (now[0] - before[0], now[1] - before[1], now[2] - before[2])
        before = now
    return counts


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_sharded_blocks_are_gathered_2n_less_k_times(slots: int) -> None:
    for counts in run_ranks(2, count_a_step, slots, "zero3", "none"):
        steady = [counts[f"step {step}"] for step in (1, 2, 3)]
        assert steady == [(2 * BLOCKS - slots, BLOCKS, 0)] * 3, counts


def count_all() -> dict[str, dict[str, tuple[int, int, int]]]:
    cases = [("zero3", "each"), ("zero3", "defer"), ("zero2", "none"), ("zero1", "each"), ("ddp", "none")]
    return {f"{strategy} {accumulation}": count_a_step(3, strategy, accumulation) for strategy, accumulation in cases}


def test_other_strategies_gather_once_a_step_and_count_reductions_that_are_sent() -> None:
    for found in run_ranks(2, count_all):
        assert found["zero3 each"]["step 2"] == (2 * (2 * BLOCKS - 3), 2 * BLOCKS, 0)
        assert found["zero3 defer"]["step 2"] == (2 * (2 * BLOCKS - 3), BLOCKS, 0)
        assert found["zero2 none"]["step 2"] == (BLOCKS, BLOCKS, 0)
        assert found["zero1 each"]["step 2"] == (BLOCKS, BLOCKS, 0)
        assert found["ddp none"]["step 2"] == (0, BLOCKS, 0)


def all_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]


def live_tensors(earlier: list[torch.Tensor]) -> tuple[int, int]:
    """Number of tensors made since `earlier` that are alive, and the bytes of their distinct memory."""
    known = {id(tensor) for tensor in earlier}
    tensors = [tensor for tensor in all_tensors() if id(tensor) not in known]
    memory = {}
    for tensor in tensors:
        storage = tensor.local.untyped_storage() if isinstance(tensor, lamina.Shard) else tensor.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
    return len(tensors), sum(memory.values())


def follow_memory(strategy: str, accumulation: str) -> list[tuple[tuple[int, int], dict[str, int]]]:
    earlier = all_tensors()  # of earlier calls in this process; held, so that none of them vanishes meanwhile
    model = lamina.shard(build(), strategy, units=UNITS)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for step in range(6):
        train_step(model, optimizer, step, Recipe(accumulation=accumulation))
        alive, deadline = live_tensors(earlier), time.monotonic() + (5.0 if step > WARM else 0.5)
        while step >= WARM and (step == WARM or alive != seen[WARM][0]) and time.monotonic() < deadline:
            time.sleep(0.05)  # a thread of Gloo's holds what it has sent until it gets its turn
            alive = min(alive, live_tensors(earlier))
        seen.append((alive, lamina.report(model).memory))
    return seen


WARM = 2  # the step from which on nothing is made that stays
FOLLOWED = [("zero3", "none"), ("zero3", "defer"), ("zero2", "each"), ("zero1", "each"), ("ddp", "none")]


@pytest.mark.parametrize(("strategy", "accumulation"), FOLLOWED)
def test_no_memory_grows_over_steps(strategy: str, accumulation: str) -> None:
    for seen in run_ranks(2, follow_memory, strategy, accumulation):
        assert all(found == seen[WARM] for found in seen[WARM:]), seen


def memory_at_one_slot() -> tuple[dict[str, int], list[int], int]:
    model = lamina.shard(build(), "zero3", units=ALL_IN_UNITS, slots=1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        train_step(model, optimizer, step, Recipe())
    report = lamina.report(model)
    shard_bytes = sum(8 * p.local.numel() for p in model.parameters())
    return report.memory, [unit.bytes for unit in report.units], shard_bytes


def test_one_slot_holds_the_largest_unit_and_nothing_more() -> None:
    for memory, unit_bytes, shard_bytes in run_ranks(2, memory_at_one_slot):
        assert memory["slots"] == max(unit_bytes)
        assert set(memory) == {"masters", "gradients", "slots"}, memory
        assert memory["masters"] == memory["gradients"] == sum(unit_bytes) // 2  # float64 throughout, two ranks
        assert memory["masters"] >= shard_bytes


def step_without_functorchs_stack(recompute: str) -> None:
    """Once a thread has that stack, autograd copies it at every node, by a thousand instructions."""

    def made() -> None:
        raise AssertionError("functorch's stack is made")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C._functorch, "peek_interpreter_stack", made)
        model = lamina.shard(build(blocks=2), units=UNITS, recompute=recompute)
        language_loss_of(model, 0, dist.get_rank(), 0).backward()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_step_makes_functorchs_stack(recompute: str) -> None:
    run_ranks(2, step_without_functorchs_stack, recompute)
