"""How often anything was registered in modules of this process: models look for what is new when this has changed."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class _Registrations:
    count = 0
    is_counting = False


def count_from_here() -> None:
    if not _Registrations.is_counting:
        _Registrations.is_counting = True
        register_module_module_registration_hook(note)
        register_module_parameter_registration_hook(note)


def count() -> int:
    return _Registrations.count


def note(*_: Any) -> None:
    """Something has come that models may not know."""
    _Registrations.count += 1
