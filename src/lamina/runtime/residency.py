"""Which units are gathered, and where: homes, overflow slots, eviction.

Note [Room]
    1. A gather goes into the unit's home. Units that share its bytes and are not in use lose theirs.
    2. If one of them is in use, the gather goes into an overflow slot, which is counted.
    3. Saved tensors keep addresses: a backward reads the slot that its forward read, filled by a local copy if the
       weights arrived elsewhere.
    4. In a backward, overflow slots live until its end: recomputed tensors may point into them.
    5. Gradients are laid over the unit's own weights. Where these have gone (a lookup's), they take the place of a
       frozen unit, whose stay no reduction has ended, but of no other: that may be read once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamina.core.lanes import Lanes
from lamina.core.slots import EMPTY, GATHERING, GRADS, WEIGHTS, Slot
from lamina.errors import StateError
from lamina.runtime.gathering import Gatherer
from lamina.runtime.reducing import Reducer
from lamina.runtime.unit import Unit


class Residency:
    """The slots of all units on this rank."""

    def __init__(self, units: Sequence[Unit], gatherer: Gatherer, reducer: Reducer, lanes: Lanes) -> None:
        self.units, self.gatherer, self.reducer, self.lanes = list(units), gatherer, reducer, lanes

    def here(self) -> frozenset[int]:
        """Units whose home holds weights."""
        found = []
        for unit in self.units:  # a comprehension is a call
            slot = unit.slot
            if slot is not None and (slot.state is WEIGHTS or slot.state is GATHERING):
                found.append(unit.index)
        return frozenset(found)

    def conflicts(self, index: int) -> list[int]:
        """Units that share bytes with a unit."""
        slot = self.units[index].slot
        return [] if slot is None else [u.index for u in self.units if u.slot is not None and u.slot in slot.shares]

    def gather(self, unit: Unit) -> None:
        """Take part in the gather of a unit, into its home if that is free, else into an overflow slot."""
        slot = unit.slot
        if slot is None:
            return
        pending = self.reducer.pending
        if pending is not None and (pending.slot is slot or pending.slot in slot.shares):
            self.reducer.vacate()
        if not self._make_room(slot):
            slot = self._overflow_slot(unit)
        self.gatherer.start(unit, slot)

    def refuse_old(self, unit: Unit, one_sided: bool) -> None:
        """A forward that has changed masters must not read what was gathered, or published, before."""
        changed = unit.dirty.value if unit.communicates else unit.was_written()
        if unit.plain or not changed or not (unit.is_ready or (one_sided and unit.sharded)):
            return
        raise StateError(
            f"parameters of `{unit.name}` were changed inside this forward, which would go on with the old ones: their "
            "weights were gathered before. Change parameters between steps (move that line, or the call of the method "
            "that does it, to where the model is called)"
        )

    def would_wait(self, slot: Slot | None) -> bool:
        """Whether a gather ahead of need should rather wait: a use still reads these bytes."""
        if slot is None or (slot.pins and slot.state is WEIGHTS):
            return False  # the same weights, in use
        for other in slot.busy:  # noqa: SIM110  # a generator costs more than this loop
            if other.pins and other in slot.shares:
                return True
        return False

    def weights_in(self, unit: Unit, wanted: Slot | None) -> Slot:
        """The slot that a use reads, its weights there: the wanted one if one is given, else any. Note [Room] 3."""
        home = unit.slot
        if home is not None and (wanted is None or wanted is home):
            if home.state is GATHERING:
                self.gatherer.finish(home)
            if home.state is WEIGHTS:
                return home
        holder = next((slot for slot in unit.slots if slot.has_weights), None)
        assert holder is not None, f"{unit.name} was not gathered"
        slot = holder if wanted is None else wanted
        if not slot.has_weights:
            self._copy(unit, holder, slot)
        self.gatherer.finish(slot)
        return slot

    def release(self, unit: Unit, slot: Slot, hold_overflow: bool) -> None:
        """A use no longer reads a slot."""
        if slot.pins == 0:
            return
        slot.pins -= 1
        if slot.pins == 0:
            slot.freed = self.lanes.compute.mark()
            if unit.windows == 0 and (slot.home or not hold_overflow):
                slot.keepers.lock(unit.visits.alive)
            if hold_overflow and slot.counter._version != slot.version:  # in forwards the module's name is known
                unit.refuse_writes(slot, "during the backward of that unit")
            if not slot.home and not unit.kept and not hold_overflow:
                slot.to(EMPTY)
                slot.drop_memory()

    def empty(self, units: Sequence[Unit]) -> None:
        """Forget weights where no use reads them."""
        for unit in units:
            home = unit.slot
            if not unit.overflow and (home is None or home.state is EMPTY):
                continue
            for slot in unit.slots:
                if slot.state is EMPTY:
                    continue
                self.gatherer.finish(slot)
                if slot.state is WEIGHTS and slot.pins == 0:
                    if not slot.home:
                        slot.keepers.lock(unit.visits.alive)
                    slot.to(EMPTY)
                    slot.drop_memory()

    def free_home(self, unit: Unit) -> Slot | None:
        """The unit's own slot, if its weights are dead and its bytes are nobody else's: gradients may lie there."""
        slot = unit.slot
        if slot is None or not unit.sharded or slot.pins or unit.kept or self.reducer.wire is not None:
            return None
        if slot.state is GATHERING:
            self.gatherer.finish(slot)
        if slot.state is WEIGHTS:
            return slot
        others = [other for other in slot.busy if other in slot.shares]
        if any(other.pins or (other.state is not EMPTY and not _is_left(other)) for other in others):
            return None
        for other in others:
            if other.state is WEIGHTS:
                other.to(EMPTY)
        return slot

    def clear(self) -> None:
        """After an error that the user caught: nothing is open, gathered or half reduced any more."""
        self.reducer.drop_pending()
        self.reducer.let_go()
        for unit in self.units:
            if unit.windows:
                unit.swap_out()
                unit.windows = 0
            for slot in unit.slots:
                if slot.pins:
                    slot.pins, slot.freed = 0, self.lanes.compute.mark()
                slot.keepers.lock(unit.visits.alive)
                for full in slot.fulls:
                    full.grad = None
                self.gatherer.finish(slot)
                if slot.state is not EMPTY:
                    slot.to(EMPTY)

    # ---- making room -------------------------------------------------------------------------------------------

    def _make_room(self, slot: Slot) -> bool:
        """Empty those that share its bytes; False: one of them is in use, and all stay as they are."""
        if slot.state is GRADS:
            return False
        sharing = []
        for other in slot.busy:
            if other in slot.shares:
                if other.pins or other.state is GRADS:
                    return False
                sharing.append(other)
        for other in sharing:
            if other.state is not EMPTY:
                if other.state is GATHERING:
                    self.gatherer.finish(other)
                other.to(EMPTY)
            if other.freed is not None:
                self.lanes.gather.wait(other.freed)
                other.freed = None  # whoever writes there next does it on this lane, or waits for it
            del slot.busy[other]
        return True

    def _copy(self, unit: Unit, source: Slot, target: Slot) -> None:
        self.gatherer.finish(source)
        if target.home:
            if not self._make_room(target):
                self.reducer.vacate()
                if not self._make_room(target):
                    raise StateError(
                        f"`{unit.name}`: its backward needs the memory in which its forward ran, and another unit that "
                        "shares it is in use. Type slots= with a larger number in lamina.shard()"
                    )
            self.lanes.compute.wait(target.freed)
            self.lanes.compute.wait(self.lanes.gather.mark())  # it has waited for all who share the bytes
        target.take_memory()
        target.to(GATHERING)
        with torch.no_grad():
            target.buffer.copy_(source.buffer)
        target.to(WEIGHTS)

    def _overflow_slot(self, unit: Unit) -> Slot:
        unit.overflows += 1
        slot = next((s for s in unit.overflow if s.state is EMPTY and s.pins == 0), None)
        if slot is None:
            with torch.inference_mode(False):
                buffer = torch.empty(unit.layout.buffer_bytes, dtype=torch.uint8, device=unit.mesh.device)
                slot = Slot(unit.layout, buffer, home=False)
            unit.overflow.append(slot)
        slot.take_memory()
        slot.freed = self.lanes.compute.mark()  # whose memory it was
        return slot


def _is_left(slot: Slot) -> bool:
    """Whether it holds what nobody has taken away: Note [Room] 5."""
    return slot.state is WEIGHTS and not any(spec.trainable for spec in slot.layout.params)
