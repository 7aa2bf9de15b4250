"""Metrics for other programs, where these are installed: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamina.errors import UsageError

Log = Callable[[dict[str, Any]], None]  # takes a row of metrics.jsonl
Opener = Callable[[Path, dict[str, Any]], Log]  # takes the run's folder and its settings


def find_logger(kind: str) -> Opener:
    """What opens the log, once there is a folder. `UsageError` if the package cannot be imported."""
    try:
        return {"none": _nowhere, "tensorboard": _tensorboard, "wandb": _wandb}[kind]()
    except ImportError as missing:
        raise UsageError(f"--log {kind}: {missing}: pip install {kind}") from None


def _nowhere() -> Opener:
    return lambda folder, config: lambda row: None


def _tensorboard() -> Opener:
    from torch.utils.tensorboard import SummaryWriter

    def start(folder: Path, config: dict[str, Any]) -> Log:
        writer = SummaryWriter(str(folder / "tensorboard"))

        def write(row: dict[str, Any]) -> None:
            for name, value in _numbers(row).items():
                writer.add_scalar(name, value, row["step"])
            writer.flush()

        return write

    return start


def _wandb() -> Opener:
    import wandb

    def start(folder: Path, config: dict[str, Any]) -> Log:
        run = wandb.init(dir=str(folder), config=config)
        return lambda row: run.log(_numbers(row), step=row["step"])

    return start


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "step" and value is not None}
