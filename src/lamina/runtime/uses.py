"""When a unit's backward begins and ends, read off autograd's own graph.

Other runtimes wrap inputs and outputs in autograd Functions (views that the parent changes in place break, containers
they do not know lose their hook), or take "all parameter gradients have come" for the end (weights are read later with
LoRA, detached weights, two inputs, nested checkpoints). Here hooks sit on the nodes that exist anyway.

Note [Begin and end]
    1. A backward use begins when the node of any of the unit's outputs is about to run (its base's node as well, where
       an output is a view: a parent's in-place change moves the output to another node). A base from before the forward
       is none of it: blocks hand on views that they were given, and backward comes to their base when all have ended.
    2. It ends when the node of a differentiable input is about to run. The engine picks the ready node made last; every
       node of the unit was made after its inputs' nodes, and a node that is not ready waits for one made even later. So
       when an input's node is picked, all nodes of the unit that this graph task runs have run. (AccumulateGrad runs at
       once, so gradients are there too.) With inputs on several devices there are several queues: all must pass.
    3. Without such an input it ends with the graph task.
    4. By the same argument a use has ended when one begins whose forward had ended before its own began.
    5. On one node, ends come before begins: what has ended frees its slot for what begins.
    6. Hooks of the user's may hold full weights that they found in the forward. One on an output runs before its node's
       turn: the weights are brought before the first of them (`FirstHook`). One that the forward has hung on one of
       several inputs may run after the end of 2 and 4: there the use ends when all inputs have passed. Forward hooks
       that come behind ours may hang some, too: they are served once all of these have been called.
    7. A backward may come in past the outputs: what has left the forward by an attribute or a hook on a layer inside
       counts as one (escapes.py), of every forward that made its node. 2 to 5 hold for it as well.

Note [Kept graphs]
    1. Who keeps an output keeps its graph, and Python's collector does not see what autograd holds. So nothing that
       hangs on a graph holds the runtime: a node's hook knows its engine, and a use its slot, by weak references.
    2. Modules hold the runtime (`ModuleHooks`), and it holds none of them. What is dropped goes at once, as a plain
       model does: the runtime is in no circle with itself either.
    3. A backward through a graph that has outlived its runtime raises: here where it enters a unit, in slots.py where
       it comes in past the outputs.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lamina.core.own_attributes import own_values
from lamina.core.slots import Slot, outlived
from lamina.core.uncompiled import uncompiled
from lamina.errors import StateError
from lamina.runtime.unit import Unit

if TYPE_CHECKING:
    from lamina.runtime.engine import Engine

    Owner = weakref.ref[Engine]  # in the metadata of a node: whose hook it is

PLAIN_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
MAXIMAL_DEPTH = 6
_NEVER_INSIDE = (type, torch.nn.Module, types.ModuleType)
_SEQUENCES = frozenset([tuple, list])
_hooks_on = attrgetter("_backward_hooks")
is_grad_enabled = torch.is_grad_enabled  # torch's attributes are looked up anew each time


class Use:
    """One forward visit of a unit whose graph is alive; held by that graph's nodes only.

    It holds neither these nor anything of the runtime: Note [Kept graphs].
    """

    __slots__ = (
        "visits",
        "index",
        "slot",
        "opened",
        "closed",
        "version",
        "reads",
        "input_count",
        "waiting",
        "active_in",
        "is_early",
        "waits_for_all",
        "done",
        "__weakref__",
    )

    def __init__(
        self, unit: Unit, slot: Slot | None, input_count: int, opened: int, closed: int, reads: bool = True
    ) -> None:
        self.visits, self.index = unit.visits, unit.index
        self.slot = _none if slot is None else weakref.ref(slot)  # called; None: of a plain unit
        self.reads = reads  # whether its backward needs the weights; see lookups.py
        self.opened, self.closed = opened, closed  # when its forward began and ended, counted over all forwards
        self.version = unit.version  # of the weights that it read
        self.input_count = input_count  # input nodes that must pass before the end; 0: the end of the graph task
        self.waiting = 0
        self.active_in: int | None = None  # the graph task in which its backward is under way
        self.is_early = False  # begun for a hook of the user's: Note [Begin and end] 4 is still to be done
        self.waits_for_all = False  # whether only its inputs end it; Note [Begin and end] 6
        self.done = False
        unit.visits.alive += 1

    def check_weights(self, unit: Unit) -> None:
        """Before its backward: the weights that its forward read are those that backward will read, and no later one.

        Raises:
            StateError: a graph of this backward is wanted too, or the weights were changed since.
        """
        if is_grad_enabled() and not unit.plain and not unit.kept:
            raise StateError(
                f"backward with create_graph=True through `{unit.name}`: its weights would be needed after they are "
                "given back. Type `with lamina.keep(model):` around the forward and both backwards"
            )
        if self.version != unit.version or (unit.sharded and (unit.dirty.value or unit.was_written())):
            raise StateError(
                f"the weights of `{unit.name}` were changed between its forward and this backward, so its gradients "
                "would be a mixture: step, load and edit after the backward, or run the forward again"
            )

    def finish(self) -> None:
        """No backward of this use can come any more."""
        self.done = True
        self.visits.alive -= 1

    def __del__(self) -> None:
        if not self.done:
            self.finish()


def _none() -> None:
    return None


class Tally:
    """A number that hooks count up. An attribute of their class would have Python look up the class anew each time."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = 0


