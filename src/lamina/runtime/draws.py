"""What a forward draws random numbers from, beside torch's default generators, which torch's checkpoint winds back.

Python's and numpy's global generators, and generators that modules hold or a forward is given: torch's, numpy's and
Python's.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch

PYTHONS, NUMPYS = "Python's", "numpy's"  # the global ones


def global_sources() -> tuple[str, ...]:
    return (PYTHONS, NUMPYS) if "numpy" in sys.modules else (PYTHONS,)


def is_source(value: Any) -> bool:
    kind = type(value)  # proxies answer `isinstance` for others
    if issubclass(kind, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, (numpy.random.Generator, numpy.random.RandomState))


def state_of(source: Any) -> Any:
    if source == PYTHONS:
        return random.getstate()
    if source == NUMPYS:
        return sys.modules["numpy"].random.get_state(legacy=False)
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, torch.Generator):
        return source.get_state()
    return source.get_state(legacy=False) if hasattr(source, "get_state") else source.bit_generator.state


def set_state(source: Any, state: Any) -> None:
    if source == PYTHONS:
        random.setstate(state)
    elif source == NUMPYS:
        sys.modules["numpy"].random.set_state(state)
    elif isinstance(source, random.Random):
        source.setstate(state)
    elif isinstance(source, torch.Generator) or hasattr(source, "set_state"):
        source.set_state(state)
    else:
        source.bit_generator.state = state


def has_drawn(source: Any, before: Any) -> bool:
    return pickle.dumps(state_of(source)) != pickle.dumps(before)
