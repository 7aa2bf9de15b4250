"""Memory of a step at every moment, before it is run.

A sum of state and activations is not a peak: gradients come while activations go, and a loss is gone when the first
block's backward begins. Here the moments of a step that was run without memory (measure.py) meet what the runtime
would hold at each (state.py): the largest is the peak, and it has a place.

On a GPU three figures matter. *Allocated* is what tensors take. *Reserved* is what the caching allocator holds for
them: its rules, applied to the run's list of allocations (reserved.py). *Used* adds what the process takes besides:
what it shares with peers, context and libraries, and lamina's communicators; `lamina doctor` measures the last two.

Pure: no communication, no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core import room
from lamina.core.strategy import Factors, resolve
from lamina.planner.machine import Machine
from lamina.planner.measure_data import Measured
from lamina.planner.reserved import WORKSPACE_BYTES, reserve
from lamina.planner.state import State, state_of
from lamina.planner.workload import Choice

GIB = 1 << 30
MARGIN = 0.95  # of a device's memory that a plan may fill
# Of a device, on 2 x H200: what NCCL takes with a process's first communicator beside the communicator, and what one of
# a few numbers takes, which has one block (benchmarks/plan_memory/README.md).
NCCL_BYTES, SUMS_COMMUNICATOR_BYTES = 286 << 20, 12 << 20


@dataclass(frozen=True)
class MomentMemory:
    """Bytes on one rank in one stretch of the step."""

    place: str
    state_bytes: int
    gradient_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.gradient_bytes + self.activation_bytes


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of one rank over a step."""

    state: State
    moments: tuple[MomentMemory, ...]
    allocated_bytes: int
    reserved_bytes: int
    used_bytes: int
    device_bytes: int  # of the machine, or the budget
    beside_bytes: int = 0  # shared with peers: neither allocated nor reserved in torch's words

    @property
    def peak(self) -> MomentMemory:
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def fits(self) -> bool:
        return self.used_bytes <= MARGIN * self.device_bytes

    @property
    def missing_bytes(self) -> int:
        """Beyond what a plan may fill."""
        return max(0, self.used_bytes - int(MARGIN * self.device_bytes))

    def parts(self) -> dict[str, int]:
        """What the peak is made of, in bytes."""
        state, peak = self.state, self.peak
        parts = {
            "masters" if state.halved else "weights (fp32)": state.masters,
            "optimizer": state.optimizer,
            "gradients": peak.gradient_bytes,
            "slots": state.slots + state.published,
            "reduction": state.reduction + state.accumulated,
            "activations": peak.activation_bytes,
            "inputs, workspace": peak.state_bytes - state.lasting,
            "allocator": self.reserved_bytes + self.beside_bytes - peak.total_bytes,
            "libraries": self.used_bytes - self.reserved_bytes - self.beside_bytes,
        }
        return {name: size for name, size in parts.items() if size}


def forecast_memory(
    measured: Measured, choice: Choice, machine: Machine, budget_bytes: int | None = None
) -> MemoryForecast:
    """Memory of one rank; `measured` under the same precision and recomputation as `choice`.

    Raises `UsageError` for a strategy whose factors do not divide the world.
    """
    assert measured.recompute == choice.recompute, "measured under another recomputation"
    factors = resolve(choice.strategy, choice.world, choice.shard_size)
    on_gpu = measured.kind == "cuda"
    state = state_of(
        measured.units,
        factors,
        choice.slots,
        choice.accumulation,
        on_gpu,
        peers=choice.transport == "peer",
        halved=bool(choice.halved),
        wire=choice.wire,
    )
    lasting = state.lasting + measured.input_bytes + (2 * WORKSPACE_BYTES if on_gpu else 0)
    moments = [
        MomentMemory(
            moment.place, lasting, sum(state.gradients[index] for index in moment.reduced), moment.activation_bytes
        )
        for moment in measured.moments
    ]
    gradients = sum(state.gradients)
    moments.append(MomentMemory("optimizer", lasting, gradients, 0))
    allocated = max(moment.total_bytes for moment in moments)
    reserved, used, beside = allocated, allocated, 0
    if on_gpu:
        part = room.part(choice.recompute, factors.world, state.halved)
        found = reserve(
            measured,
            state,
            factors,
            choice.accumulation,
            room_part=part,
            expandable=choice.expandable,
            captured=choice.captured,
        )
        assert found is not None, "only a device with a limit is ever full"
        allocated, reserved = found.allocated_bytes, found.reserved_bytes
        beside = state.shared
        used = reserved + beside + int(machine.fixed_bytes + nccl_bytes(factors, state.is_one_sided, machine))
    device = int(machine.memory_bytes) if budget_bytes is None else budget_bytes
    return MemoryForecast(state, tuple(moments), allocated, reserved, used, device, beside)


def nccl_bytes(factors: Factors, peers: bool, machine: Machine) -> float:
    """Of a device, for the communicators that this rank uses; one of the job's own comes beside.

    Of sums there is one, over the ranks that a norm is summed over.
    """
    count, sums = communicators(factors, peers), int(factors.optimizer > 1)
    once_bytes = NCCL_BYTES if count + sums else 0
    return once_bytes + count * machine.communicator_bytes + sums * SUMS_COMMUNICATOR_BYTES


def communicators(factors: Factors, peers: bool = False) -> int:
    """Of lamina's process groups on the device, those of more than a few numbers that this rank uses (core/mesh.py).

    `peers`: what moves inside a gather group takes none.
    """
    found: set[tuple[str, tuple[int, ...]]] = set()
    levels = factors.levels[1:] if peers else factors.levels
    for lane, level in (
        *(("gather", level) for level in levels),
        *(("reduce", level) for level in levels),
        ("reduce", factors.replicas),
    ):
        if level.size > 1:
            found.add((lane, level.members(0)))
    return len(found)
