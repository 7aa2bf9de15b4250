"""When a unit's backward begins and ends, read off autograd's own graph.

Other runtimes wrap inputs and outputs in autograd Functions (views that the parent changes in place break, containers
they do not know lose their hook), or take "all parameter gradients have come" for the end (weights are read later with
LoRA, detached weights, two inputs, nested checkpoints). Here hooks sit on the nodes that exist anyway.

Note [Begin and end]
    1. A backward use begins when the node of any of the unit's outputs is about to run (its base's node as well, where
       an output is a view: a parent's in-place change moves the output to another node).
    2. It ends when the node of a differentiable input is about to run. The engine picks the ready node made last; every
       node of the unit was made after its inputs' nodes, and a node that is not ready waits for one made even later. So
       when an input's node is picked, all nodes of the unit that this graph task runs have run. (AccumulateGrad runs at
       once, so gradients are there too.) With inputs on several devices there are several queues: all must pass.
    3. Without such an input it ends with the graph task.
    4. By the same argument a use has ended when one begins whose forward had ended before its own began.
    5. On one node, ends come before begins: what has ended frees its slot for what begins.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.core.slots import Slot
from lamina.errors import StateError
from lamina.runtime.unit import Unit

PLAIN_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
MAXIMAL_DEPTH = 6


class Use:
    """One forward visit of a unit whose graph is alive; held by that graph's nodes only (it must not hold them)."""

    __slots__ = (
        "unit",
        "slot",
        "opened",
        "closed",
        "version",
        "reads",
        "input_count",
        "waiting",
        "active_in",
        "done",
        "__weakref__",
    )

    def __init__(
        self, unit: Unit, slot: Slot | None, input_count: int, opened: int, closed: int, reads: bool = True
    ) -> None:
        self.unit, self.slot = unit, slot
        self.reads = reads  # whether its backward needs the weights; see lookups.py
        self.opened, self.closed = opened, closed  # when its forward began and ended, counted over all forwards
        self.version = unit.version  # of the weights that it read
        self.input_count = input_count  # input nodes that must pass before the end; 0: the end of the graph task
        self.waiting = 0
        self.active_in: int | None = None  # the graph task in which its backward is under way
        self.done = False
        unit.alive_uses += 1

    def check_weights(self) -> None:
        """Before its backward: the weights that its forward read are those that backward will read, and no later one.

        Raises:
            StateError: a graph of this backward is wanted too, or the weights were changed since.
        """
        unit = self.unit
        if torch.is_grad_enabled() and not unit.plain and not unit.kept:
            raise StateError(
                f"backward with create_graph=True through `{unit.name}`: its weights would be needed after they are "
                "given back. Type `with lamina.keep(model):` around the forward and both backwards"
            )
        if self.version != unit.version or (unit.sharded and unit.dirty.value):
            raise StateError(
                f"the weights of `{unit.name}` were changed between its forward and this backward, so its gradients "
                "would be a mixture: step, load and edit after the backward, or run the forward again"
            )

    def finish(self) -> None:
        """No backward of this use can come any more."""
        if not self.done:
            self.done = True
            self.unit.alive_uses -= 1

    def __del__(self) -> None:
        self.finish()


class NodeHook:
    """All begins and ends that one sharded model has on one autograd node: the output of one may be another's input."""

    __slots__ = ("begins", "ends", "begin", "end")

    def __init__(self, begin: Callable[[Use], None], end: Callable[[Use], None]) -> None:
        self.begins: list[Use] = []
        self.ends: list[weakref.ref[Use]] = []
        self.begin, self.end = begin, end

    def __call__(self, grads: Any) -> None:
        for reference in self.ends:
            use = reference()
            if use is not None:
                self.end(use)
        for use in self.begins:
            self.begin(use)


def hook_of(node: Any, owner: object, begin: Callable[[Use], None], end: Callable[[Use], None]) -> NodeHook:
    """The hook of the model run by `owner` on `node`, registered the first time."""
    hook = node.metadata.get(owner)
    if hook is None:
        hook = node.metadata[owner] = NodeHook(begin, end)
        node.register_prehook(hook)
    return hook


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a nested value: containers, dataclasses, and the attributes of other objects."""
    found: list[Tensor] = []
    _collect(value, found, 0)
    return found


def _collect(value: Any, found: list[Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, PLAIN_LEAVES) or depth > MAXIMAL_DEPTH:
        return
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _collect(item, found, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found, depth + 1)
    elif not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        for name in getattr(type(value), "__slots__", ()):
            _collect(getattr(value, name, None), found, depth + 1)
        for item in getattr(value, "__dict__", {}).values():
            _collect(item, found, depth + 1)


def hides_tensors(value: Any) -> bool:
    """Whether a returned value is of a kind that could hold tensors where nobody sees them."""
    return callable(value) or hasattr(value, "__next__")


def nodes_of_inputs(tensors: Sequence[Tensor]) -> tuple[list[Any], int]:
    """Nodes of the differentiable inputs, and how many must pass before the use has ended (0: unknown)."""
    nodes: list[Any] = []
    devices: set[torch.device] = set()
    for tensor in tensors:
        if tensor.requires_grad:
            devices.add(tensor.device)
            _take(tensor.grad_fn, nodes)
    return nodes, (1 if len(devices) == 1 else len(nodes)) if nodes else 0


def nodes_of_outputs(tensors: Sequence[Tensor], inputs: list[Any]) -> list[Any]:
    """Nodes whose turn means that the unit's backward begins."""
    nodes: list[Any] = []
    for tensor in tensors:
        if tensor.requires_grad:
            _take(tensor.grad_fn, nodes, inputs)
            if tensor._is_view() and tensor._base is not None:
                _take(tensor._base.grad_fn, nodes, inputs)
    return nodes


def _take(node: Any, nodes: list[Any], others: Sequence[Any] = ()) -> None:
    """Add a node that is neither there nor among the others; torch gives one object for one node."""
    if node is not None and node not in nodes and node not in others:
        nodes.append(node)
