"""Small blocks that share a unit.

What a unit costs the host, and a collective its latency, is the same for small ones. So neighbours are joined until a
unit's bytes count, but never so far that few units would hold most of the model at once
(docs/decisions/joined-units.md).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from lamina.runtime.auto_units import Choice
from lamina.runtime.module_graph import ModuleGraph, within

ENOUGH_NUMEL = 16 << 20  # elements of a unit that needs no more: 32 MiB in 16 bits
FEWEST = 6  # units that neighbours are joined into; three of them have a place at a time


def join_small(graph: ModuleGraph, choices: Sequence[Choice], numel: Mapping[str, int]) -> list[tuple[Choice, ...]]:
    """The choices by unit. `numel`: elements that are dealt out, by parameter."""
    order = {name: place for place, name in enumerate(graph.modules)}
    ordered = sorted(choices, key=lambda choice: order[choice.module])
    return [group for row in _rows(graph, ordered) for group in _joined(graph, row, numel)]


def _rows(graph: ModuleGraph, choices: Sequence[Choice]) -> Iterator[list[Choice]]:
    """Blocks that stand side by side; everything else alone."""
    for _, row in itertools.groupby(choices, functools.partial(_row_of, graph, choices)):
        yield list(row)


def _row_of(graph: ModuleGraph, choices: Sequence[Choice], choice: Choice) -> str:
    """The same for all of a row."""
    name = choice.module
    parent, _, last = name.rpartition(".")
    is_around = any(within(other.module, name) for other in choices if other is not choice)
    is_one_of_many = isinstance(graph.modules[parent], nn.ModuleDict)  # of which a forward may take one
    if not choice.is_block or is_around or is_one_of_many:
        return name
    return f"{parent}.{last.rstrip('0123456789')}"  # layers.0, layers.1; down1, down2


def _joined(graph: ModuleGraph, row: Sequence[Choice], numel: Mapping[str, int]) -> Iterator[tuple[Choice, ...]]:
    largest = max(sum(numel.get(p, 0) for p in graph.inside(choice.module)) for choice in row)
    together = min(math.ceil(ENOUGH_NUMEL / max(largest, 1)), len(row) // FEWEST)
    units = len(row) if together < 2 else math.ceil(len(row) / together)
    for unit in range(units):
        yield tuple(row[unit * len(row) // units : (unit + 1) * len(row) // units])
