"""Folders that jobs of DeepSpeed left are read as DeepSpeed reads them, and the jobs go on here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lamina
from checkpoint.deepspeed_job import FOLDERS, MORE, STEPS, Model, groups_of, loss_of
from checkpoint.training import full_values
from harness import run_ranks
from lamina.checkpoint.commands import main
from lamina.checkpoint.opening import format_of, open_source
from lamina.errors import CheckpointError


def go_on(path: str, strategy: Any, batches: int) -> tuple[dict[str, torch.Tensor], Any, list[list[float]], Any]:
    """Loaded; then the steps that the job made after its save, with its batches dealt out to the ranks."""
    model = lamina.shard(Model(seed=1), strategy, units=["up", "fixed"])
    optimizer = torch.optim.AdamW(groups_of(model), lr=7.0)
    extra = lamina.load(path, model, optimizer)
    options = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    loaded = {**full_values(model), "count": model.count.clone()}
    own, losses = batches // dist.get_world_size(), []
    for step in range(STEPS, STEPS + MORE):
        found = [loss_of(model, step, dist.get_rank() * own + batch) for batch in range(own)]
        (sum(found) / own).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in found])
    return loaded, extra, losses, options


@pytest.mark.parametrize(
    ("kind", "world", "strategy", "tolerance"),
    [
        ("zero3", 1, "ddp", 1e-6),
        ("zero3", 2, "zero3", 1e-6),
        ("zero2", 1, "zero3", 1e-6),
        ("zero1_bf16", 2, "zero1", 1e-2),  # computed in 16 bit there, in 32 here
    ],
)
def test_jobs_go_on(kind: str, world: int, strategy: str, tolerance: float) -> None:
    wanted = torch.load(FOLDERS / kind / "wanted.pt")
    losses = torch.tensor(wanted["losses"])  # by batch, then step
    found = run_ranks(world, go_on, str(FOLDERS / kind), strategy, len(losses))
    for loaded, extra, _, options in found:
        for name, value in wanted["values"].items():
            if name in loaded:  # tied ones once
                assert torch.equal(loaded[name].float(), value.float()), name
        assert len(loaded) >= 11 and extra["epoch"] == 2 and extra["global_steps"] == STEPS
        assert options == [(0.01, 0.1), (0.02, 0.0)]
    ours = torch.cat([torch.tensor(result[2]) for result in found], 1).T
    assert (ours - losses).abs().max() < tolerance


def test_converted(tmp_path: Path) -> None:
    assert main(["convert", str(FOLDERS / "zero3"), str(tmp_path / "ours")]) == 0
    wanted = torch.load(FOLDERS / "zero3" / "wanted.pt")
    loaded, extra, ours, _ = run_ranks(1, go_on, str(tmp_path / "ours"), "zero3", 2)[0]
    assert extra["epoch"] == 2 and torch.equal(loaded["down.weight"], wanted["values"]["down.weight"])
    assert (torch.tensor(ours).T - torch.tensor(wanted["losses"])).abs().max() < 1e-6


def _delete(folder: Path) -> None:
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def _cut_further(folder: Path) -> None:
    shutil.copy(
        folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_1_mp_rank_01_optim_states.pt"
    )


def _add_expert(folder: Path) -> None:
    (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(b"")


def _leave_out_last(folder: Path) -> None:
    for kind in ("model", "optim"):
        (folder / f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt").unlink()


def _without_zero(folder: Path) -> None:
    for path in folder.glob("*_states.pt"):
        path.unlink()
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_delete, "is not whole: there is no file with the optim of rank 1"),
        (_cut_further, "expert-parallel job"),
        (_add_expert, "layer_0_expert_3"),
        (_leave_out_last, "in 2 parts, with 1 optimizer files"),
        (_without_zero, "without ZeRO: load the file"),
    ],
)
def test_what_is_not_whole_is_refused(spoil: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDERS / "zero3", tmp_path / "job")
    assert format_of(tmp_path / "job") == "deepspeed"
    spoil(tmp_path / "job" / "global_step3")
    with pytest.raises(CheckpointError, match=words):
        open_source(tmp_path / "job")
