"""The step as data: which unit is gathered, used and reduced, in which order.

Eager runtimes decide at each hook what to send next, so the order of collectives is whatever autograd happens to do on
this rank. Here the order is a list that all ranks hold alike: collectives are issued in its order, on every rank, none
skipped. Uses stand in it as markers: what follows a marker may be issued as soon as that use has begun; a gather into
bytes that this use still reads is issued there too, and waits on its lane.

Note [Program order]
    1. AGu precedes the use that needs it; between them no RSu, and nothing that touches the bytes of u for another
       unit: no gather and no use. Every use needs its weights but the backward of a lookup (an embedding), which
       touches bytes only where it leaves gradients there: where RSu is the next that u does.
    2. RSu follows BWDu, the last use of u before it, which leaves the gradients over the weights; between the two no AG
       of u, and no gather or gradients of a unit that shares bytes with u.
    3. The text form and the list are the same thing: `Program.parse(p.text()) == p`.

Pure: no communication, no device.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Conflicts = Callable[[int], Iterable[int]]


class Op(enum.Enum):
    GATHER = "AG"
    FORWARD = "FWD"
    BACKWARD = "BWD"
    REDUCE = "RS"

    def __init__(self, short: str) -> None:
        self.is_collective = short in ("AG", "RS")
        self.verb = self.name.lower()


GATHER, FORWARD, BACKWARD, REDUCE = Op  # `Op.GATHER` is a search on Python 3.11, of 0.1 us


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a program."""

    op: Op
    unit: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.unit}"


@dataclass(frozen=True)
class Program:
    """Steps in the order in which they are issued."""

    steps: tuple[Step, ...]

    def text(self) -> str:
        return " ".join(map(str, self.steps))

    @classmethod
    def parse(cls, text: str) -> Program:
        steps = []
        for word in text.split():
            name = word.rstrip("0123456789")
            steps.append(Step(Op(name), int(word[len(name) :])))
        return cls(tuple(steps))

    def count(self, op: Op, unit: int | None = None) -> int:
        return sum(s.op is op and unit in (None, s.unit) for s in self.steps)

    def check(
        self,
        conflicts: Conflicts,
        resident: Iterable[int] = (),
        trainable: Iterable[int] = (),
        lookups: Iterable[int] = (),
    ) -> None:
        """The law of Note [Program order].

        `resident` are the units gathered before the program begins; the backwards of `lookups` need no weights. A unit
        that no step reduces passes for a frozen one, except those named in `trainable`.
        """
        needless = {Step(Op.BACKWARD, unit) for unit in lookups}
        alive, unreduced, pending = set(resident), set[int](), set[int]()
        ended: dict[int, str] = {}  # by unit, what its weights have last given way to
        leaving_gradients = self._leaving_gradients()
        for position, step in enumerate(self.steps):
            unit, sharing, place = step.unit, set(conflicts(step.unit)), f"{step} at {position}"
            if step.op is Op.REDUCE:
                assert unit in unreduced, f"{place} finds no gradients: the last use of the unit is not a backward"
                for waiting in (alive, unreduced, pending):
                    waiting.discard(unit)
                ended[unit] = place
                continue
            if step.op is not Op.GATHER and step not in needless:
                reason = f"overwritten or let go by {ended[unit]}" if unit in ended else "never gathered"
                assert unit in alive, f"{place} finds its weights {reason}"
            if step.op is Op.GATHER or position in leaving_gradients:
                lost = (sharing | {unit}) & unreduced
                assert not lost, f"{place} would overwrite gradients of {sorted(lost)} that wait for their reduction"
                ended.update(dict.fromkeys(alive & sharing, place))
                alive -= sharing
                (alive if step.op is Op.GATHER else unreduced).add(unit)
            if step.op is Op.BACKWARD:
                pending.add(unit)
        assert not pending & set(trainable), f"units {sorted(pending & set(trainable))} are never reduced"

    def _leaving_gradients(self) -> set[int]:
        """Positions of the backwards that leave gradients over the weights: a reduction follows, and no further use."""
        positions, following = set(), dict[int, Op]()
        for position in range(len(self.steps) - 1, -1, -1):
            step = self.steps[position]
            if step.op is Op.BACKWARD and following.get(step.unit) is Op.REDUCE:
                positions.add(position)
            if step.op is not Op.GATHER:
                following[step.unit] = step.op
        return positions


@dataclass(frozen=True)
class UnitTraits:
    """What the plan of a step must know about one unit, in order of use."""

    trainable: bool = True
    resident: bool = False  # its weights stay: gathered once, for its first use
    encloses: bool = False  # its window holds the windows of all others (the root)
    is_lookup: bool = False  # an embedding, whose backward needs no weights


def plan_step(units: Sequence[UnitTraits], conflicts: Conflicts, ahead: int = 1) -> Program:
    """Forward in the given order, backward in the reverse one, each gather as early as the arena allows.

    N equal units in k slots need 2N - k gathers: the last k of the forward are still there when backward begins. A
    lookup needs one, for its forward.
    """
    alive: set[int] = set()
    steps: list[Step] = []

    def use(op: Op, unit: int) -> None:
        if unit not in alive and not (op is Op.BACKWARD and units[unit].is_lookup):
            steps.append(Step(Op.GATHER, unit))
            alive.difference_update(conflicts(unit))
            alive.add(unit)
        steps.append(Step(op, unit))

    def reduce(unit: int) -> None:
        if units[unit].trainable:
            steps.append(Step(Op.REDUCE, unit))
            if not units[unit].resident:
                alive.discard(unit)

    enclosing = [u for u, traits in enumerate(units) if traits.encloses]
    inner = [u for u, traits in enumerate(units) if not traits.encloses]
    for unit in enclosing + inner:
        use(Op.FORWARD, unit)
    for unit in enclosing + inner[::-1]:
        use(Op.BACKWARD, unit)
        if not units[unit].encloses:
            reduce(unit)
    for unit in enclosing[::-1]:
        reduce(unit)
    return Program(move_gathers_ahead(steps, conflicts, ahead))


def move_gathers_ahead(steps: Sequence[Step], conflicts: Conflicts, ahead: int = 1) -> tuple[Step, ...]:
    """Let each gather be issued `ahead` uses before the use that needs it, as far as Note [Program order] allows.

    0 leaves every gather directly before its use.
    """
    if ahead < 1:
        return tuple(steps)
    moved: list[Step] = []
    for step in steps:
        place = len(moved)
        if step.op is Op.GATHER:
            place = _earliest_place(moved, step.unit, set(conflicts(step.unit)), ahead)
        moved.insert(place, step)
    return tuple(moved)


def _earliest_place(before: Sequence[Step], unit: int, sharing: set[int], ahead: int) -> int:
    """Index in `before` at which the gather of `unit` may stand; gathers keep their order among themselves."""
    passed = 0
    for index in range(len(before) - 1, -1, -1):
        step = before[index]
        if step.op is Op.GATHER or step.unit == unit or step.unit in sharing:
            return index + 1
        if not step.op.is_collective:
            passed += 1
            if passed == ahead:
                return index + 1  # right behind the marker: beside the use that begins there
    return 0
