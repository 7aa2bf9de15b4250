"""Fully sharded data-parallel training for PyTorch.

    model = lamina.shard(model)

is the one line a training script changes; `lamina.shard` and docs/ say the rest.
"""

from __future__ import annotations

from lamina import checkpoint, optim
from lamina.checkpoint.api import export, latest, load, save
from lamina.core.shard_spec import GlobalSpec
from lamina.core.shard_tensor import Shard
from lamina.core.strategy import Strategy
from lamina.errors import (
    CheckpointError,
    Disagreement,
    InitialisationError,
    LaminaError,
    LaunchError,
    OutOfMemory,
    ParameterChanged,
    ShardOpError,
    StateError,
    TransportError,
    UnitError,
    UsageError,
)
from lamina.launch import launch
from lamina.optim.capture import capture
from lamina.optim.clip import clip_grad_norm_
from lamina.planner.plan import plan
from lamina.runtime.access import gathered, sync
from lamina.runtime.adopting import adopt
from lamina.runtime.api import shard
from lamina.runtime.checks import check
from lamina.runtime.deferred import deferred
from lamina.runtime.parts import split_parameter
from lamina.runtime.precision import Precision
from lamina.runtime.report import report
from lamina.runtime.scopes import accumulate, debug, even, keep, token_mean, total
from lamina.trace.session import trace

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointError",
    "Disagreement",
    "GlobalSpec",
    "InitialisationError",
    "LaminaError",
    "LaunchError",
    "OutOfMemory",
    "ParameterChanged",
    "Precision",
    "Shard",
    "ShardOpError",
    "StateError",
    "Strategy",
    "TransportError",
    "UnitError",
    "UsageError",
    "accumulate",
    "adopt",
    "capture",
    "check",
    "checkpoint",
    "clip_grad_norm_",
    "debug",
    "deferred",
    "even",
    "export",
    "gathered",
    "keep",
    "latest",
    "launch",
    "load",
    "optim",
    "plan",
    "report",
    "save",
    "shard",
    "split_parameter",
    "sync",
    "token_mean",
    "total",
    "trace",
]
