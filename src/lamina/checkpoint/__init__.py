"""Checkpoints that load into any layout: `save`, `load`, `latest`; docs/checkpoints.md tells the whole."""

from __future__ import annotations

from lamina.checkpoint.api import export, finish, keep_last, latest, load, save

__all__ = ["export", "finish", "keep_last", "latest", "load", "save"]