NODE_HOOKS = Tally()  # since the process began


class NodeHook:
    """All begins and ends that one sharded model has on one autograd node: the output of one may be another's input."""

    __slots__ = ("begins", "ends", "owner", "handle", "all_hooks")

    def __init__(self, node: Any, owner: Owner) -> None:
        self.begins: list[Use] = []
        self.ends: list[weakref.ref[Use]] = []
        self.owner = owner
        self.handle = node.register_prehook(self)
        NODE_HOOKS.made += 1
        self.all_hooks = self.handle.hooks_dict_ref  # with those that others have before this node

    @property
    def others(self) -> int:
        """Hooks that others have before this node."""
        return len(self.all_hooks()) - 1

    @uncompiled
    def __call__(self, grads: Any) -> None:
        engine = self.owner()
        if engine is None:
            if self.begins:  # else it is an input's, and leads past the model
                raise outlived(f"the unit `{self.begins[0].visits.unit}`")
            return
        for reference in self.ends:
            use = reference()
            if use is not None:
                engine.end_use(use)
        for use in self.begins:
            engine.begin_use(use)


def hooks_of(nodes: Iterable[Any], owner: Owner) -> list[NodeHook]:
    """`hook_of` each."""
    hooks = []
    for node in nodes:
        hooks.append(node.metadata.get(owner) or hook_of(node, owner))  # a comprehension is a call
    return hooks


def hook_of(node: Any, owner: Owner) -> NodeHook:
    """The hook of the model run by `owner` on `node`, registered the first time."""
    hook = node.metadata.get(owner)
    if hook is None:
        hook = node.metadata[owner] = NodeHook(node, owner)
    return hook


class FirstHook:
    """Begins a use before hooks of the user's that stand on an output, or on its node. Note [Begin and end] 6."""

    def __init__(self, use: Use, owner: Owner) -> None:
        self.use, self.owner = use, owner
        self.hooks: list[weakref.ref[dict[int, Any]]] = []  # on the output and on its node
        self.number = 0  # among the first of them
        self.count = 0  # of these

    @uncompiled
    def __call__(self, grads: Any) -> None:
        """Those that came since are of uses that took the output as an input: they still need their weights."""
        engine = self.owner()
        if engine is None:
            raise outlived(f"the unit `{self.use.visits.unit}`")
        engine.begin_use(self.use, self._count() > self.count)

    def register(self, tensor: Tensor, on_node: NodeHook) -> None:
        """On an output that hooks stand on, or else on its node."""
        node: Any = tensor.grad_fn
        handle: Any = tensor.register_hook(self) if tensor._backward_hooks else node.register_prehook(self)
        self.hooks, self.number = [handle.hooks_dict_ref, on_node.handle.hooks_dict_ref], handle.id
        self.stand_first()

    def stand_first(self) -> None:
        """Before all hooks that there are."""
        order = self.hooks[0]()
        assert order is not None
        for key in [key for key in order if key != self.number]:
            order[key] = order.pop(key)  # autograd goes by the order of insertion: `move_to_end` does not change it
        self.count = self._count()

    def _count(self) -> int:
        return sum(len(hooks) for reference in self.hooks if (hooks := reference()) is not None)


def any_beside(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], ends: Sequence[NodeHook], begins: Sequence[NodeHook]
) -> bool:
    """Whether `serve_hooks` may have anything to do: several inputs, or hooks of others beside those of one model."""
    if len(inputs) > 1 or any(map(_hooks_on, outputs)):
        return True
    for hook in (*ends, *begins):  # noqa: SIM110  # a generator costs more than this loop
        if len(hook.all_hooks()) > 1:
            return True
    return False


def serve_hooks(
    use: Use,
    inputs: Sequence[Tensor],
    hooks_before: int,
    outputs: Sequence[Tensor],
    owner: Owner,
) -> None:
    """Let hooks of the user's find the weights; Note [Begin and end] 6.

    Args:
        inputs, outputs: tensors of the use that need gradients.
        hooks_before: that the inputs had when the forward began: they know nothing of its weights.
        owner: whose NodeHooks are on their nodes.
    """
    for tensor in outputs:
        on_node = _node_hook(tensor, owner)
        if on_node is None or not (tensor._backward_hooks or on_node.others):
            continue
        there = (tensor._backward_hooks or on_node.all_hooks()).values()
        first = next((hook for hook in there if type(hook) is FirstHook and hook.use is use), None)
        if first is None:
            FirstHook(use, owner).register(tensor, on_node)
        else:
            first.stand_first()
    for tensor in inputs:
        on_node = _node_hook(tensor, owner)
        if on_node is not None and on_node.others:
            order = on_node.handle.hooks_dict_ref()
            order[on_node.handle.id] = order.pop(on_node.handle.id)  # last: ends come after what others do there
    if len(inputs) > 1 and count_hooks(inputs, owner) > hooks_before:
        use.waits_for_all = True
        has_leaf = any(tensor.grad_fn is None for tensor in inputs)
        use.input_count = 0 if has_leaf else len({tensor.grad_fn for tensor in inputs})


