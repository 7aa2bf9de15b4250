"""Checkpoints that load into any layout: `save`, `load`, `latest`; docs/checkpoints.md tells the whole."""

from __future__ import annotations

from lamina.checkpoint.api import finish, keep_last, latest, load, save

__all__ = ["finish", "keep_last", "latest", "load", "save"]
