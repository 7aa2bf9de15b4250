"""Means over the tokens of all micro-batches: gradients of sums, divided once, at the end of the step.

`lamina.token_mean` inside `lamina.accumulate` does not know yet how many tokens the step has. It counts them here, and
the last micro-batch divides all gradients by what all ranks have counted; so nothing but such means may be in them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from lamina.core.control import Control, finish
from lamina.errors import StateError
from lamina.runtime.pending_gradient import PendingGradient
from lamina.runtime.reducing import Reducer
from lamina.runtime.unit import Unit
from lamina.runtime.unit_gradients import local_of

_grad_of = attrgetter("grad")


def divisor(count: Tensor) -> Tensor:
    """What to divide a sum over so many tokens by: 1 where there are none. Sums of weights may be less than that."""
    return count.masked_fill(count == 0, 1)


class Tokens:
    """Those of one model's micro-batches on this rank."""

    def __init__(self, units: Sequence[Unit], control: Control, reducer: Reducer) -> None:
        self.units, self.control, self.reducer = units, control, reducer
        self.model: weakref.ref[nn.Module] | None = None
        self.scope = 0  # number of the `accumulate` that is open
        self.is_only_means = True  # the backward that is under way
        self._fresh: tuple[int, Tensor] | None = None  # scope, and tokens counted in it whose backward has not come
        self._counted: Tensor | None = None  # in this step's micro-batches
        self._versions: dict[int, int] = {}  # of gradients, by id, when the last micro-batch had ended
        self._before: dict[int, int] = {}  # without units: the same when the backward began

    def follow(self, before: Tokens) -> None:
        """Go on where another object stopped, of the same model with other units."""
        self._counted, self._fresh, self.scope = before._counted, before._fresh, before.scope
        self.model = before.model

    @property
    def are_counted(self) -> bool:
        return self._counted is not None or self._fresh is not None

    def begin_backward(self, is_only_means: bool) -> None:
        """Tokens are counted, and the outermost backward of the process begins."""
        self.is_only_means = is_only_means
        if not self.units:
            self._before = self._versions_now()

    def refuse_other_terms(self) -> None:
        """A backward has reached the model, or its parameters."""
        if self.are_counted and not self.is_only_means:
            raise StateError(
                "inside `lamina.accumulate`, gradients are divided once by the tokens of all micro-batches, so that a "
                "loss with other terms beside `lamina.token_mean(...)` would have them divided, too. Give it the "
                "total: `lamina.token_mean(loss_sum, count, total=lamina.total(counts_of_all_micro_batches))`"
            )

    # ---- counting ----------------------------------------------------------------------------------------------

    def add(self, count: Tensor, give_up: Callable[[], None]) -> None:
        """Tokens of one loss, by which the last micro-batch will divide.

        `give_up`: forgets sums of micro-batches whose gradients were cleared, and their tokens.
        """
        if self._fresh is not None and self._fresh[0] == self.scope:
            self._fresh = self.scope, self._fresh[1] + count
            return
        self._fresh = self.scope, count.clone()  # a backward that had not come is not to come any more
        if self.reducer.partials:
            give_up()
        elif self._counted is not None and self._are_cleared():
            self._counted = None
        if self._counted is None and (self.reducer.partials or self._finished()):
            self._refuse_earlier()

    def take_fresh(self) -> None:
        """The backward has come in which the losses' tokens count."""
        if self._fresh is not None:
            self._counted = self._fresh[1] if self._counted is None else self._counted + self._fresh[1]
            self._fresh = None

    def forget(self) -> None:
        """The gradients of earlier micro-batches were given up."""
        self._counted = None

    def note_end(self) -> None:
        """A micro-batch has ended: who writes to its gradients from now on is noticed."""
        if self._counted is not None and not self.reducer.partials:
            self._versions = self._versions_now()

    def _finished(self) -> list[Tensor]:
        """Gradients that are there, without places held for sums."""
        params: Iterable[Tensor] = (param for unit in self.units for param in unit.params)
        model = None if self.model is None or self.units else self.model()
        if model is not None:
            params = model.parameters()
        return [grad for grad in map(_grad_of, params) if grad is not None and type(grad) is not PendingGradient]

    def _versions_now(self) -> dict[int, int]:
        return {id(grad): grad._version for grad in self._finished()}

    def _are_cleared(self) -> bool:
        """Whether the gradients of earlier micro-batches, whose tokens are counted, were cleared."""
        grads = self._finished()
        if any(self._versions.get(id(grad), grad._version) != grad._version for grad in grads):
            raise StateError(
                "gradients were written to between micro-batches whose tokens are still being counted: zeroed, they "
                "would begin a new step, scaled, they would go on with the old one. Clear them by "
                "`zero_grad(set_to_none=True)`, or give `lamina.token_mean` the total of all micro-batches "
                "(`total=lamina.total(count)`)"
            )
        return not grads

    def _refuse_earlier(self) -> None:
        """What is there when the first tokens of a step are counted would be divided by them, too. Collective."""
        sums_wait = any(self.units[index].gradients.waiting for index in self.reducer.partials)
        is_there = sums_wait or any(bool(local_of(grad).any()) for grad in self._finished())
        if any(row[0] for row in self.control.exchange([int(is_there)], "tokens beside earlier gradients")):
            raise StateError(
                "`lamina.token_mean` inside `lamina.accumulate` divides all gradients by the tokens of its "
                "micro-batches, and there are gradients of earlier losses: clear them first, or give it the total "
                "(`total=lamina.total(counts_of_all_micro_batches)`)"
            )

    # ---- dividing ----------------------------------------------------------------------------------------------

    def divide(self, complete: Sequence[int], ranks: int) -> None:
        """Gradients of these units, sums divided by so many ranks, by the tokens of all ranks. Collective, if any."""
        tokens, self._counted = self._counted, None
        if tokens is None:
            return
        everyone = next((unit.mesh.sums for unit in self.units), None)
        if everyone is not None:
            work = torch.distributed.all_reduce(tokens, group=everyone, async_op=True)
            finish(work, tokens, "sums tokens at the last micro-batch")
        factor = ranks / divisor(tokens.to(torch.float64))
        with torch.no_grad():
            for index in complete:
                self.units[index].gradients.has_squares = False
                for grad in self.units[index].gradients.ranges:
                    grad.mul_(factor.to(grad.real.dtype))

    def settle_alone(self, is_last: bool) -> None:
        """On one rank torch does everything, and what is left is to divide by tokens.

        `is_last`: of the micro-batches.
        """
        grads = self._finished()
        if all(self._before.get(id(grad)) == grad._version for grad in grads):
            return  # a backward of something else
        self.refuse_other_terms()
        self.take_fresh()
        if is_last and self._counted is not None:
            for grad in grads:
                grad.div_(divisor(self._counted.to(grad.real.dtype)))
            self._counted = None
        self._versions = self._versions_now()
