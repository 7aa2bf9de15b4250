"""Whole runs of a tiny GPT: the same curve everywhere, through stops and kills, and what is left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import SafetensorError

import lamina
from harness import expect_error, run_ranks
from lamina import cli
from lamina.planner.machine import load_machine
from lamina.trace.recording import load_trace
from lamina.train import run as train_run
from lamina.train.config import Config, read_toml
from lamina.train.data import Batch
from lamina.train.folder import Metrics
from lamina.train.loggers import find_logger
from lamina.train.loop import TRACE_STEPS, Training
from lamina.train.objective import NextToken
from lamina.train.sample_cli import Command, written
from train.runs import changed, losses, small, train, write_text


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) for step in one)


def test_the_same_curve_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    """50 steps in fp32 to 1e-3, 8 in float64 to 1e-9; strategies and passes differ too."""
    text = write_text(tmp_path)
    curves: dict[str, list[dict[int, float]]] = {"fp32": [], "fp64": []}
    for world, strategy, accumulate in ((1, "ddp", 1), (2, "zero3", 2), (4, "zero1", 1)):
        for precision, steps in (("fp32", 50), ("fp64", 8)):
            folder = tmp_path / f"{world}-{precision}"
            config = small(
                text,
                folder,
                strategy=strategy,
                accumulate=accumulate,
                precision=precision,
                steps=steps,
                evaluate_every=50,
                save_every=50,
            )
            run_ranks(world, train, world, config)
            curves[precision].append(losses(folder))
            assert len(losses(folder)) == steps
            curves[precision][-1].update({-s: loss for s, loss in losses(folder, "held_out_loss").items()})
    for precision, steps, tolerance in (("fp32", 50, 1e-3), ("fp64", 8, 1e-9)):
        first, *others = curves[precision]
        assert first[-steps] < first[0] - 0.5, "it learns"
        for other in others:
            assert apart(first, other) < tolerance


def test_masters_in_halves(tmp_path: Path) -> None:
    """The option reaches `lamina.shard`: steps of whole masters but for ties; who publishes nothing is told."""
    text, curves = write_text(tmp_path), []
    for halves in (False, True):
        config = small(
            text, tmp_path / f"halves-{halves}", precision="bf16", halves=halves, strategy="auto" if halves else "zero3"
        )
        shown = run_ranks(2, train, 2, config)[0]
        assert ("halves need split parameters" in shown) == halves
        curves.append(losses(tmp_path / f"halves-{halves}"))
    assert apart(*curves) < 0.02
    assert read_toml(tmp_path / "halves-True" / "run.toml").sharding.halves
    refused = small(text, tmp_path / "refused", precision="bf16", halves=True, transport="c10d")
    expect_error(2, train, 2, refused, error="UsageError", contains=["type transport='peer'"])


def test_what_a_run_leaves_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, folder = write_text(tmp_path), tmp_path / "run"
    shown = run_ranks(2, train, 2, small(text, folder, steps=30, sample_tokens=9, trace=True))[0]
    for word in ("whole model", "this layout", "zero3", "held-out loss", "bigram", "--- before", "--- after"):
        assert word in shown
    for command in (
        f"lamina train --resume {folder} --steps 60",
        f"lamina sample {folder}",
        f"--model {folder} --data",
    ):
        assert command in shown
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints",
        "curve.png",
        "metrics.jsonl",
        "model",
        "run.toml",
        "trace.json",
        "trace.png",
    ]
    assert len(load_trace(folder / "trace.json").steps) == TRACE_STEPS and "hidden" in shown
    assert read_toml(folder / "run.toml").optimisation.warmup == 1
    for key in ("lr", "grad_norm", "tokens_per_s", "mfu", "memory_bytes"):
        assert all(value > 0 for value in losses(folder, key).values()), key
    assert written(Command(str(folder), prompt="7 + 0", tokens=8)).startswith("7 + 0")
    compares_with_its_forecast(folder, capsys)


def compares_with_its_forecast(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is all that is needed, but for the machine."""
    machine = folder / "cpu.toml"
    machine.write_text(replace(load_machine("h100"), name="this", device="CPU, 2 cores").text())
    assert cli.main(["plan", "--compare", str(folder), "--machine", str(machine), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    rows = {row["what"]: row for row in values["rows"]}
    for what in ("forward of layers.*", "backward of layers.*", "forward of root", "optimizer"):
        assert rows[what]["observed_ms"] > 0 and rows[what]["forecast_ms"] > 0
    gathers = rows["gathers of layers.*"]  # from peers on CPUs: the use itself copies, and is forecast with it
    assert gathers["observed_ms"] > 0 and gathers["forecast_ms"] == 0
    assert sum(r["observed_ms"] for r in values["rows"] if r["adds"]) == pytest.approx(values["observed_ms"])
    assert (folder / "compare.png").stat().st_size > 10_000


def continues_as_if_nothing_had_been(text: Path, folder: Path) -> Config:
    """Rank 0's process gets a signal behind step 5; then the run goes on."""
    config = small(text, folder, save_every=100, log_every=3)
    one_step = Training._one_step

    def signalled(self: Training) -> Any:
        ran = one_step(self)
        if ran.step == 5 and self.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return ran

    Training._one_step = signalled  # type: ignore[method-assign]
    try:
        shown = train(dist.get_world_size(), config)
    finally:
        Training._one_step = one_step  # type: ignore[method-assign]
    if dist.get_rank() == 0:
        assert "stopped by SIGTERM behind step 6" in shown and f"--resume {folder}" in shown
        assert not (folder / "model").exists()
    return config


def in_main_thread(text: Path, folder: Path) -> None:
    continues_as_if_nothing_had_been(text, folder)


def test_a_signal_ends_all_ranks_with_a_checkpoint_and_resuming_goes_on(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    run_ranks(2, train, 2, small(text, tmp_path / "whole", save_every=100, log_every=3))
    run_ranks(2, in_main_thread, text, tmp_path / "stopped")
    assert max(losses(tmp_path / "stopped")) == 6
    config = small(text, tmp_path / "stopped", save_every=100, log_every=3)
    run_ranks(2, train, 2, config, resume=True)
    assert apart(losses(tmp_path / "whole"), losses(tmp_path / "stopped")) == 0.0
    held_out = [losses(tmp_path / name, "held_out_loss") for name in ("whole", "stopped")]
    assert apart(*held_out) == 0.0


def killed(text: Path, folder: Path) -> None:
    """Ended behind step 8, two steps after the last checkpoint, with the metrics of step 8 on disk."""
    one_step = Training._one_step

    def ended(self: Training) -> Any:
        if self.step == 8:
            raise KeyboardInterrupt
        return one_step(self)

    Training._one_step = ended  # type: ignore[method-assign]
    try:
        train(2, small(text, folder, log_every=2, precision="fp64"))
    except KeyboardInterrupt:
        pass
    finally:
        Training._one_step = one_step  # type: ignore[method-assign]


def test_after_a_kill_the_curve_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Here on another number of ranks, with the metrics lost."""
    text = write_text(tmp_path)
    run_ranks(1, train, 1, small(text, tmp_path / "whole", log_every=2, precision="fp64"))
    run_ranks(2, killed, text, tmp_path / "killed")
    assert max(losses(tmp_path / "killed")) == 8
    (tmp_path / "killed" / "metrics.jsonl").unlink()
    config = small(text, tmp_path / "killed", log_every=2, precision="fp64")
    shown = run_ranks(1, train, 1, config, resume=True)[0]
    assert "going on behind step 6" in shown
    assert apart(losses(tmp_path / "whole"), losses(tmp_path / "killed")) < 1e-9


def test_the_last_and_the_best_checkpoint_stay(tmp_path: Path) -> None:
    """A learning rate that spoils what was learned: the best is not the last."""
    text, folder = write_text(tmp_path), tmp_path / "run"
    config = small(text, folder, steps=30, lr=0.3, warmup=25, evaluate_every=5, save_every=5)
    run_ranks(1, train, 1, config)
    held_out = losses(folder, "held_out_loss")
    best = min((step for step in held_out if step), key=lambda step: held_out[step])
    assert best != 30
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [f"step-{best:06d}", "step-000030"]
    assert lamina.latest(str(folder / "checkpoints")) == str(folder / "checkpoints" / "step-000030")


def test_a_result_is_where_the_next_run_begins(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    run_ranks(2, train, 2, small(text, tmp_path / "first", steps=30))
    run_ranks(2, train, 2, small(text, tmp_path / "second", model=str(tmp_path / "first"), steps=3))
    first, second = (losses(tmp_path / name, "held_out_loss") for name in ("first", "second"))
    assert second[0] == pytest.approx(first[30], abs=1e-5)


def with_a_full_disk(text: Path, folder: Path) -> None:
    """metrics.jsonl cannot grow any more, which rank 0 alone notices."""
    add = Metrics.add

    def full(self: Metrics, rows: Any) -> None:
        if any(row.get("step", 0) > 4 for row in rows):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        add(self, rows)

    Metrics.add = full  # type: ignore[method-assign]
    try:
        train(2, small(text, folder))
    finally:
        Metrics.add = add  # type: ignore[method-assign]


def test_a_full_disk_ends_every_rank_with_the_same_error(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    words = ("metrics.jsonl", "No space left", "rank 0")
    expect_error(2, with_a_full_disk, text, tmp_path / "run", error="StateError", contains=words)


def with_a_full_disk_at_the_end(text: Path, folder: Path) -> None:
    def full(place: Path, *_: Any) -> None:
        (place / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    kept, train_run.write_gpt = train_run.write_gpt, full
    try:
        train(2, small(text, folder, steps=2))
    finally:
        train_run.write_gpt = kept


def test_a_full_disk_leaves_no_half_result(tmp_path: Path) -> None:
    text, folder = write_text(tmp_path), tmp_path / "run"
    words = ("model", "No space left", "rank 0")
    expect_error(2, with_a_full_disk_at_the_end, text, folder, error="UsageError", contains=words)
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", "curve.png", "metrics.jsonl", "run.toml"]
    assert lamina.latest(str(folder / "checkpoints")) is not None


def diverging(text: Path, folder: Path) -> None:
    """Step 1 is right, and what it leaves makes step 2's loss infinite; looked at behind step 10."""
    backward = NextToken.backward
    done: list[int] = []

    def spoiled(self: NextToken, batch: Batch, total: int) -> Any:
        done.append(1)
        return backward(self, batch, total) * (1.0 if len(done) < 5 else float("inf"))

    NextToken.backward = spoiled  # type: ignore[method-assign]
    try:
        train(2, small(text, folder, steps=60, log_every=10, evaluate_every=50, save_every=4))
    finally:
        NextToken.backward = backward  # type: ignore[method-assign]


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_good_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("the loss is no finite number in step 5", f"--resume {folder} with a smaller --lr")
    expect_error(2, diverging, write_text(tmp_path), folder, error="StateError", contains=words)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000004"]
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]["loss"] is None


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    text, folder = write_text(tmp_path), tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("x")
    expect_error(2, train, 2, small(text, folder), error="UsageError", contains=("in use", "--resume"))
    assert [p.name for p in folder.iterdir()] == ["thesis.txt"]


def test_a_log_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(lamina.UsageError, match="pip install wandb"):
        find_logger("wandb")


def test_text_shorter_than_a_sequence(tmp_path: Path) -> None:
    text = write_text(tmp_path, lines=1)
    config = small(text, tmp_path / "run")
    expect_error(2, train, 2, config, error="UsageError", contains=("sums.txt", "one sequence of 16", "give more text"))
    assert not (tmp_path / "run").exists()


def test_resuming_what_has_ended_or_never_began(tmp_path: Path) -> None:
    text, folder = write_text(tmp_path), tmp_path / "run"
    run_ranks(1, train, 1, small(text, folder, steps=3))
    expect_error(1, train, 1, small(text, folder, steps=3), True, error="UsageError", contains=("ended", "--steps 6"))
    run_ranks(1, train, 1, small(text, folder, steps=5), True)
    assert max(losses(folder)) == 5
    with text.open("a") as file:
        file.write("one more sum: 1 + 1 = 2\n" * 9)
    expect_error(1, train, 1, small(text, folder, steps=7), True, error="UsageError", contains=("sequences", "new run"))
    lost = changed(small(text, folder), output=str(tmp_path / "other"))
    expect_error(1, train, 1, lost, True, error="UsageError", contains=("no complete checkpoint",))
