"""Small runs for the tests: a GPT of a few thousand parameters on text that is made up here."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamina.train.config import Architecture, Batches, Config, Optimisation, Sharding, Watching
from lamina.train.resolve import Machine, resolve
from lamina.train.run import Request, run

SECTIONS = ("batches", "optimisation", "architecture", "sharding", "watching")


def write_text(folder: Path, lines: int = 400) -> Path:
    """Text with something to learn: sums that are right."""
    path = folder / "sums.txt"
    path.write_text("".join(f"{i} + {i % 7} = {i + i % 7}\n" for i in range(lines)))
    return path


def small(data: Path, output: Path, **changes: Any) -> Config:
    """A run of 12 steps; `changes` are keys of any section."""
    config = Config(
        data=str(data),
        output=str(output),
        architecture=Architecture(width=16, layers=2, heads=2),
        batches=Batches(length=16, batch=4),
        optimisation=Optimisation(steps=12, lr=1e-2),
        sharding=Sharding(strategy="zero3", precision="fp32"),
        watching=Watching(evaluate_every=6, evaluate_batches=1, log_every=4, save_every=6, sample_tokens=0),
    )
    return changed(config, **changes)


def changed(config: Config, **changes: Any) -> Config:
    for key, value in changes.items():
        owner = next((n for n in SECTIONS if key in vars(getattr(config, n))), None)
        if owner is None:
            config = replace(config, **{key: value})
        else:
            config = replace(config, **{owner: replace(getattr(config, owner), **{key: value})})
    return config


def train(world: int, config: Config, resume: bool = False) -> str:
    """On a rank: the run, and what rank 0 shows of it."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        run(Request(resolve(config, Machine(world, on_gpu=False)), resume))
    return shown.getvalue()


def losses(folder: Path, key: str = "loss") -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in rows if key in row}
