"""Uses of a model that runs by torch's own autograd: one rank, nothing to split and nothing to cast.

`lamina.shard` leaves such a model without hooks, so the runtime's methods that a recorder taps (recorder.py) are never
called. Here modules of units tell of their forward, and the nodes behind their outputs and before their inputs of their
backward, while a trace runs; afterwards the model is as it was.

A unit's backward begins when the gradient of its output is there, and ends when that of its inputs is, or, where nobody
asks for one (an embedding), with the whole backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lamina.core.program import Op
from lamina.runtime.unit import Unit

Tell = Callable[[Op, Unit], None]


class NativeUses:
    """Tells of uses. `begin` and `end` are called in pairs, the innermost ends first."""

    def __init__(self, model: nn.Module, units: list[Unit], begin: Tell, end: Tell) -> None:
        self.begin, self.end = begin, end
        self._open: list[Unit] = []  # whose backward has begun
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        for unit in units:
            for name in unit.plan.modules or ("",):
                self._handles += [
                    modules[name].register_forward_pre_hook(self._entering(unit), with_kwargs=True),
                    modules[name].register_forward_hook(self._leaving(unit)),
                ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._open.clear()

    def _entering(self, unit: Unit) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.begin(Op.FORWARD, unit)
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            if inputs and torch.is_grad_enabled():
                ended = torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self._close(unit))
                self._handles.append(ended)

        return enter

    def _leaving(self, unit: Unit) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.end(Op.FORWARD, unit)
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    self._handles.append(tensor.grad_fn.register_prehook(lambda _: self._start(unit)))

        return leave

    def _start(self, unit: Unit) -> None:
        if not self._open:  # called when this backward has ended
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._close_all)
        if unit not in self._open:
            self._open.append(unit)
            self.begin(Op.BACKWARD, unit)

    def _close(self, unit: Unit) -> None:
        """With it, what began inside it and has no end of its own."""
        while unit in self._open:
            self.end(Op.BACKWARD, self._open.pop())

    def _close_all(self) -> None:
        while self._open:
            self.end(Op.BACKWARD, self._open.pop())
