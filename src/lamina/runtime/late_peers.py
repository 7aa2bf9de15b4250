"""Peers that come with the optimizer: `transport="auto"` on GPUs, for models that publish much.

What peers read takes two bytes of an element that a rank owns, unless masters lie in halves (halving.py): then nothing
beside them. Which it will be is known when there is an optimizer, that is in the first forward of a training, not when
the model is sharded. Till then gathers are collectives.

Note [Late peers]
    1. Before each root forward, and each `keep` outside one, all ranks say how they stand. When each is about to train,
       between steps, under optimizers of lamina's that clip and hold all that may lie in halves, memory is opened for
       peers, and another engine takes over (succession.py).
    2. After `FORWARDS` forwards in which any rank trains without that, or as soon as one refuses, gathers stay
       collectives for good. So they do where peers cannot be had, or are slower.
    3. Where peers have come, and anything but the optimizer has touched masters in each of the first `TOUCHED_STEPS`
       steps, an engine without peers takes over again: averages of the weights, say, would have them published beside
       whole masters. One step alone may have a checkpoint behind it, or what is logged now and then.
    4. All decide by the same rows: no rank takes another way than the others.
"""

from __future__ import annotations

import weakref
from enum import IntEnum

import torch

from lamina.errors import TransportError
from lamina.runtime.agreement import agreeing
from lamina.runtime.assemble import Runtime
from lamina.runtime.halved import HalvedMaster
from lamina.runtime.halving import all_are_held, forget_halves
from lamina.runtime.publishing import open_peers, reason_of, would_come_late
from lamina.runtime.succession import put_to_rest, succeed
from lamina.runtime.unit import Unit
from lamina.transport.peer import Peers
from lamina.transport.symmetric import SymmetricPeers

FORWARDS = 3
TOUCHED_STEPS = 2
NOBODY_HOLDS = (
    "no lamina.optim.AdamW(max_norm=...) held all parameters, unfrozen, in the first forwards with gradients that "
    "began between steps and untraced"
)
TOUCHED = "something else than the optimizer touches parameters in a step, such as an average of them or a norm"
CURE = "type transport='peer' to have peers all the same"


class Standing(IntEnum):
    """Of one rank, before a root forward."""

    EVALUATES = 0
    WAITS = 1  # trains, and there is no optimizer yet, or this is no moment
    AGREES = 2
    REFUSES = 3
    TOUCHED = 4  # would agree, but for what something else than the optimizer has done in the step
    STAYS = 5  # agrees that they stay, with a graph alive: no engine could take over


