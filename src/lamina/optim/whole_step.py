"""Whether what `lamina.capture` is to record is a whole step: what a graph does not do again is named before.

A graph runs kernels. It does not bind `p.grad`, so gradients that a recorded step leaves behind are not there for an
optimizer outside of it once `zero_grad()` has taken them away, which then does nothing, without a word. And it reads
gradients where they lay in the recording, which is elsewhere by the next backward outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.optim.optimizer import Optimizer

from lamina.errors import UsageError
from lamina.runtime.assemble import Runtime

CURE = "put forward, backward, optimizer.step() and zero_grad() into one captured function, or capture none of them"


class WholeStep:
    """One eager call of a function that is to be recorded."""

    def __init__(self, runtimes: Sequence[Runtime]) -> None:
        self._runtimes, self._phases = runtimes, [runtime.engine.phases for runtime in runtimes]
        self._without = {id(param) for _, param in _trained(runtimes) if param.grad is None}
        self._was_stepped = False

    def ran(self) -> list[Runtime]:
        """Those whose models have run in it."""
        return [r for r, before in zip(self._runtimes, self._phases, strict=True) if r.engine.phases > before]

    def check_update(self, optimizer: Optimizer) -> None:
        """Before an optimizer's step in the call.

        Raises `UsageError` where it takes gradients of a model that has not run in the call.
        """
        self._was_stepped = True
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        ran = {id(runtime) for runtime in self.ran()}
        others = [r for r in self._runtimes if r.engine.units and id(r) not in ran]  # on one rank nobody counts
        for name, param in _trained(others):
            if id(param) in held and param.grad is not None:
                raise UsageError(
                    f"lamina.capture(): {type(optimizer).__name__} updates `{name}`, whose gradient comes from outside "
                    f"the captured function: {CURE}"
                )

    def check_end(self) -> None:
        """Raises `UsageError` where the call has made gradients, and no optimizer has stepped in it."""
        for name, param in () if self._was_stepped else _trained(self._runtimes):
            if id(param) in self._without and param.grad is not None:
                raise UsageError(
                    f"lamina.capture(): the captured function leaves the gradient of `{name}` to an optimizer outside "
                    f"of it, which would find none once the function is a graph: {CURE}"
                )


def _trained(runtimes: Iterable[Runtime]) -> Iterator[tuple[str, Tensor]]:
    for runtime in runtimes:
        for unit in runtime.units:
            for spec, param in zip(unit.layout.params, unit.params, strict=True):
                if param.requires_grad:
                    yield spec.name, param
