"""Optimizers and gradient clipping over the flat ranges of a sharded model."""

from __future__ import annotations

from lamina.optim.adamw import AdamW
from lamina.optim.clip import clip_grad_norm_

__all__ = ["AdamW", "clip_grad_norm_"]
