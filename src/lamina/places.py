"""Names of the public API whose parts are still to come; each says what there is instead."""

from __future__ import annotations

from typing import Any, NoReturn

from lamina.errors import NotBuilt


def _not_built(name: str, instead: str) -> NoReturn:
    raise NotBuilt(f"lamina.{name} is not built yet. {instead}")


def adopt(model: Any, submodule: Any) -> NoReturn:
    """Take parameters that were added after `shard()` into the sharded model."""
    _not_built("adopt()", "Add adapters before lamina.shard(), or build and shard the model anew")
