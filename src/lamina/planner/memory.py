"""Memory of a step at every moment, before it is run.

A sum of state and activations is not a peak: gradients come while activations go, and a loss is gone when the first
block's backward begins. Here the moments of a step that was run without memory (measure.py) meet what the runtime
would hold at each (state.py): the largest is the peak, and it has a place.

On a GPU three figures matter. *Allocated* is what tensors take. *Reserved* adds what the caching allocator cannot use
again, *used* what the process takes besides: context, libraries, communicators. The constants of both come from steps
of one model of 1.27 B parameters on two GPUs (benchmarks/gpu_step) and from nothing else; they are below, with origin.

Pure: no communication, no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.strategy import resolve
from lamina.planner.machine import Machine
from lamina.planner.measure_data import Measured
from lamina.planner.state import State, state_of
from lamina.planner.workload import Choice

GIB = 1 << 30
# Allocated 24.19 and reserved 28.03 GiB at 8192 tokens, 11.76 and 14.83 at 2048, with gradients of 2.36 GiB in both:
# 3.84 = 0.064 * 24.19 + 0.97 * 2.36; 3.07 = 0.064 * 11.76 + 0.97 * 2.36.
SLACK_OF_ALLOCATED = 0.064  # blocks cut to sizes that are not asked for again
SLACK_OF_GRADIENTS = 0.97  # their memory goes back after a step, and activations settle in it
ONE_COMMUNICATOR_BYTES = int(0.7 * GIB)  # of the loop that is not sharded: used less reserved less context, 1.57 - 0.9
LANES_BYTES = int(0.83 * GIB)  # further communicators of lamina's lanes: 2.40 - 1.57
WORKSPACE_BYTES = 64 << 20  # that two matrix libraries take from the allocator on Hopper, 32 MiB each
MARGIN = 0.95  # of a device's memory that a plan may fill


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
            "weights (fp32)": state.masters,
            "optimizer": state.optimizer,
            "gradients": peak.gradient_bytes,
            "slots": state.slots + state.published,
            "reduction": state.reduction + state.accumulated,
            "activations": peak.activation_bytes,
            "allocator": self.reserved_bytes - peak.total_bytes,
            "libraries": self.used_bytes - self.reserved_bytes,
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
    state = state_of(measured.units, factors, choice.slots, choice.accumulation, on_gpu)
    lasting = state.lasting + measured.input_bytes + (WORKSPACE_BYTES if on_gpu else 0)
    moments = [
        MomentMemory(
            moment.place, lasting, sum(state.gradients[index] for index in moment.reduced), moment.activation_bytes
        )
        for moment in measured.moments
    ]
    gradients = sum(state.gradients)
    moments.append(MomentMemory("optimizer", lasting, gradients, 0))
    allocated = max(moment.total_bytes for moment in moments)
    reserved, used = allocated, allocated
    if on_gpu:
        without = max(moment.state_bytes + moment.activation_bytes for moment in moments)
        reserved = max(allocated, int(without + SLACK_OF_ALLOCATED * allocated + SLACK_OF_GRADIENTS * gradients))
        used = reserved + int(machine.fixed_bytes)
        if choice.world > 1:
            used += ONE_COMMUNICATOR_BYTES + LANES_BYTES
    device = int(machine.memory_bytes) if budget_bytes is None else budget_bytes
    return MemoryForecast(state, tuple(moments), allocated, reserved, used, device)
