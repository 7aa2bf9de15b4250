"""The runtime: walks the program as modules and autograd nodes call.

Every hook ends here. The engine decides nothing that the plan has decided: it finds the place of what happens in the
program, issues what stands before it, and waits for the gather. Where there is no program yet, or this rank's path has
left it, all ranks agree step by step.

Note [One order]
    1. Collectives are issued in program order on every rank, none skipped: a unit that this rank does not use is
       gathered all the same and reduced with zeros.
    2. A use in another order is right as long as its weights are there. If they are not, the rest of the program is
       issued and the ranks agree what comes more; ranks that do not come to that agreement are named.
    3. Between two root forwards only what is resident by plan stays gathered; the next clears what a failed step left.
    4. Where gathers are one-sided (nobody else takes part), only reductions are collectives: gathers in the program are
       hints to prefetch, and a missing one is made on the spot.
    5. A rank that needs more than the program holds meets the others at its end: see Note [Ends] in programs.py.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from types import FrameType

import torch

from lamina.core.control import Control
from lamina.core.lanes import Lanes
from lamina.core.program import BACKWARD, FORWARD, GATHER, REDUCE, Op, Step, move_gathers_ahead
from lamina.core.shard_tensor import AS_PLAIN
from lamina.core.slots import WEIGHTY, Slot
from lamina.core.uncompiled import at_the_end_of_backward
from lamina.errors import StateError
from lamina.runtime.failed_backward import ENGINES
from lamina.runtime.gathering import Gatherer
from lamina.runtime.gradients import Gradients
from lamina.runtime.lockstep import Lockstep
from lamina.runtime.newcomers import Newcomers
from lamina.runtime.phase import Key, Kind, Phase, Recorded, current_task, leaves_out, this_call
from lamina.runtime.programs import Programs
from lamina.runtime.reducing import Reducer
from lamina.runtime.residency import Residency
from lamina.runtime.unit import Unit
from lamina.runtime.uses import Use, end_others
from lamina.runtime.wrappers import refuse_averaging_twice

_forwards = itertools.count(1)


class Engine:
    """Runs one sharded model on this rank."""

    def __init__(
        self,
        units: Sequence[Unit],
        control: Control,
        lanes: Lanes,
        gatherer: Gatherer,
        reducer: Reducer,
        ahead: int,
        one_sided: bool = False,
    ) -> None:
        self.units, self.reference = list(units), weakref.ref(self)
        self.control, self.lanes, self.gatherer, self.reducer = control, lanes, gatherer, reducer
        control.device_is_busy = lanes.are_busy
        self.ahead, self.one_sided = ahead, one_sided
        self.residency = Residency(units, gatherer, reducer, lanes)
        self.gradients = Gradients(units, control, lanes, reducer, self.residency)
        self.lockstep, self.programs = Lockstep(control, units), Programs(one_sided)
        self.newcomers: Newcomers | None = None  # parameters beside the units'
        self.phase: Phase | None = None
        self.phases = 0
        self.resident: frozenset[int] = frozenset()  # agreed: units whose home holds weights on every rank
        self.last_forward = next(_forwards)  # when the last root forward began, or else this: among all models here
        self._kept_slots: dict[int, list[Slot]] = {}  # by unit, one a `keep` scope
        ENGINES.add(self)

    # ---- phases ------------------------------------------------------------------------------------------------

    def begin_forward(self, owner: object, entry: str, call: FrameType) -> None:
        """A root forward begins: clear what an earlier step left, drop weights that may be stale."""
        self.close_failed()
        self.last_forward = next(_forwards)
        refuse_averaging_twice(self.units)
        if self.newcomers is not None:
            self.newcomers.check()
        self._drop_stale()
        self._open(Key(Kind.FORWARD, torch.is_grad_enabled(), entry, self.resident), owner, call)
        self.gatherer.publish(self.units)

    def _drop_stale(self) -> None:
        self.gatherer.choose_forms(self.units)
        with AS_PLAIN():
            for unit in self.units:
                if unit.look():
                    self.programs.clear()  # they do not reduce what was frozen
                if unit.plain:
                    continue
                unit.count_change()
                if unit.kept and unit.dirty.value:
                    raise StateError(
                        f"the weights of `{unit.name}` were changed inside lamina.keep(): leave it before the step"
                    )
                if unit.sharded or unit.dirty.value or not unit.communicates:
                    self.residency.empty([unit])
            self.gradients.give_back()
        self.resident = self.residency.here()

    def begin_backward(self, task: int) -> None:
        circumstances = ["defer"] if self.gradients.defer else []
        circumstances += [f"keep {unit.index}" for unit in self.units if unit.kept]  # they are not reduced
        key = Key(Kind.BACKWARD, self.gradients.last_micro_batch, " ".join(circumstances), self.resident)
        self._open(key, task, None)
        self.gradients.begin_phase()

    def _open(self, key: Key, owner: object, call: FrameType | None) -> None:
        if self.one_sided:
            key = Key(key.kind, key.grad, key.entry, frozenset())  # what is gathered is each rank's own affair
        self.phases += 1
        recorded = self.programs.find(key)
        mode = "lockstep" if recorded is None else "program"
        self.control.begin(self.phases, mode, key.kind.value, key.grad, key.entry)
        self.phase = Phase(self.phases, key, recorded, owner, call)
        self.gatherer.open()

    def end_forward(self) -> None:
        """The root's forward has returned or raised: issue what this rank has skipped, and agree on the end."""
        phase = self.current()
        self._close(phase)
        if not self.lanes.is_recording:
            self.lanes.join()  # casts that this rank did not wait for read masters, which may be written now

    def _close(self, phase: Phase) -> None:
        self._issue(phase, len(phase.steps))
        if phase.recorded is not None:
            everywhere = phase.recorded.resident
            if self.programs.meets(phase):
                agreed_on = self.lockstep.end(phase, self.residency.here, self._server(phase))
                if phase.log:  # another rank has left the program
                    phase.deviated, phase.parted, everywhere = True, True, agreed_on
                else:
                    self.programs.note_clean_end(phase.key)
            if phase.deviated and (phase.log or not phase.is_backward):
                self.programs.forget(phase.key)
        else:
            here = self.residency.here
            agreed = not self.one_sided or phase.is_backward
            everywhere = self.lockstep.end(phase, here, self._server(phase)) if agreed else here()
            self._record(phase, everywhere)
        self.programs.note_end(phase)
        for index in () if self.one_sided else self.residency.here() - everywhere:
            if not self.units[index].kept:
                self.residency.empty([self.units[index]])
        self.resident = everywhere
        self.phase = phase.call = None  # whose frame may hold the phase
        self.control.position.is_over = True

    def _record(self, phase: Phase, resident: frozenset[int]) -> None:
        if phase.deviated:
            self.programs.forget(phase.key)
        else:
            steps = move_gathers_ahead(phase.log, self.residency.conflicts, self.ahead)
            self.programs.record(phase.key, Recorded(steps, resident, leaves_out(phase, self.units)))

    def current(self) -> Phase:
        assert self.phase is not None
        return self.phase

    def is_stale(self) -> bool:
        """A phase that an error has ended and that was never closed."""
        return self.phase is not None and self.phase.was_left()

    def close_failed(self) -> None:
        """Between steps: close what an error that the user caught has left open."""
        if self.phase is not None or [unit for unit in self.units if unit.windows]:
            self.phase = None
            self.residency.clear()

    # ---- uses --------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, op: Op, slot: Slot | None = None, reads: bool = True) -> Slot | None:
        """A use begins: its weights are there and its modules see them when this returns; the slot they lie in.

        reads: False for the backward of a lookup, which needs no weights; see lookups.py.
        """
        phase, is_forward = self.phase, op is FORWARD
        assert phase is not None
        if is_forward:
            if unit.dirty.value or not unit.communicates:
                self.residency.refuse_old(unit, self.one_sided)
            unit.was_entered = True
        if phase.recorded is None:
            self._agree(phase, op, unit, reads)
        else:
            self._follow(phase, op, unit, reads)
        if unit.plain:
            unit.open_plain(is_forward)
            return None
        if reads:
            slot = self.residency.weights_in(unit, slot)
            slot.pins += 1
            unit.swap_in(slot, is_forward)
            unit.windows += 1
        elif slot is not None:
            unit.follow(slot, is_forward)
        if phase.recorded is not None:
            self._pump(phase)
        return slot

    def leave(self, unit: Unit, slot: Slot | None) -> None:
        """The use of a forward has ended."""
        self._shut(phase := self.phase, unit, slot, True)
        if phase is not None and phase.cursor < len(phase.steps) and phase.steps[phase.cursor].op is not FORWARD:
            self._pump(phase)

    def _shut(self, phase: Phase | None, unit: Unit, slot: Slot | None, reads: bool) -> None:
        """A use has ended: modules see the persistent parameters again, the slot may be given away."""
        if reads:
            unit.shut_window()
            if slot is not None:
                self.residency.release(unit, slot, phase is not None and phase.is_backward)

    # ---- following the program ---------------------------------------------------------------------------------

    def _follow(self, phase: Phase, op: Op, unit: Unit, reads: bool) -> None:
        steps, cursor, home = phase.steps, phase.cursor, unit.slot
        if cursor < len(steps) and (step := steps[cursor]).unit == unit.index and step.op is op:
            phase.cursor = cursor + 1
        else:
            self._jump(phase, op, unit)
        if reads and (home is None or home.state not in WEIGHTY) and not unit.is_ready:
            self._deviate(phase, op, unit)

    def _jump(self, phase: Phase, op: Op, unit: Unit) -> None:
        """The use is not the next one of the program: issue what stands before it, if its weights are not there yet."""
        place = phase.find(op, unit.index)
        if place is None:
            return
        between = phase.steps[phase.cursor : place]
        if not any(step.op.is_collective for step in between):
            phase.cursor = place + 1
        elif self.one_sided:
            if not any(step.op is REDUCE for step in between):
                phase.cursor, gather = place + 1, Step(GATHER, unit.index)
                if gather in between:
                    self._execute(phase, gather)
        elif not unit.is_ready:
            self._issue(phase, place + 1)

    def _deviate(self, phase: Phase, op: Op, unit: Unit) -> None:
        """This rank needs more than the program holds: finish it, then agree with ranks that need the same."""
        if self.one_sided:
            self.residency.gather(unit)
            phase.deviated |= not self.gatherer.is_done_by_host
            return
        self._leave_program(phase)
        self._agree(phase, op, unit)

    def _pump(self, phase: Phase) -> None:
        """Issue what stands next in the program, as long as it needs nothing that is still to come."""
        steps = phase.steps
        while (cursor := phase.cursor) < len(steps) and (op := (step := steps[cursor]).op) is not FORWARD:
            unit = self.units[step.unit]
            if op is GATHER:
                if self.residency.would_wait(unit.slot):
                    return
            elif unit.was_entered and (op is BACKWARD or step.unit not in phase.ready):
                return  # its gradients may come yet; those of a unit that this rank left out do not
            phase.cursor = cursor + 1
            if op is not BACKWARD:
                self._execute(phase, step)

    def _issue(self, phase: Phase, stop: int) -> None:
        """Issue everything before index `stop`, with zeros for reductions that this rank has nothing for."""
        while phase.cursor < stop:
            step = phase.steps[phase.cursor]
            phase.cursor += 1
            if step.op is REDUCE or (step.op is GATHER and not self.one_sided):
                self._execute(phase, step)

    def _execute(self, phase: Phase, step: Step) -> None:
        unit, position = self.units[step.unit], self.control.position
        position.verb, position.unit = step.op.verb, unit.name
        if step.op is REDUCE:
            self.gradients.reduce(phase, unit, contribute=step.unit in phase.ready)
        elif not (self.one_sided and (unit.is_ready or self.gatherer.is_done_by_host)):
            self.residency.gather(unit)

    # ---- agreeing ----------------------------------------------------------------------------------------------

    def _agree(self, phase: Phase, op: Op, unit: Unit, reads: bool = True) -> None:
        step, serve = Step(op, unit.index), self._server(phase)
        if self.one_sided and op is FORWARD:
            serve(step, not unit.is_ready, True)
        else:
            self.lockstep.agree(phase, step, lambda: reads and op is not REDUCE and not unit.is_ready, serve)

    def _server(self, phase: Phase):
        """What to do when the ranks have agreed on a step."""

        def serve(step: Step, need: bool, mine: bool) -> None:
            unit = self.units[step.unit]
            if step.op is REDUCE:
                phase.log.append(step)
                self.gradients.reduce(phase, unit, contribute=mine)
                return
            if need:
                phase.log.append(Step(GATHER, unit.index))
                self.residency.gather(unit)
            phase.log.append(step)

        return serve

    # ---- backward ----------------------------------------------------------------------------------------------

    def begin_use(self, use: Use, is_early: bool = False) -> None:
        """An output's node is about to run, or (`is_early`) a hook before it: the unit's backward begins."""
        if use.active_in == (task := current_task()):
            if use.is_early and not is_early:
                use.is_early = False
                end_others(use, self.current().tasks[task], self._finish_use)
            return
        use.check_weights(unit := self.units[use.index])
        if self.phase is None:
            self.begin_backward(task)
        phase = self.current()
        active = phase.tasks.get(task)
        if active is None:
            active = phase.tasks[task] = []
            phase.keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            at_the_end_of_backward(self._end_task, task)
        use.active_in, use.waiting, use.is_early = task, use.input_count, is_early
        active.append(use)
        if not is_early and len(active) > 1:
            end_others(use, active, self._finish_use)
        self.enter(unit, BACKWARD, use.slot(), use.reads)

    def end_use(self, use: Use) -> None:
        """The node of one of its inputs is about to run."""
        if use.active_in is None or use.active_in != current_task():
            return
        use.waiting -= 1
        if use.waiting == 0:
            self._finish_use(use)

    def _finish_use(self, use: Use) -> None:
        phase, unit = self.phase, self.units[use.index]
        assert phase is not None and use.active_in is not None
        phase.tasks[use.active_in].remove(use)
        use.active_in = None
        if not (phase.keeps_graph or use.done):
            use.finish()
        self._shut(phase, unit, use.slot(), use.reads)
        if unit.trainable and not unit.kept and (unit.visits.alive == 0 or self.gradients.all_of(unit)):
            self._finish_unit(phase, unit)
        elif phase.recorded is not None:
            self._pump(phase)

    def _finish_unit(self, phase: Phase, unit: Unit) -> None:
        """Its gradients are complete in this backward: reduce them when their turn comes."""
        if phase.recorded is None:
            self._agree(phase, REDUCE, unit)
            return
        if phase.find(REDUCE, unit.index) is not None:
            phase.ready.add(unit.index)
        # else the program does not know this reduction: it waits for the end of the backward
        self._pump(phase)

    def _end_task(self, task: int) -> None:
        """The graph task has ended: so have all uses that it began; with the outermost one, the backward."""
        if (phase := self.phase) is None or task not in phase.tasks:
            return
        for use in list(phase.tasks[task]):
            self._finish_use(use)
        del phase.tasks[task]
        if phase.owner == task:
            self.end_backward(phase)

    def end_backward(self, phase: Phase) -> None:
        late = [unit for unit in self.units if unit.trainable and not unit.kept and unit.index not in phase.ready]
        for unit in self.gradients.having(late):
            # they came after its last use had ended, or wait for a use that does not come
            if phase.recorded is not None and phase.find(REDUCE, unit.index) is None:
                self._leave_program(phase)
            self._finish_unit(phase, unit)
        self._close(phase)
        if self.gradients.last_micro_batch:  # sums of earlier micro-batches whose unit the last one did not use
            for index in sorted(self.reducer.partials.keys() - phase.reduced):
                self.gradients.reduce(phase, self.units[index], contribute=False)
        self._after_reductions(phase)

    def _leave_program(self, phase: Phase) -> None:
        """Issue what is left of the program; from here on, and the next time, ranks agree step by step."""
        self._issue(phase, len(phase.steps))
        phase.parted = phase.recorded is not None and self.programs.meets(phase)
        phase.recorded, phase.steps, phase.cursor, phase.deviated = None, (), 0, True
        self.control.position.mode = "lockstep"
        self.programs.forget(phase.key)

    def _after_reductions(self, phase: Phase) -> None:
        self.reducer.finish()
        self.residency.empty([unit for unit in self.units if unit.sharded and not unit.kept])
        self.resident = self.residency.here()
        self.gradients.settle(sorted(phase.reduced))

    # ---- keep --------------------------------------------------------------------------------------------------

    def keep(self, units: Sequence[Unit]) -> None:
        """Gather units and hold them. Collective."""
        if self.is_stale():
            self.close_failed()
        if self.phase is None:
            self._drop_stale()
            self._open(Key(Kind.KEEP, False, ",".join(str(u.index) for u in units), self.resident), units, this_call())
            self.gatherer.publish(self.units)
        phase = self.current()
        for unit in units:
            slot = self.enter(unit, FORWARD)
            if unit.plain and not unit.kept:
                self.gradients.set_aside(unit)
            unit.kept += 1
            unit.shut_window()
            if slot is not None:
                self._kept_slots.setdefault(unit.index, []).append(slot)
        if phase.owner is units:
            self._close(phase)

    def let_go(self, units: Sequence[Unit], reduce: bool) -> None:
        """End a `keep`: reduce what has gathered, give the slots back. Collective if `reduce`."""
        for unit in units:
            unit.kept -= 1
            slots = self._kept_slots.get(unit.index, [])
            if slots:
                self.residency.release(unit, slots.pop(), hold_overflow=False)
        released = [unit for unit in units if unit.kept == 0 and unit.trainable]
        if not reduce:
            for unit in released:
                self.gradients.drop(unit)
            self.gradients.settle([])
            return
        if not released:
            return
        self._open(Key(Kind.KEEP, True, "end", self.resident), units, this_call())
        phase = self.current()
        rows = self.control.exchange([int(self.gradients.any_of(unit)) for unit in released], "keep")
        for number, unit in enumerate(released):
            if any(row[number] for row in rows):
                self.gradients.reduce(phase, unit, contribute=True)
        self.phase = phase.call = None
        self._after_reductions(phase)
