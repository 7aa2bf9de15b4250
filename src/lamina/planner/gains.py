"""What would make a step faster: each change is forecast like the step itself, and none is named that does nothing.

Pure: no communication, no device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from lamina.core.strategy import resolve
from lamina.planner.machine import Machine
from lamina.planner.rates import alignment
from lamina.planner.time import StepTime, forecast_time
from lamina.planner.workload import Choice, MatrixProduct, UnitWork, Workload

LEAST = 0.01  # more tokens a second: less is not worth a change
MUCH = 1.0  # from here on it is said in times
UNDER = "masters in halves under lamina.optim.AdamW(max_norm=...)"


def gains(
    time: StepTime,
    workload: Workload,
    choice: Choice,
    machine: Machine,
    others: Iterable[tuple[str, float]] = (),
    fits: Callable[[Choice], bool] = lambda _: True,
    halves: bool | None = None,
    recorded: Callable[[Choice], Choice] = lambda choice: replace(choice, captured=True, halved=False),
) -> tuple[str, ...]:
    """Single changes and what each would bring, the largest first; `others` in words, with their tokens a second.

    `fits`: whether there is memory for a choice; what has none is not named. `halves`: what was asked for. `recorded`:
    the same choice, if the step was captured.
    """
    found = []
    changes = _changes(time, choice, machine, fits, halves, recorded)
    tried = ((words, forecast_time(workload, changed, machine).tokens_per_s) for words, changed in changes)
    rounded = (
        (words, forecast_time(changed, choice, machine).tokens_per_s) for words, changed in _rounded(workload, machine)
    )
    for words, tokens_per_s in itertools.chain(tried, rounded, others):
        more = tokens_per_s / time.tokens_per_s - 1
        if more >= LEAST:
            much = f"{more:.0%} more" if more < MUCH else f"{1 + more:.1f} times the"
            found.append((more, f"{much} tokens a second: {words}"))
    return tuple(text for _, text in sorted(found, reverse=True))


def _changes(
    time: StepTime,
    choice: Choice,
    machine: Machine,
    fits: Callable[[Choice], bool],
    halves: bool | None,
    recorded: Callable[[Choice], Choice],
) -> Iterator[tuple[str, Choice]]:
    of = f"of {time.total_ms:.1f} ms"
    if not choice.compiled and not machine.is_cpu:
        yield "compiled units (compile=True, --compile)", replace(choice, compiled=True)
    if not choice.captured and not machine.is_cpu and fits(recorded(choice)):
        waits = f"the device waits for the host for {time.host_ms:.1f} {of}"
        yield f"lamina.capture, or a larger batch; {waits}", recorded(choice)
    count, more = choice.accumulation, replace(choice, accumulation=2 * choice.accumulation)
    if fits(more):
        yield (
            f"--accumulate {2 * count}, or a larger batch; nothing hides {time.exposed_ms:.1f} {of} of collectives, "
            f"{time.optimizer_ms:.1f} come once a step",
            more,
        )
    shards = resolve(choice.strategy, choice.world, choice.shard_size).params
    if choice.transport == "peer" or machine.is_cpu or not 1 < shards <= machine.gpus_per_node:
        return
    slowed = f"collectives slow compute by {time.stretched_ms:.1f} {of}"
    peers = replace(choice, transport="peer", halved=False)
    halved = replace(peers, halved=True)
    if halves is not False and fits(halved):
        yield f"transport='peer', with {UNDER} (run on two GPUs so far); {slowed}", halved
    elif fits(peers):
        yield f"transport='peer' (takes memory; run on two GPUs so far); {slowed}", peers


def _rounded(workload: Workload, machine: Machine) -> Iterator[tuple[str, Workload]]:
    """Sizes that are no multiples of 8 rounded up to such: Note [Odd sizes] in rates.py."""
    if machine.is_cpu:
        return
    names, units = [], []
    for unit in workload.units:
        sizes = {frozenset((p.n, p.k)) for p in unit.forward_products if _is_odd(p)}
        odd = [p for p in unit.params if frozenset(p.shape[-2:]) in sizes]
        names += [f"{p.name} {p.shape}" for p in odd]
        units.append(_with_rounded(unit, {frozenset(p.shape[-2:]) for p in odd}) if odd else unit)
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"sizes that are multiples of 8: {names[0]}{others}", replace(workload, units=tuple(units))


def _is_odd(product: MatrixProduct) -> bool:
    return product.dtype_bytes == 2 and not product.is_attention and alignment(product.n, product.k) < 8


def _with_rounded(unit: UnitWork, sizes: set[frozenset[int]]) -> UnitWork:
    """Its products with parameters of these sizes; those of activations alone stay as the input makes them."""
    products = tuple(
        replace(p, n=8 * math.ceil(p.n / 8), k=8 * math.ceil(p.k / 8))
        if _is_odd(p) and frozenset((p.n, p.k)) in sizes
        else p
        for p in unit.forward_products
    )
    return replace(unit, forward_products=products)
