"""What reductions hold: places in which gradients are laid and arrive, sums that wait, and the one under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.layout import UnitLayout
from lamina.core.slots import Slot
from lamina.runtime.summing import Rows, passes_of
from lamina.runtime.unit import Unit
from lamina.transport.c10d import Exchange


@dataclass
class Staging:
    """Where a unit's gradients are laid when its slot cannot take them."""

    segments: list[Tensor]  # in wire dtype, (numel,) each
    views: list[Tensor]  # by parameter


@dataclass
class Inbox:
    """An exchange and where it arrives; made once for each source that stays."""

    exchange: Exchange
    rows: Rows


@dataclass(slots=True)
class Sending:
    """The first exchanges of a unit's reduction, whose sources and inboxes stay."""

    layout: UnitLayout
    exchanges: list[Exchange]  # by trainable segment
    rows: list[Rows]  # by segment
    size_bytes: int
    passes: dict[tuple[int, bool], list[Callable[[], object]]] = field(default_factory=dict)

    def write_means(self, ranges: Sequence[Tensor], valid: Sequence[bool], divisor: int) -> bool:
        """Write (or add) the means of the rows into the gradient ranges, by passes made ready; False: they are not.

        valid: which parameters have a gradient that is to be added to: all or none.
        """
        accumulate = valid[0]
        if valid.count(accumulate) < len(valid):
            return False
        passes = self.passes.get((divisor, accumulate))
        if passes is None:
            passes = self.passes[divisor, accumulate] = []
            if not ranges[0].is_cuda:  # there one kernel writes a range
                for segment, target, rows in zip(self.layout.segments, ranges, self.rows, strict=True):
                    if segment.trainable:
                        passes += passes_of(target, rows, 1.0 / divisor, accumulate)
        for act in passes:
            act()
        return bool(passes)


@dataclass
class Partial:
    """Sums of earlier micro-batches that are not reduced to the end."""

    climbed: int  # levels of sharding that are behind them: 0 (whole) or GRADS_LEVEL
    divisor: int  # what they are to be divided by in the end; see Note [Reduction] 3
    sums: list[Tensor]  # by segment

    def over(self, divisor: int) -> list[Tensor]:
        """The sums, by segment, to be divided by another number: ranks run out of data in `lamina.even`."""
        if divisor != self.divisor:
            torch._foreach_mul_([total for total in self.sums if total.numel()], divisor / self.divisor)
            self.divisor = divisor
        return self.sums


@dataclass(slots=True)
class Pending:
    """A reduction that is under way: what was sent, and what is to become of it."""

    unit: Unit
    slot: Slot | None  # the slot that the gradients lie in, free again afterwards
    target: int  # levels to climb
    climbed: int  # levels behind `rows`, once the works are done
    divisor: int
    rows: list[Rows]  # by segment
    works: list[dist.Work | None]
    sending: Sending | None = None  # whose rows they are
    replicated: bool = False  # the sum over replicas is what was sent
    goes_on: bool = False  # more is exchanged once `works` are done
