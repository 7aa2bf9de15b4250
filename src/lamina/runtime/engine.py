"""The runtime: walks the program as modules and autograd nodes call.

Every hook ends here. The engine decides nothing that the plan has decided: it finds the place of what happens in the
program, issues what stands before it, and waits for the gather. Where there is no program yet, or this rank's path has
left it, all ranks agree step by step (`lockstep`).

Note [One order]
    1. Collectives are issued in program order on every rank, none skipped: a unit that this rank does not use is
       gathered all the same and reduced with zeros.
    2. A use in another order is right as long as its weights are there. If they are not, the rest of the program is
       issued and the ranks agree what comes more; ranks that do not come to that agreement are named.
    3. Between two root forwards nothing stays gathered but what is resident by plan; whatever a failed step left behind
       is cleared by the next root forward.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from lamina.core.control import Control, Flags, Position
from lamina.core.lanes import Lanes
from lamina.core.program import Op, Step, move_gathers_ahead
from lamina.core.slots import Slot, SlotState
from lamina.errors import Disagreement, StateError
from lamina.runtime.gathering import Gatherer
from lamina.runtime.phase import Key, Kind, Phase, Recorded
from lamina.runtime.reducing import Reducer, Staging
from lamina.runtime.unit import Unit
from lamina.runtime.uses import Use

_OPS = tuple(Op)
_forwards = itertools.count(1)
_END = len(_OPS)  # "this rank has come to the end of the phase"


class Engine:
    """Runs one sharded model on this rank."""

    def __init__(
        self, units: Sequence[Unit], control: Control, lanes: Lanes, gatherer: Gatherer, reducer: Reducer, ahead: int
    ) -> None:
        self.units = list(units)
        self.control, self.lanes, self.gatherer, self.reducer = control, lanes, gatherer, reducer
        self.ahead = ahead
        self.programs: dict[Key, Recorded] = {}
        self.phase: Phase | None = None
        self.phases = 0
        self.lockstep_rounds = 0
        self.resident: frozenset[int] = frozenset()  # agreed: units that hold weights on every rank
        self.last_micro_batch = True
        self.defer = False
        self.accumulating = False
        self.contributes = True  # False: this rank has run out of data and reduces zeros
        self.active_ranks = control.world  # over which gradients are averaged
        self.last_forward = 0  # when the last root forward began, among all models of the process
        self._kept_slots: dict[int, list[Slot]] = {}  # by unit, one a `keep` scope
        self._tokens: Tensor | None = None  # counted in this step's micro-batches, to be divided by at its end
        self.flags = Flags(control)

    # ---- phases ------------------------------------------------------------------------------------------------

    def begin_forward(self, owner: object, entry: str) -> None:
        """A root forward begins: clear what an earlier step left, drop weights that may be stale."""
        self._clear_leftovers()
        self.last_forward = next(_forwards)
        for unit in self.units:
            if unit.plain:
                continue
            unit.check_masters()
            if unit.kept and unit.dirty.value:
                raise StateError(f"the weights of `{unit.name}` were changed inside lamina.keep(): leave it before the step")
            if unit.sharded or unit.dirty.value or not unit.mesh.factors.uses_shards:
                self._empty(unit)
        self.resident = frozenset(u.index for u in self.units if self._settled(u))
        key = Key(Kind.FORWARD, torch.is_grad_enabled(), entry, self.resident)
        self._open(key, owner)

    def _settled(self, unit: Unit) -> bool:
        return unit.slot is not None and unit.slot.has_weights

    def begin_backward(self, task: int) -> None:
        self._open(Key(Kind.BACKWARD, self.last_micro_batch, "defer" if self.defer else "", self.resident), task)
        for unit in self.units:
            if unit.plain:
                self._set_gradients_aside(unit)

    def _open(self, key: Key, owner: object) -> None:
        self.phases += 1
        self.phase = Phase(self.phases, key, self.programs.get(key), owner)
        self.lanes.gather.wait(self.lanes.compute.mark())  # what the optimizer wrote
        self._say("begins")

    def end_forward(self) -> None:
        """The root's forward has returned or raised: issue what this rank has skipped, and agree on the end."""
        phase = self._current()
        self._run_out(phase)
        self._close(phase)

    def _close(self, phase: Phase) -> None:
        here = frozenset(u.index for u in self.units if self._settled(u))
        if phase.is_lockstep:
            everywhere = self._lockstep(_END, 0, resident=here)
            if phase.deviated:
                self.programs.pop(phase.key, None)
            else:
                steps = move_gathers_ahead(phase.log, self._conflicts, self.ahead)
                self.programs[phase.key] = Recorded(steps, everywhere)
        else:
            everywhere = phase.recorded.resident if phase.recorded else frozenset()
        for index in here - everywhere:
            if not self.units[index].kept:
                self._empty(self.units[index])
        self.resident = everywhere
        self.phase = None

    def _current(self) -> Phase:
        assert self.phase is not None
        return self.phase

    def is_stale(self) -> bool:
        """A backward that an error has ended: its phase was never closed, and no graph task is running."""
        phase = self.phase
        return phase is not None and phase.key.kind is Kind.BACKWARD and torch._C._current_graph_task_id() == -1

    def abandon(self) -> None:
        """After an error: drop the phase where it stands; the next root forward starts clean."""
        self.phase = None

    def _clear_leftovers(self) -> None:
        """After an error that the user caught: nothing is open, gathered or half reduced any more."""
        if self.phase is not None or any(u.windows for u in self.units):
            self.phase = None
            self.reducer.pending = None
            for unit in self.units:
                if unit.windows:
                    unit.swap_out()
                unit.windows = 0
                for slot in self._slots(unit):
                    slot.pins = 0
                    for full in slot.fulls:
                        full.grad = None
                    if slot.state is SlotState.GATHERING:
                        self.gatherer.finish(slot)
                    if slot.state is not SlotState.EMPTY:
                        slot.to(SlotState.EMPTY)

    def _slots(self, unit: Unit) -> list[Slot]:
        return ([unit.slot] if unit.slot is not None else []) + unit.overflow

    # ---- uses --------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, op: Op, slot: Slot | None = None) -> Slot | None:
        """A use begins: its weights are there and its modules see them when this returns; the slot they lie in."""
        phase = self._current()
        ready = unit.plain or any(s.has_weights for s in self._slots(unit))
        if phase.is_lockstep:
            self._lockstep(_OPS.index(op), unit.index, need=not ready)
        else:
            self._follow(phase, op, unit, ready)
        if unit.plain:
            self._open_window(unit, None, op)
            return None
        slot = self._weights_in(unit, slot)
        self.gatherer.finish(slot)
        slot.pins += 1
        self._open_window(unit, slot, op)
        if not phase.is_lockstep:
            self._pump(phase)
        return slot

    def _open_window(self, unit: Unit, slot: Slot | None, op: Op) -> None:
        if slot is not None:
            unit.swap_in(slot, forward=op is Op.FORWARD)
        unit.windows += 1

    def _shut_window(self, unit: Unit) -> None:
        if unit.windows > 0:
            unit.windows -= 1
            if unit.windows == 0 and not unit.plain:
                unit.swap_out()

    def leave(self, unit: Unit, slot: Slot | None) -> None:
        """A use has ended: its modules see the persistent parameters again, its slot may be given away."""
        self._shut_window(unit)
        if slot is not None and slot.pins > 0:
            slot.pins -= 1
            if slot.pins == 0:
                slot.freed = self.lanes.compute.mark()
                if not slot.home and not unit.kept and not self._is_backward():
                    self._discard(slot)  # in a backward, recomputed tensors may still point into it
        phase = self.phase
        if phase is not None and not phase.is_lockstep:
            self._pump(phase)

    def _is_backward(self) -> bool:
        return self.phase is not None and self.phase.key.kind is Kind.BACKWARD

    def _discard(self, slot: Slot) -> None:
        slot.to(SlotState.EMPTY)
        slot.drop_memory()

    def _weights_in(self, unit: Unit, wanted: Slot | None) -> Slot:
        """The slot that a use reads: the wanted one if it is given (saved tensors keep addresses), else any."""
        slots = self._slots(unit)
        holder = next((s for s in slots if s.has_weights), None)
        assert holder is not None, f"{unit.name} was not gathered"
        if wanted is None or wanted is holder or wanted.has_weights:
            return wanted if wanted is not None and wanted.has_weights else holder
        self.gatherer.finish(holder)
        self._make_room(unit, wanted)
        wanted.take_memory()
        wanted.to(SlotState.GATHERING)
        with torch.no_grad():
            wanted.buffer.copy_(holder.buffer)
        wanted.to(SlotState.WEIGHTS)
        return wanted

    # ---- issuing collectives -----------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        """Take part in the gather of a unit, into its home if that is free, else into an overflow slot."""
        if unit.slot is None:
            return
        self._finish_sharing_reductions(unit)
        slot = unit.slot
        if self._blocked(slot):
            slot = self._overflow_slot(unit)
        else:
            self._evict_sharing(slot)
        self.gatherer.start(unit, slot)

    def _blocked(self, slot: Slot) -> bool:
        return slot.state is SlotState.GRADS or any(
            other.pins or other.state is SlotState.GRADS for other in slot.shares
        )

    def _finish_sharing_reductions(self, unit: Unit) -> None:
        """Note [Reduction] 5: at a moment that the program fixes."""
        pending = self.reducer.pending
        if pending is not None and pending.slot is not None and unit.slot is not None:
            if pending.slot is unit.slot or pending.slot in unit.slot.shares:
                self.reducer.finish()

    def _evict_sharing(self, slot: Slot) -> None:
        for other in slot.shares:
            if other.state is SlotState.GATHERING:
                self.gatherer.finish(other)
            if other.state is SlotState.WEIGHTS:
                other.to(SlotState.EMPTY)
            if other.freed is not None:
                self.lanes.gather.wait(other.freed)

    def _make_room(self, unit: Unit, slot: Slot) -> None:
        if slot.home:
            if self._blocked(slot):
                self.reducer.finish()
            if self._blocked(slot):
                raise StateError(
                    f"`{unit.name}`: its backward needs the memory in which its forward ran, and another unit of the "
                    "same slot is in use. Type slots= with a larger number in lamina.shard()"
                )
            self._evict_sharing(slot)

    def _overflow_slot(self, unit: Unit) -> Slot:
        unit.overflows += 1
        for slot in unit.overflow:
            if slot.state is SlotState.EMPTY and slot.pins == 0:
                slot.freed = self.lanes.compute.mark()
                return slot
        with torch.inference_mode(False):
            buffer = torch.empty(unit.layout.buffer_bytes, dtype=torch.uint8, device=unit.mesh.device)
            slot = Slot(unit.layout, buffer, home=False)
        slot.freed = self.lanes.compute.mark()
        unit.overflow.append(slot)
        return slot

    def _empty(self, unit: Unit) -> None:
        for slot in self._slots(unit):
            if slot.state is SlotState.GATHERING:
                self.gatherer.finish(slot)
            if slot.state is SlotState.WEIGHTS and slot.pins == 0:
                slot.to(SlotState.EMPTY)
                slot.drop_memory()

    def _conflicts(self, index: int) -> list[int]:
        slot = self.units[index].slot
        return [] if slot is None else [u.index for u in self.units if u.slot is not None and u.slot in slot.shares]

    # ---- following the program ---------------------------------------------------------------------------------

    def _follow(self, phase: Phase, op: Op, unit: Unit, ready: bool) -> None:
        step = phase.next()
        if step is not None and step.unit == unit.index and step.op is op:
            phase.cursor += 1
            if ready or any(s.has_weights for s in self._slots(unit)):
                return
        else:
            place = phase.find(op, unit.index)
            if place is not None:
                between = phase.steps[phase.cursor : place]
                if not ready or not any(s.op.is_collective for s in between):
                    self._issue(phase, place + 1)
            if unit.plain or any(s.has_weights for s in self._slots(unit)):
                return
        self._deviate(phase, op, unit)

    def _pump(self, phase: Phase) -> None:
        """Issue what stands next in the program, as long as it needs nothing that is still to come."""
        steps = phase.steps
        while phase.cursor < len(steps):
            step = steps[phase.cursor]
            if step.op is Op.REDUCE:
                if step.unit not in phase.ready:
                    return
            elif step.op is not Op.GATHER or self._waits_for_room(self.units[step.unit].slot):
                return
            phase.cursor += 1
            self._execute(phase, step)

    def _waits_for_room(self, slot: Slot | None) -> bool:
        """Whether a gather ahead of need should rather wait: a use still reads these bytes."""
        if slot is None or (slot.pins and slot.state is SlotState.WEIGHTS):
            return False  # the same weights, in use
        for other in slot.shares:
            if other.pins:
                return True
        return False

    def _issue(self, phase: Phase, stop: int) -> None:
        """Issue everything before index `stop`, with zeros for reductions that this rank has nothing for."""
        while phase.cursor < stop:
            step = phase.steps[phase.cursor]
            phase.cursor += 1
            if step.op.is_collective:
                self._execute(phase, step)

    def _execute(self, phase: Phase, step: Step) -> None:
        unit = self.units[step.unit]
        position = self.control.position
        position.verb, position.unit = step.op.name, unit.name
        if step.op is Op.GATHER:
            self._gather(unit)
        else:
            self._reduce(phase, unit, contribute=step.unit in phase.ready)

    def _run_out(self, phase: Phase) -> None:
        if not phase.is_lockstep:
            self._issue(phase, len(phase.steps))

    def _deviate(self, phase: Phase, op: Op, unit: Unit) -> None:
        """This rank needs more than the program holds: finish it, then agree with ranks that need the same."""
        self._run_out(phase)
        if any(s.has_weights for s in self._slots(unit)):
            return
        phase.recorded = None
        phase.deviated = True
        self._lockstep(_OPS.index(op), unit.index, need=True)

    # ---- lockstep ----------------------------------------------------------------------------------------------

    def _lockstep(
        self, op: int, unit: int, need: bool = False, resident: frozenset[int] = frozenset()
    ) -> frozenset[int]:
        """Agree with all ranks on the next steps until this rank's own is served; at the end, what is gathered everywhere.

        Ranks ask for different things where their paths differ. One request is served at a time, the same on all ranks:
        reductions first, then the unit that comes first (in backward: last); the end when all are there.
        """
        phase = self._current()
        self._say("agrees on the next step:", self._words(op, unit))
        mine = (op, unit)
        mask = [sum(1 << (i - base) for i in resident if base <= i < base + 62) for base in range(0, len(self.units), 62)]
        while True:
            self.lockstep_rounds += 1
            rows = self.control.exchange([phase.number, self._key_hash(phase.key), op, unit, int(need), *mask])
            self._check_same_phase(rows)
            chosen = self._choose(phase, [(row[2], row[3]) for row in rows])
            if chosen[0] == _END:
                return frozenset(
                    i for i in range(len(self.units)) if all(row[5 + i // 62] >> (i % 62) & 1 for row in rows)
                )
            self._serve(phase, chosen, any(row[4] for row in rows if (row[2], row[3]) == chosen), chosen == mine)
            if chosen == mine:
                return frozenset()
            if op != _END and _OPS[op] is not Op.REDUCE:
                need = not any(s.has_weights for s in self._slots(self.units[unit])) and not self.units[unit].plain

    def _serve(self, phase: Phase, chosen: tuple[int, int], need: bool, mine: bool) -> None:
        op, unit = _OPS[chosen[0]], self.units[chosen[1]]
        if op is Op.REDUCE:
            phase.log.append(Step(Op.REDUCE, unit.index))
            self._reduce(phase, unit, contribute=mine)
            return
        if need:
            phase.log.append(Step(Op.GATHER, unit.index))
            self._gather(unit)
        phase.log.append(Step(op, unit.index))

    def _choose(self, phase: Phase, requests: list[tuple[int, int]]) -> tuple[int, int]:
        reduces = [r for r in requests if r[0] != _END and _OPS[r[0]] is Op.REDUCE]
        uses = [r for r in requests if r[0] != _END and r not in reduces]
        sign = 1 if phase.key.kind is Kind.FORWARD else -1
        for candidates in (reduces, uses):
            if candidates:
                return min(candidates, key=lambda r: (sign * r[1], r[0]))
        return (_END, 0)

    def _check_same_phase(self, rows: list[list[int]]) -> None:
        if len({tuple(row[:2]) for row in rows}) > 1:
            words = self.control.exchange_text(self.control.position.words)
            said = "; ".join(f"rank {rank} {text}" for rank, text in enumerate(words))
            raise Disagreement(
                f"ranks are at different places: {said}. Forward, backward and step must follow in the same order on every "
                "rank, and gradients must be recorded on all ranks or on none"
            )

    @staticmethod
    def _key_hash(key: Key) -> int:
        text = f"{key.kind.value} {key.grad} {key.entry} {sorted(key.resident)}"
        return zlib.crc32(text.encode())

    def _words(self, op: int, unit: int) -> str:
        return "the end" if op == _END else f"{_OPS[op].name.lower()} of {self.units[unit].name}"

    def _say(self, verb: str, unit: str = "") -> None:
        phase = self._current()
        mode = "lockstep" if phase.is_lockstep else "program"
        self.control.position = Position(phase.number, mode, phase.key.kind.value, verb, unit)

    # ---- backward ----------------------------------------------------------------------------------------------

    def begin_use(self, use: Use) -> None:
        """An output's node is about to run: the unit's backward begins."""
        task = torch._C._current_graph_task_id()
        if use.active_in == task:
            return
        unit = use.unit
        if torch.is_grad_enabled() and not unit.plain and not unit.kept:
            raise StateError(
                f"backward with create_graph=True through `{unit.name}`: its weights would be needed after they are given "
                "back. Type `with lamina.keep(model):` around the forward and both backwards"
            )
        if self.phase is None:
            self.begin_backward(task)
        phase = self._current()
        if task not in phase.tasks:
            phase.tasks[task] = []
            phase.keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            Variable._execution_engine.queue_callback(lambda: self._end_task(task))
        use.active_in, use.waiting = task, use.input_count
        phase.tasks[task].append(use)
        use.slot = self.enter(unit, Op.BACKWARD, use.slot)

    def end_use(self, use: Use) -> None:
        """The node of one of its inputs is about to run."""
        if use.active_in is None or use.active_in != torch._C._current_graph_task_id():
            return
        use.waiting -= 1
        if use.waiting == 0:
            self._finish_use(use)

    def _finish_use(self, use: Use) -> None:
        phase, unit = self._current(), use.unit
        if use.active_in is not None:
            phase.tasks[use.active_in].remove(use)
        use.active_in = None
        if not phase.keeps_graph:
            use.finish()
        self.leave(unit, use.slot)
        if unit.trainable and not unit.kept and (unit.alive_uses == 0 or self._has_all_gradients(unit)):
            self._finish_unit(phase, unit)

    def _has_all_gradients(self, unit: Unit) -> bool:
        """Autograd gives a leaf its gradient once a graph task: when all are there, no use of the unit is still to come."""
        wanted = unit.wanted
        return any(wanted) and all(g is not None for g, w in zip(self._gradients(unit), wanted, strict=True) if w)

    def _finish_unit(self, phase: Phase, unit: Unit) -> None:
        if phase.is_lockstep:
            self._lockstep(_OPS.index(Op.REDUCE), unit.index)
        else:
            phase.ready.add(unit.index)
            self._pump(phase)

    def _gradients(self, unit: Unit) -> list[Tensor | None]:
        """This rank's gradients, by parameter, summed over the slots that the unit was used in."""
        if unit.slot is None:
            return [p.grad for p in unit.params]
        gradients: list[Tensor | None] = [full.grad for full in unit.slot.fulls]
        for slot in unit.overflow:
            for i, full in enumerate(slot.fulls):
                if full.grad is not None:
                    before = gradients[i]
                    gradients[i] = full.grad if before is None else before + full.grad
        return gradients

    def _set_gradients_aside(self, unit: Unit) -> None:
        """A plain unit's p.grad is autograd's: what it held before this backward is kept apart."""
        unit.fresh = True
        unit.note_existing_gradients()
        for param in unit.params:
            param.grad = None

    def _reduce(self, phase: Phase, unit: Unit, contribute: bool) -> None:
        """Take part in the reduction of a unit: with its gradients, or with zeros."""
        phase.ready.discard(unit.index)
        self.reducer.finish()
        if unit.index not in phase.reduced:
            phase.reduced.add(unit.index)
            if not unit.plain:
                unit.note_existing_gradients()
        gradients = self._gradients(unit) if contribute and self.contributes else [None] * len(unit.params)
        slot = self._free_home(unit)
        place = self.reducer.stage(unit) if slot is None else slot
        with torch.no_grad():
            self._collect(unit, gradients, place, clean=slot is not None and slot.state is SlotState.WEIGHTS)
        for held in [unit.params] if unit.slot is None else [slot.fulls for slot in self._slots(unit)]:
            for full in held:
                full.grad = None
        if slot is not None:
            slot.to(SlotState.GRADS)
        self.reducer.start(unit, place.segments, slot, self.last_micro_batch, self.defer, self.active_ranks)

    def _free_home(self, unit: Unit) -> Slot | None:
        """The unit's own slot, if its weights are dead and its bytes are nobody else's; None: use the staging buffer."""
        slot = unit.slot
        if slot is None or not unit.sharded or slot.pins or unit.kept or self.reducer.wire is not None:
            return None
        if slot.state is SlotState.GATHERING:
            self.gatherer.finish(slot)
        if slot.state is SlotState.WEIGHTS:
            return slot
        if slot.state is SlotState.GRADS:
            self.reducer.finish()
        if any(other.pins or other.state is not SlotState.EMPTY for other in slot.shares):
            return None
        return slot

    def _collect(self, unit: Unit, gradients: Sequence[Tensor | None], place: Slot | Staging, clean: bool) -> None:
        """Lay gradients into their places; zeros where this rank has none, and between them.

        `clean`: weights lie there, so what is between parameters is zero already.
        """
        if not clean:
            for segment, target in zip(unit.layout.segments, place.segments, strict=True):
                if segment.trainable:
                    target.zero_()
        views, values = [], []
        for i, (spec, view, gradient) in enumerate(zip(unit.layout.params, place.views, gradients, strict=True)):
            if gradient is not None:
                views.append(view)
                values.append(gradient.to_dense() if gradient.layout is not torch.strided else gradient)
                unit.touched[i] = True
            elif clean and spec.trainable:
                view.zero_()
        if views:
            torch._foreach_copy_(views, values)

    def _end_task(self, task: int) -> None:
        """The graph task has ended: so have all uses that it began; with the outermost one, the backward."""
        phase = self.phase
        if phase is None or task not in phase.tasks:
            return
        for use in list(phase.tasks[task]):
            self._finish_use(use)
        del phase.tasks[task]
        if phase.owner == task:
            self._end_backward(phase)

    def _end_backward(self, phase: Phase) -> None:
        for unit in self.units:
            if unit.trainable and not unit.kept and unit.index not in phase.ready:
                if any(g is not None for g in self._gradients(unit)):
                    self._finish_unit(phase, unit)
        self._run_out(phase)
        reduced = sorted(phase.reduced)
        self._close(phase)
        self.settle(reduced)

    def settle(self, reduced: Sequence[int]) -> None:
        """Finish reductions and give the user gradients: everywhere where any rank used the parameter."""
        self.reducer.finish()
        self.lanes.compute.wait(self.lanes.reduce.mark())
        for unit in self.units:
            if unit.sharded and not unit.kept:
                self._empty(unit)
        self.resident = frozenset(u.index for u in self.units if self._settled(u))
        complete = [i for i in reduced if i not in self.reducer.partials]
        if self.last_micro_batch and self._tokens is not None:
            self._divide_by_tokens(complete)
        used = self._used_anywhere(complete)
        for index in complete:
            self.units[index].bind_gradients(used[index])
            self.units[index].touched = [False] * len(self.units[index].params)
        for unit in self.units:
            if unit.plain and unit.fresh:
                unit.fresh = False
                if unit.index not in complete:
                    unit.bind_gradients(unit.valid)

    def add_tokens(self, count: Tensor) -> None:
        """Tokens of one micro-batch, by which the last one will divide."""
        self._tokens = count.clone() if self._tokens is None else self._tokens + count

    def _divide_by_tokens(self, complete: Sequence[int]) -> None:
        tokens, self._tokens = self._tokens, None
        assert tokens is not None
        everyone = next((u.mesh.everyone for u in self.units), None)
        if everyone is not None:
            torch.distributed.all_reduce(tokens, group=everyone)
        factor = self.active_ranks / tokens.to(torch.float64).clamp(min=1)
        with torch.no_grad():
            for index in complete:
                for grad in self.units[index].grads:
                    grad.mul_(factor.to(grad.real.dtype))

    def keep(self, units: Sequence[Unit]) -> None:
        """Gather units and hold them. Collective."""
        self._open(Key(Kind.KEEP, False, ",".join(str(u.index) for u in units), self.resident), units)
        for unit in units:
            if unit.sharded and unit.dirty.value and not unit.kept:
                self._empty(unit)
            slot = self.enter(unit, Op.FORWARD)
            unit.kept += 1
            self._shut_window(unit)
            if slot is not None:
                self._kept_slots.setdefault(unit.index, []).append(slot)
        self._close(self._current())

    def let_go(self, units: Sequence[Unit], reduce: bool) -> None:
        """End a `keep`: reduce what has gathered, give the slots back. Collective if `reduce`."""
        released = []
        for unit in units:
            unit.kept -= 1
            if unit.kept == 0:
                released.append(unit)
            for slot in self._kept_slots.get(unit.index, [])[-1:]:
                self._kept_slots[unit.index].pop()
                slot.pins -= 1
        if not reduce:
            self._drop_gradients(released)
            return
        trainable = [unit for unit in released if unit.trainable]
        here = [int(any(g is not None for g in self._gradients(unit))) for unit in trainable]
        if not trainable:
            return
        self._open(Key(Kind.KEEP, True, "end", self.resident), units)
        phase = self._current()
        rows = self.control.exchange(here)
        for number, unit in enumerate(trainable):
            if any(row[number] for row in rows):
                self._reduce(phase, unit, contribute=True)
        self.phase = None
        self.settle(sorted(phase.reduced))

    def _drop_gradients(self, units: Sequence[Unit]) -> None:
        for unit in units:
            for slot in self._slots(unit):
                for full in slot.fulls:
                    full.grad = None

    def _used_anywhere(self, complete: Sequence[int]) -> dict[int, list[bool]]:
        """By unit and parameter: has any rank a gradient? Only a rank that lacks one waits for the others' flags."""
        here = {
            index: [t or p.grad is not None for t, p in zip(unit.touched, unit.params, strict=True)]
            for index in complete
            for unit in (self.units[index],)
        }
        if self.control.world == 1 or not complete:
            return here
        flat = [flag for index in complete for flag in here[index]]
        expected = [spec.trainable for index in complete for spec in self.units[index].layout.params]
        everyone = self.flags.start(flat)
        if all(f or not e for f, e in zip(flat, expected, strict=True)):
            return here
        anywhere = iter(everyone())
        return {index: [next(anywhere) for _ in flags] for index, flags in here.items()}
