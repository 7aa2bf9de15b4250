"""A run's folder: what it was told, what it measured, what it kept.

    runs/1/run.toml            the resolved configuration: `lamina train runs/1/run.toml` runs it again
    runs/1/metrics.jsonl       a line for every few steps, and for every evaluation
    runs/1/curve.png           the loss, trained and held out
    runs/1/checkpoints/        step-000400, ...: the last one and the best
    runs/1/model/              the result: a Hugging Face folder, or the small GPT's (runs/1/adapter/ with --lora)

Everything is written beside its place and renamed, so that a full disk leaves nothing half-written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lamina.errors import UsageError


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    def create(self, config_text: str) -> None:
        """On one rank. `UsageError` if the folder is in use or cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = any(self.path.iterdir())
        except OSError as problem:
            raise UsageError(f"--output {self.path}: {problem.strerror}") from None
        if taken:
            raise UsageError(
                f"--output {self.path} is in use. Go on with what is there: lamina train --resume {self.path}; or give "
                "another folder"
            )
        self.checkpoints.mkdir()
        self.write("run.toml", config_text)

    def write(self, name: str, text: str) -> None:
        """A small file, whole or not at all."""
        place = self.path / f".{name}.part"
        try:
            place.write_text(text)
            os.replace(place, self.path / name)
        except OSError as problem:
            place.unlink(missing_ok=True)
            raise OSError(problem.errno, f"{self.path / name}: {problem.strerror}") from None

    def part(self, name: str) -> Path:
        """Where a folder of that name is written before it gets the name."""
        return self.path / f".{name}.part"

    def clear(self, name: str) -> None:
        shutil.rmtree(self.part(name), ignore_errors=True)

    def settle(self, name: str) -> None:
        """What is complete gets its name; an earlier one is replaced."""
        target = self.path / name
        if target.exists():
            shutil.rmtree(target)
        self.part(name).rename(target)

    def write_folder(self, name: str, fill: Callable[[Path], None]) -> None:
        """A folder, whole or not at all."""
        self.clear(name)
        try:
            self.part(name).mkdir()
            fill(self.part(name))
            self.settle(name)
        except BaseException:
            self.clear(name)
            raise

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def keep_checkpoints(self, *steps: int) -> None:
        """Remove all but these."""
        wanted = {self.checkpoint(step).name for step in steps}
        for entry in self.checkpoints.iterdir():
            if entry.name.startswith("step-") and entry.name not in wanted:
                shutil.rmtree(entry, ignore_errors=True)


class Metrics:
    """metrics.jsonl, on one rank: appended to line by line, cut back where a run resumes from an earlier step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int, known: list[dict[str, Any]]) -> None:
        """Drop what lies behind `step`; `known`, from the checkpoint, stands in for a file that is gone or damaged."""
        try:
            rows = [json.loads(line) for line in self.path.read_text().splitlines()]
            rows = [row for row in rows if row["step"] <= step]
        except (OSError, ValueError, KeyError, TypeError):
            rows = known
        if sum("loss" in row for row in rows) < step:
            rows = known
        place = self.path.with_suffix(".part")
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(place, self.path)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.write("".join(json.dumps(_plain(row)) + "\n" for row in rows))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is no finite number."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def next_folder(parent: Path) -> Path:
    """runs/1, runs/2, ..."""
    taken = [int(p.name) for p in parent.iterdir() if p.name.isdecimal()] if parent.is_dir() else []
    return parent / str(max(taken, default=0) + 1)


@contextlib.contextmanager
def claimed_folder(parent: Path) -> Iterator[str]:
    """The next folder, made at once, so that a run beside this one takes another; gone again if it stays empty."""
    made_parent = not parent.exists()
    while True:
        folder = next_folder(parent)
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as problem:
            raise UsageError(f"--output {folder}: {problem.strerror}. Give a folder that can be written") from None
    try:
        yield str(folder)
    finally:
        for empty in (folder, parent) if made_parent else (folder,):
            with contextlib.suppress(OSError):
                empty.rmdir()


def draw_curve(path: Path, rows: list[dict[str, Any]], bigram: float | None) -> None:
    """The loss over the steps, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, label in (("loss", "training"), ("held_out_loss", "held out")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if key == "held_out_loss" else "")
    if bigram is not None:
        axes.axhline(bigram, linestyle=":", color="gray", label="bigram table, held out")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    place = path.with_name(f".{path.name}")
    figure.savefig(place, format="png")
    pyplot.close(figure)
    os.replace(place, path)
