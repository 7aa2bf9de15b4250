"""Over which transport a way to run would move its bytes: what `lamina.shard` goes by, asked before there are ranks.

`shard(transport="auto")` looks at the ranks it finds: who is on whose host, and what memory is left. Of a machine file
the same questions can be asked: how many devices a node has, and how much memory.

Pure: no communication, no device.
"""

from __future__ import annotations

from dataclasses import replace

from lamina.core.peer_memory import AUTO_HOST_SHARE, AUTO_SHARE
from lamina.core.strategy import Factors, resolve
from lamina.errors import UsageError
from lamina.planner.machine import Machine
from lamina.planner.measure_data import Measured
from lamina.planner.state import may_be_halved, state_of
from lamina.planner.workload import Choice

ASKED = ("auto", "c10d", "peer")


def check_transport(transport: str) -> None:
    if transport not in ASKED:
        raise UsageError(f"transport={transport!r}: use {', '.join(map(repr, ASKED[:-1]))} or {ASKED[-1]!r}")


def settled(choice: Choice, measured: Measured, machine: Machine) -> Choice:
    """The choice with the transport that it would get: "c10d" or "peer", and how masters would lie.

    One rank has no transport, and halves nothing. Left to lamina, masters are halved under an optimizer of lamina's
    that clips, which is taken for granted, where peers of GPUs read weights (runtime/halving.py) and no step is
    captured.

    Raises `UsageError` where peers are asked for and a gather group is larger than a node.
    """
    found = _over_its_transport(choice, measured, machine)
    if found.halved is not None:
        return found
    pays = found.transport == "peer" and not machine.is_cpu and not found.captured
    return replace(found, halved=pays and can_be_halved(found, measured))


def _over_its_transport(choice: Choice, measured: Measured, machine: Machine) -> Choice:
    factors = resolve(choice.strategy, choice.world, choice.shard_size)
    if factors.world == 1:
        return replace(choice, transport="c10d", halved=False)
    if not factors.shards_parameters or choice.transport == "c10d":
        return replace(choice, transport="c10d")
    inside = factors.params <= machine.gpus_per_node
    if choice.transport == "peer" or choice.halved:
        if not inside:
            raise UsageError(
                f"transport='peer' needs all ranks of a gather group on one host: {factors.params} ranks, and "
                f"{machine.name} has {machine.gpus_per_node} devices a node; type transport='c10d', or "
                "strategy='hsdp' to keep each gather group on one host"
            )
        return replace(choice, transport="peer")
    return replace(choice, transport="peer" if inside and _takes_peers(choice, factors, measured, machine) else "c10d")


def _takes_peers(choice: Choice, factors: Factors, measured: Measured, machine: Machine) -> bool:
    """As runtime/publishing.py and runtime/late_peers.py have it, on GPUs that reach each other."""
    if machine.is_cpu and choice.slots == 1:
        return False
    on_gpu = measured.kind == "cuda"
    state = state_of(measured.units, factors, choice.slots, choice.accumulation, on_gpu, peers=True, wire=choice.wire)
    if machine.is_cpu:
        return state.shared * factors.params <= AUTO_HOST_SHARE * machine.memory_bytes * machine.gpus_per_node
    saved = 0
    if choice.halved is None and can_be_halved(choice, measured):
        saved = state.masters - state_of(measured.units, factors, on_gpu=on_gpu, peers=True, halved=True).masters
    return state.shared - saved <= AUTO_SHARE * machine.memory_bytes


def can_be_halved(choice: Choice, measured: Measured) -> bool:
    """Whether `Precision(halves=True)` is allowed there (runtime/precision.py, `check_halves`) and saves anything."""
    factors = resolve(choice.strategy, choice.world, choice.shard_size)
    if not factors.shards_parameters or factors.optimizer != factors.params or choice.captured:
        return False
    trained = [spec for unit in measured.units for spec in unit.params if spec.trainable]
    return any(may_be_halved(spec) for spec in trained)