class Served(NamedTuple):
    """What `serve_hooks` was called with, for a second time."""

    use: Use
    inputs: Sequence[Tensor]
    hooks_before: int
    outputs: Sequence[Tensor]
    first_node: int  # number of the first node that autograd may have made in the forward

    def again(self, returned: Sequence[Tensor], owner: Owner) -> None:
        """`returned`: tensors that later hooks have left, perhaps in place of the outputs."""
        outputs = list(self.outputs)
        for tensor in returned:
            node = tensor.grad_fn
            if node is None or node._sequence_nr() < self.first_node or any(tensor is known for known in outputs):
                continue
            outputs.append(tensor)
            begins = hook_of(node, owner).begins
            if self.use not in begins:
                begins.append(self.use)
        serve_hooks(self.use, self.inputs, self.hooks_before, outputs, owner)


def count_hooks(tensors: Sequence[Tensor], owner: Owner) -> int:
    """Of others, on tensors and (where `owner` has one as well) before their nodes."""
    count = 0
    for tensor in tensors:
        on_node = _node_hook(tensor, owner)
        count += len(tensor._backward_hooks or ()) + (0 if on_node is None else on_node.others)
    return count


def end_others(use: Use, active: Sequence[Use], finish: Callable[[Use], None]) -> None:
    """Note [Begin and end] 4, once the node's turn has come."""
    for other in [u for u in active if u.opened > use.closed and not u.waits_for_all]:
        finish(other)


def _node_hook(tensor: Tensor, owner: Owner) -> NodeHook | None:
    node: Any = tensor.grad_fn
    return None if node is None else node.metadata.get(owner)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a nested value: containers, dataclasses, and the attributes of other objects."""
    found: list[Tensor] = []
    _collect(value, found, 0, {})
    return found


def _collect(value: Any, found: list[Tensor], depth: int, seen: dict[int, int]) -> None:
    """`seen`: how deep each object was met that others may lead to, too."""
    if type(value) in _SEQUENCES and depth <= MAXIMAL_DEPTH:  # as most of what modules take is: looked at first
        for item in value:
            if isinstance(item, Tensor):
                found.append(item)
            elif depth < MAXIMAL_DEPTH:
                _collect(item, found, depth + 1, seen)
    elif isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, PLAIN_LEAVES) or depth > MAXIMAL_DEPTH or seen.get(id(value), depth + 1) <= depth:
        return
    else:
        seen[id(value)] = depth
        for item in _inside(value):
            if isinstance(item, Tensor):
                found.append(item)
            else:
                _collect(item, found, depth + 1, seen)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    may_hold = dataclasses.is_dataclass(value) or not callable(value)
    return own_values(value) if may_hold and not isinstance(value, _NEVER_INSIDE) else ()


def hides_tensors(value: Any) -> bool:
    """Whether a returned value is of a kind that could hold tensors where nobody sees them."""
    return callable(value) or hasattr(type(value), "__next__")


def nodes_of_inputs(tensors: Sequence[Tensor]) -> tuple[list[Any], int]:
    """Nodes of inputs that need gradients, and how many must pass before the use has ended (0: unknown)."""
    nodes: list[Any] = []
    for tensor in tensors:
        node = tensor.grad_fn
        if node is not None and node not in nodes:
            nodes.append(node)
    several = len(nodes) > 1 and len({tensor.device for tensor in tensors}) > 1
    return nodes, len(nodes) if several else 1 if nodes else 0


def nodes_of_outputs(tensors: Sequence[Tensor], inputs: Sequence[Any], first_node: int = 0) -> list[Any]:
    """Nodes whose turn means that the unit's backward begins.

    Args:
        inputs: nodes of the inputs, which are none of them.
        first_node: number of the first node that autograd may have made in this forward.
    """
    nodes: list[Any] = []
    for tensor in tensors:
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is not None and node not in nodes and node not in inputs:  # torch gives one object for one node
                nodes.append(node)
            if tensor._is_view() and tensor._base is not None:
                base: Any = tensor._base.grad_fn
                is_new = base is not None and base._sequence_nr() >= first_node
                if is_new and base not in nodes and base not in inputs:
                    nodes.append(base)
    return nodes