class LatePeers:
    """Of one model, while it is open whether its gathers will be one-sided."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        self._forwards_left = FORWARDS
        self._have_come = False
        self._versions: dict[Unit, int] = {}  # of the weights that peers have read, when a step began
        self._touched_steps = 0
        self._are_going = False
        self.refusal = ""  # why they are not to come, or to go again

    def look(self) -> None:
        """Before a root forward or a `keep`, on every rank alike. Collective."""
        runtime = self._runtime()
        assert runtime is not None
        runtime.engine.close_failed()
        mine = self._standing(runtime)
        if self._have_come and runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)  # once the ranks have met, none reads what another gives up
        with agreeing(runtime.control, "transport", "transport"):
            rows = runtime.control.exchange([mine])
            found = {Standing(row[0]) for row in rows}
            if self._have_come:
                if found <= {Standing.AGREES, Standing.STAYS}:
                    self._settle(runtime, "")
                elif found <= {Standing.AGREES, Standing.REFUSES, Standing.TOUCHED}:
                    self._judge_step(runtime, found)
            elif Standing.REFUSES in found:
                self._settle(runtime, self.refusal or "another rank refuses peers")
            elif found == {Standing.AGREES}:
                self._open(runtime)
            elif found != {Standing.EVALUATES}:
                self._forwards_left -= 1
                if not self._forwards_left:
                    self._settle(runtime, f"{runtime.late_note.partition(';')[0]}, and {NOBODY_HOLDS}: {CURE}")

    def _standing(self, runtime: Runtime) -> Standing:
        if self._are_going or (self.refusal and not self._have_come):
            return Standing.REFUSES
        if not torch.is_grad_enabled():
            return Standing.EVALUATES
        is_free = _is_between_steps(runtime)
        if not self._have_come:
            return Standing.AGREES if is_free and all_are_held(runtime.units) else Standing.WAITS
        if self.refusal:
            return Standing.REFUSES if is_free else Standing.WAITS
        if not self._was_stepped():
            return Standing.WAITS
        if _were_touched(runtime):
            return Standing.TOUCHED if is_free else Standing.WAITS
        return Standing.AGREES if is_free else Standing.STAYS

    def _was_stepped(self) -> bool:
        """Whether weights have changed since, be it that an evaluation has read them already."""
        return any(unit.version + unit.dirty.value > first for unit, first in self._versions.items())

    def _open(self, runtime: Runtime) -> None:
        units, mesh, precision = runtime.units, runtime.mesh, runtime.precision
        layouts, meshes = [unit.layout for unit in units], [unit.mesh for unit in units]
        try:
            if not would_come_late(layouts, meshes, precision, runtime.granted_bytes):
                raise TransportError("lamina.adopt() has added to what peers would take")
            with torch.inference_mode(False), torch.no_grad():
                peers = open_peers(runtime.control, mesh, layouts, meshes, precision.wire, is_auto=True)
        except TransportError as error:
            self._settle(runtime, reason_of(error))
            return
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)  # lanes are given up
        _take_over(runtime, peers)
        runtime.transport_note, self._have_come = "", True
        self._await_step(runtime)

    def _await_step(self, runtime: Runtime) -> None:
        """The forward that begins will count what is dirty."""
        self._versions = {unit: unit.version + unit.dirty.value for unit in runtime.units if unit.sharded}

    def _judge_step(self, runtime: Runtime, found: set[Standing]) -> None:
        self._touched_steps += Standing.TOUCHED in found
        if Standing.REFUSES in found or self._touched_steps == TOUCHED_STEPS:
            self._are_going = True  # after an error in the middle of it, nothing is read before they are gone
            _take_over(runtime, None)
            self._settle(runtime, f"{self.refusal or TOUCHED}: {CURE}")
        else:
            self._await_step(runtime)
            for master in _halved_of(runtime):
                master.was_touched = False

    def _settle(self, runtime: Runtime, why_not: str) -> None:
        runtime.engine.gatherer.late_peers, runtime.transport_note = None, why_not


def wait_for_peers(runtime: Runtime) -> None:
    """Of a model that has just been sharded, or copied."""
    if runtime.late_note:
        runtime.engine.gatherer.late_peers = LatePeers(runtime)


def _take_over(runtime: Runtime, peers: Peers | SymmetricPeers | None) -> None:
    with torch.inference_mode(False), torch.no_grad():
        put_to_rest(runtime)
        if peers is None:
            forget_halves(runtime.units)
        succeed(runtime, runtime.units, peers)


def _is_between_steps(runtime: Runtime) -> bool:
    """Nothing points into the engine."""
    engine = runtime.engine
    is_tapped = "enter" in vars(engine)  # by `lamina.trace()`
    holds = any(unit.kept or unit.visits.alive for unit in runtime.units) or bool(engine.reducer.partials)
    return not holds and not is_tapped and not engine.lanes.is_recording


def _were_touched(runtime: Runtime) -> bool:
    """Whether masters have been made whole since the first publishing, which has halved them."""
    return any(master.was_touched or master.whole is not None for master in _halved_of(runtime))


def _halved_of(runtime: Runtime) -> list[HalvedMaster]:
    return [master for unit in runtime.units for master in unit.halved.values()]
