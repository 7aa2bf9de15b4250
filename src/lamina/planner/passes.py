"""What the runtime itself moves over a device's memory: casts of masters, gradients laid out and summed, the update.

A collective takes links. Beside it run kernels of the runtime's own, which no link hides: they read and write the same
memory as the model's, one after the other with them (in traces of steps on one H200 a step is the sum of its kernels:
benchmarks/plan_time/results/parts_h200.json). Each is counted here from what the code named beside it does.

Note [Fresh writes]
    A memory's rate is that of a copy, by the bytes it reads and writes. A CPU fetches a line before it writes to it,
    so a copy moves three bytes for two that it names, and what is written where it has been read moves two for two. On
    one core of an EPYC, 32 MiB: copied in 5.8 ms, scaled in place in 3.9, AdamW's seven passes 15.0; 1.9 to 2.1 ms a
    stream (benchmarks/plan_time/README.md). Here bytes are those that would take a copy as long.

Pure: no communication, no device.
"""

from __future__ import annotations

from lamina.core.laying_out import must_lay_out
from lamina.core.layout import lay_out
from lamina.core.strategy import Factors
from lamina.planner.workload import Choice, UnitWork

WIDE = 4  # bytes of an element of masters, gradients and moments
UPDATED = 3 * WIDE  # of an owned element AdamW writes master and moments where it has read them,
READ = 2 * WIDE  # and the gradient is read twice: by the norm, and by the update
# Of an element on a CPU, by torch's operations piece by piece (core/halves.py): a copy and a sum; six passes. With them
# an update is forecast to take 3.0 times that of whole masters; 2.7 were measured (docs/decisions/halves.md)
JOINED, HALVED = 16, 42


def is_plain(choice: Choice, factors: Factors) -> bool:
    """Parameters are their own masters: nothing is gathered or cast."""
    return factors.optimizer == 1 and choice.compute_bytes == WIDE


def is_published(choice: Choice, factors: Factors) -> bool:
    """Peers read weights that each rank has cast once (runtime/publishing.py)."""
    return choice.transport == "peer" and factors.shards_parameters


def copy_bytes(read: float, fresh: float, updated: float, on_cpu: bool) -> float:
    """How many bytes of a copy take as long: Note [Fresh writes]. `updated` are read, and written in place."""
    return (read + 2 * fresh + 2 * updated) * 2 / 3 if on_cpu else read + fresh + 2 * updated


def gather_bytes(unit: UnitWork, choice: Choice, factors: Factors, on_cpu: bool = False) -> float:
    """Of a gather, by micro-batch: masters are cast into the slot, or what is published is copied.

    On GPUs the peers' parts are copied by engines; on a CPU the rank that gathers copies all of them.
    """
    numel, size = unit.trainable_numel + unit.frozen_numel, choice.compute_bytes
    if is_plain(choice, factors):
        return 0.0
    if is_published(choice, factors):
        own = numel / (1 if on_cpu else factors.params)
        return copy_bytes(size * own, size * own, 0.0, on_cpu)
    times = 1 if factors.shards_parameters else choice.accumulation  # what is not split is gathered once a step
    own = numel / factors.optimizer / times
    return copy_bytes(WIDE * own, size * own, 0.0, on_cpu)


def reduce_bytes(unit: UnitWork, choice: Choice, factors: Factors, on_cpu: bool) -> float:
    """Of one micro-batch: gradients laid out (gradients.py), waiting sums, and sums of what arrives (reducing.py)."""
    numel, count = float(unit.trainable_numel), choice.accumulation
    if not numel or (factors.world == 1 and is_plain(choice, factors)):
        return 0.0
    moved = 0.0
    if lays_out(unit, choice, factors, on_cpu):
        moved += copy_bytes(numel * choice.compute_bytes, numel * choice.wire_bytes, 0.0, on_cpu)
    sent = sent_bytes(choice, factors)
    if factors.world == 1:
        return moved + _sum_bytes(numel, 1, choice.compute_bytes, on_cpu)
    if sums_wait(choice, factors):
        waiting = numel / factors.grads
        moved += copy_bytes(waiting * choice.wire_bytes, 0.0, waiting * WIDE, on_cpu)
    if on_cpu and is_published(choice, factors):  # what is the others' is laid out for them (transport/pulled.py)
        offered = sent * numel * (1 - 1 / factors.params)
        moved += copy_bytes(offered, offered, 0.0, on_cpu)
    is_first = True
    for index, level in enumerate(factors.levels):
        if level.size == 1:
            continue
        numel /= level.size
        rows = level.size if is_first and exchanges(choice, sent) else 1
        moved += _sum_bytes(numel, rows, sent if is_first else WIDE, on_cpu) / (1 if index < 2 else count)
        is_first = False
    if factors.replicas.size > 1:
        if is_first and sent != WIDE:
            moved += copy_bytes(numel * sent, numel * WIDE, 0.0, on_cpu) / count
        moved += copy_bytes(numel * WIDE, numel * WIDE, 0.0, on_cpu) / count
    return moved


def update_bytes(choice: Choice, factors: Factors, on_cpu: bool = False) -> float:
    """Once a step, of an owned element: norm, AdamW, and what peers are to read of it.

    On GPUs one kernel does the last two, and a halved master is read and written in its halves. On a CPU torch's
    operations do, with passes of their own.
    """
    if not is_published(choice, factors):
        return copy_bytes(READ, 0.0, UPDATED, on_cpu)
    if choice.halved:
        return copy_bytes(READ, 0.0, UPDATED, on_cpu) + (JOINED + HALVED if on_cpu else 0)
    if on_cpu:
        return copy_bytes(READ + WIDE, choice.compute_bytes, UPDATED, on_cpu)
    return copy_bytes(READ, choice.compute_bytes, UPDATED, on_cpu)


def lays_out(unit: UnitWork, choice: Choice, factors: Factors, on_cpu: bool = False) -> bool:
    """Whether gradients are copied side by side before they are reduced (runtime/direct.py, Note [Direct] 2)."""
    if on_cpu or not is_published(choice, factors):
        return True
    if choice.gradients != "auto" or choice.wire is not None:
        return True
    return sums_wait(choice, factors) or must_lay_out(lay_out(unit.name, unit.params, factors.optimizer), factors)


def sums_wait(choice: Choice, factors: Factors) -> bool:
    """Gradients of a micro-batch are added to those before it, and are reduced to the end with the last."""
    return choice.accumulation > 1 and factors.grads != factors.world


def sent_bytes(choice: Choice, factors: Factors) -> int:
    """Of a gradient's element in the first exchange: sums that wait whole are wide."""
    return WIDE if sums_wait(choice, factors) and factors.grads == 1 else choice.wire_bytes


def exchanges(choice: Choice, sent: int) -> bool:
    """All-to-all and sums of one's own, instead of a ring: 16-bit gradients, to be summed in fp32."""
    return choice.sums == "exchange" or (choice.sums == "auto" and sent < WIDE)


def _sum_bytes(numel: float, rows: int, row_bytes: int, on_cpu: bool) -> float:
    """`rows` tensors of so many elements added into a gradient: by one kernel, or on a CPU row by row (summing.py)."""
    if not on_cpu:
        return numel * (rows * row_bytes + WIDE)
    first, others = copy_bytes(row_bytes, WIDE, 0.0, on_cpu), (rows - 1) * copy_bytes(row_bytes, 0.0, WIDE, on_cpu)
    return numel * (first + others)
