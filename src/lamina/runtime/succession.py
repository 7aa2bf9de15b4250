"""One engine takes over from another, of the same model: between steps, when nothing points into the old one.

What is made from all units is made anew: the engine with its programs, lanes, and what peers read. The units'
parameters, masters, gradients and slots stay the objects that they are, and so do the hooks.
"""

from __future__ import annotations

from lamina.runtime.assemble import Runtime, build_engine
from lamina.runtime.failed_backward import ENGINES
from lamina.runtime.unit import Unit
from lamina.transport.peer import Peers
from lamina.transport.symmetric import SymmetricPeers


def put_to_rest(runtime: Runtime) -> None:
    """Nothing stays gathered, nothing is under way. On GPUs the host has waited for the device."""
    engine = runtime.engine
    engine.residency.empty(engine.units)
    for unit in engine.units:
        for master in unit.halved.values():
            master.make_whole()  # what is published now will not be there
        for slot in unit.slots:
            slot.freed = slot.ready = None  # marks on lanes that are given up
        unit.dirty.mark()


def succeed(runtime: Runtime, units: list[Unit], peers: Peers | SymmetricPeers | None) -> None:
    """Let an engine over these units go on where the last one stopped."""
    old = runtime.engine
    made = build_engine(units, runtime.mesh, runtime.control, runtime.packing.slots, runtime.precision, peers)
    made.phases, made.last_forward, made.lockstep.rounds = old.phases, old.last_forward, old.lockstep.rounds
    made.gatherer.bytes_moved, made.reducer.bytes_moved = old.gatherer.bytes_moved, old.reducer.bytes_moved
    made.gradients.follow(old.gradients)
    made.newcomers = old.newcomers
    made.gatherer.late_peers = old.gatherer.late_peers
    ENGINES.discard(old)
    runtime.engine, runtime.transport = made, "c10d" if peers is None else "peer"
    for hooks in runtime.hooks.values():
        hooks.engine = made
