"""What the runtime itself moves over a device's memory: casts of masters, gradients laid out and summed, the update.

A collective takes links. Beside it run kernels of the runtime's own, which no link hides: they read and write the same
memory as the model's, one after the other with them (in traces of steps on one H200 a step is the sum of its kernels:
benchmarks/plan_time/results/parts_h200.json). Each is counted here from what the code named beside it does.

Pure: no communication, no device.
"""

from __future__ import annotations

from lamina.core.laying_out import must_lay_out
from lamina.core.layout import lay_out
from lamina.core.strategy import Factors
from lamina.planner.workload import Choice, UnitWork

WIDE = 4  # bytes of an element of masters, gradients and moments
UPDATE_BYTES = 7 * WIDE  # AdamW, an owned element: master, gradient and moments read, all but the gradient written
NORM_BYTES = WIDE  # the gradient read once more


def is_plain(choice: Choice, factors: Factors) -> bool:
    """Parameters are their own masters: nothing is gathered or cast."""
    return factors.optimizer == 1 and choice.compute_bytes == WIDE


def is_published(choice: Choice, factors: Factors) -> bool:
    """Peers read weights that each rank has cast once (runtime/publishing.py)."""
    return choice.transport == "peer" and factors.shards_parameters


def gather_bytes(unit: UnitWork, choice: Choice, factors: Factors) -> float:
    """Of a gather, by micro-batch: masters are cast into the slot, or what this rank has published is copied."""
    numel = unit.trainable_numel + unit.frozen_numel
    if is_plain(choice, factors):
        return 0.0
    if is_published(choice, factors):
        return 2.0 * choice.compute_bytes * numel / factors.params
    times = 1 if factors.shards_parameters else choice.accumulation  # what is not split is gathered once a step
    return float(WIDE + choice.compute_bytes) * numel / factors.optimizer / times


def reduce_bytes(unit: UnitWork, choice: Choice, factors: Factors, on_cpu: bool) -> float:
    """Of one micro-batch: gradients laid out (gradients.py), waiting sums, and sums of what arrives (reducing.py)."""
    numel, count = float(unit.trainable_numel), choice.accumulation
    if not numel or (factors.world == 1 and is_plain(choice, factors)):
        return 0.0
    moved = 0.0
    if lays_out(unit, choice, factors):
        moved += numel * (choice.compute_bytes + choice.wire_bytes)
    sent = sent_bytes(choice, factors)
    if factors.world == 1:
        return moved + _sum_bytes(numel, 1, choice.compute_bytes, on_cpu)
    if sums_wait(choice, factors):
        moved += numel / factors.grads * (2 * WIDE + choice.wire_bytes)
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
            moved += numel * (sent + WIDE) / count
        moved += 2 * numel * WIDE / count
    return moved


def update_bytes(choice: Choice, factors: Factors) -> int:
    """Once a step, of an owned element."""
    return UPDATE_BYTES + NORM_BYTES + (choice.compute_bytes if is_published(choice, factors) else 0)


def lays_out(unit: UnitWork, choice: Choice, factors: Factors) -> bool:
    """Whether gradients are copied side by side before they are reduced (runtime/direct.py, Note [Direct] 2)."""
    if choice.transport != "peer" or choice.gradients != "auto" or choice.wire_bytes != choice.compute_bytes:
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
    again = (2 if on_cpu else 0) * WIDE
    return numel * (row_bytes + WIDE + (rows - 1) * (row_bytes + again))
