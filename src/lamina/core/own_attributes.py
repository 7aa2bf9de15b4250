"""What an object of the user's holds, past code of its class that would answer for it.

Objects that pass through a forward (configurations, batches, proxies) may run any code where an attribute is read, and
raise what they like: transformers' configurations do for sizes that differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def own_attributes(value: object) -> dict[str, Any]:
    """Its own dict, not a copy; an empty one where it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def own_values(value: object) -> Iterator[Any]:
    """Of all attributes, those in slots included."""
    yield from own_attributes(value).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(kind).get(name)
            if isinstance(member, _SLOT):
                try:
                    yield member.__get__(value)
                except AttributeError:  # nothing was put there
                    continue


class _Slotted:
    __slots__ = ("slot",)


_SLOT = type(vars(_Slotted)["slot"])
