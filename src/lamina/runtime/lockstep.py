"""Agreement step by step, where there is no program yet or a rank's path has left it.

Ranks ask for different things where their paths differ. One request is served at a time, the same one on all ranks:
reductions first, then the unit that comes first (in a backward: last); the end of the phase when all have come to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from lamina.core.control import Control, name_ranks
from lamina.core.program import Op, Step
from lamina.core.watch_judge import LEAVES, cure_of
from lamina.errors import Disagreement, ParameterChanged
from lamina.runtime.phase import Key, Kind, Phase
from lamina.runtime.unit import Unit

OPS = tuple(Op)
END = len(OPS)
MASK_BITS = 62
FIRST_MASK = 6  # column
FREEZE_ALIKE = (
    "its gradient would be a mean of some ranks' parts and zeros. Call `requires_grad_(...)` alike on every rank, "
    "before the forward; what only some ranks use needs no freezing"
)

# The step, whether any rank needs the gather, whether it was this rank's request.
Serve = Callable[[Step, bool, bool], None]


class Lockstep:
    """Requests and answers over the control group."""

    def __init__(self, control: Control, units: Sequence[Unit]) -> None:
        self.control, self.units = control, list(units)
        self.unit_names = [unit.name for unit in units]
        self.rounds = 0

    def agree(self, phase: Phase, step: Step, need: Callable[[], bool], serve: Serve) -> None:
        """Serve all ranks' requests in the agreed order until this rank's own step has been."""
        while True:
            rows = self._exchange(phase, OPS.index(step.op), step.unit, need(), frozenset())
            chosen = self._choose(phase, rows)
            mine = chosen == step
            assert chosen is not None
            asking = [row for row in rows if (row[2], row[3]) == (OPS.index(chosen.op), chosen.unit)]
            serve(chosen, any(row[4] for row in asking), mine)
            if mine:
                return

    def end(self, phase: Phase, resident: Callable[[], frozenset[int]], serve: Serve) -> frozenset[int]:
        """Serve what others still ask for until all have come to the end; units that are resident on every rank."""
        while True:
            rows = self._exchange(phase, END, 0, False, resident())
            chosen = self._choose(phase, rows)
            if chosen is None:
                return frozenset(
                    unit
                    for unit in range(len(self.unit_names))
                    if all(row[FIRST_MASK + unit // MASK_BITS] >> (unit % MASK_BITS) & 1 for row in rows)
                )
            asking = [row for row in rows if (row[2], row[3]) == (OPS.index(chosen.op), chosen.unit)]
            serve(chosen, any(row[4] for row in asking), False)

    def _exchange(self, phase: Phase, op: int, unit: int, need: bool, resident: frozenset[int]) -> list[list[int]]:
        self.rounds += 1
        self.control.position.verb = LEAVES if phase.deviated else "agrees on"
        self.control.position.unit = "the end" if op == END else f"{OPS[op].name.lower()} of {self.unit_names[unit]}"
        masks = [
            sum(1 << (i - base) for i in resident if base <= i < base + MASK_BITS)
            for base in range(0, len(self.unit_names), MASK_BITS)
        ]
        trained = zlib.crc32(bytes(self._trained(phase)))
        rows = self.control.exchange([phase.number, key_hash(phase.key), op, unit, int(need), trained, *masks], "step")
        if len({tuple(row[:2]) for row in rows}) > 1:
            self._disagree(phase, [row[0] for row in rows])
        if len({row[FIRST_MASK - 1] for row in rows}) > 1:
            self._refuse_frozen_on_some(phase)
        return rows

    def _trained(self, phase: Phase) -> list[bool]:
        """Which parameters require a gradient here; without gradients it does not matter."""
        if phase.key.kind is Kind.FORWARD and not phase.key.grad:
            return []
        return [requires for unit in self.units for requires in unit.requires]

    def _refuse_frozen_on_some(self, phase: Phase) -> None:
        rows = self.control.exchange([int(requires) for requires in self._trained(phase)], "requires_grad")
        names = [spec.name for unit in self.units for spec in unit.layout.params]
        for number, name in enumerate(names):
            frozen = [rank for rank, row in enumerate(rows) if not row[number]]
            if frozen and len(frozen) < len(rows):
                raise ParameterChanged(
                    f"`{name}` is frozen on {name_ranks(frozen)} of {len(rows)} only: {FREEZE_ALIKE}"
                )

    def _choose(self, phase: Phase, rows: list[list[int]]) -> Step | None:
        wanted = [Step(OPS[row[2]], row[3]) for row in rows if row[2] != END]
        reduces = [step for step in wanted if step.op is Op.REDUCE]
        sign = -1 if phase.is_backward else 1
        return min(reduces or wanted, key=lambda s: (sign * s.unit, OPS.index(s.op)), default=None)

    def _disagree(self, phase: Phase, numbers: Sequence[int]) -> None:
        began = self.control.history().get(phase.number, "")
        words = self.control.exchange_text(self.control.words() + (f" in {began}" if began else ""))
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(words))
        most, least = max(numbers), min(numbers)
        if most > least:
            said += (
                f". {name_ranks([numbers.index(most)]).capitalize()} has begun {most} forwards and backwards so far, "
                f"{name_ranks([numbers.index(least)])} {least}"
            )
        raise Disagreement(f"ranks disagree: {said}. {cure_of(said)}")


def key_hash(key: Key) -> int:
    """A number that is equal on ranks at the same place."""
    return zlib.crc32(f"{key.kind.value} {key.grad} {key.entry} {sorted(key.resident)}".encode())
