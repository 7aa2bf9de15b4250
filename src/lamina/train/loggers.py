"""Metrics for other programs, where these are installed: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamina.errors import UsageError

Log = Callable[[dict[str, Any]], None]  # takes a row of metrics.jsonl


def open_logger(kind: str, folder: Path, config: dict[str, Any]) -> Log:
    """Where each row goes as well. `UsageError` if the package is not installed."""
    if kind == "tensorboard":
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("--log tensorboard: pip install tensorboard") from None
        writer = SummaryWriter(str(folder / "tensorboard"))

        def write(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    writer.add_scalar(name, value, row["step"])
            writer.flush()

        return write
    if kind == "wandb":
        try:
            import wandb
        except ImportError:
            raise UsageError("--log wandb: pip install wandb") from None
        run = wandb.init(dir=str(folder), config=config)
        return lambda row: run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
    return lambda row: None
