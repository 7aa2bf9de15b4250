"""What reductions hold: places in which gradients are laid and arrive, sums that wait, and the one under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.layout import UnitLayout
from lamina.core.slots import Slot
from lamina.runtime.summing import Rows
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


@dataclass
class Sending:
    """The first exchanges of a unit's reduction, whose sources and inboxes stay."""

    layout: UnitLayout
    exchanges: list[Exchange]  # by trainable segment
    rows: list[Rows]  # by segment
    size_bytes: int


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


@dataclass
class Pending:
    """A reduction that is under way: what was sent, and what is to become of it."""

    unit: Unit
    slot: Slot | None  # the slot that the gradients lie in, free again afterwards
    target: int  # levels to climb
    climbed: int  # levels behind `rows`, once the works are done
    divisor: int
    rows: list[Rows] = field(default_factory=list)  # by segment
    works: list[dist.Work | None] = field(default_factory=list)
    replicated: bool = False  # the sum over replicas is what was sent
    goes_on: bool = False  # more is exchanged once `works` are done
