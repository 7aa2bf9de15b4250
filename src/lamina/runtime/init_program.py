"""The recorded past of a storage, as data that can be run again.

torch can build a module on meta, but then forgets what its constructors would have written. Here every value is
a `Node`: memory that nobody wrote, a constant, the output of a call, or an earlier node after a call wrote to it.
Nodes are immutable and point backwards, so what a call read stays what it was, whatever is written later, and
a whole overwrite simply drops the past.

A tensor is named by a `Ref`: a node and a geometry on it. Views need no operations of their own: at replay the
storage exists once and each tensor is laid on it by size, stride and offset.

A call that draws random numbers keeps the generator's state from just before it, so any node can be replayed at
any time, in any order, with the numbers of the original run. See docs/decisions/initialisation.md.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from lamina.errors import InitialisationError
from lamina.runtime import mersenne, skipping

aten = torch.ops.aten

# Writes every element of its target, whatever the target held before.
OVERWRITES = frozenset(
    {
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.copy_.default,
        aten.normal_.default,
        aten.uniform_.default,
        aten.bernoulli_.float,
        aten.bernoulli_.Tensor,
        aten.exponential_.default,
        aten.cauchy_.default,
        aten.log_normal_.default,
        aten.geometric_.default,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
    }
)
# Writes elements chosen by an index or a mask. The target counts as written: which elements were is not followed.
SCATTERS = frozenset(
    {
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten.masked_scatter_.default,
        aten.index_fill_.int_Scalar,
        aten.index_fill_.int_Tensor,
        aten.index_copy_.default,
        aten.scatter_.src,
        aten.scatter_.value,
        aten.fill_diagonal_.default,
    }
)


def is_overwrite(func: Any) -> bool:
    """Whether `func` sets all elements of what it writes, without reading them."""
    return func in OVERWRITES or torch.Tag.out in func.tags or func._schema.name.endswith("_out")


class Node:
    """The contents of one storage at one moment."""

    nbytes: int
    device: torch.device


@dataclass(eq=False)
class Blank(Node):
    """Memory as the allocator gave it."""

    nbytes: int
    device: torch.device


@dataclass(eq=False)
class Constant(Node):
    """Values that came from outside the recording. Held by reference until somebody writes to them in it."""

    tensor: torch.Tensor
    version: int
    shared: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        whole = tensor.detach()
        node = cls(whole, whole._version)
        node.nbytes, node.device = whole.untyped_storage().nbytes(), whole.device
        return node

    def own(self) -> None:
        """Keep a private copy: the shared storage is about to be written."""
        if self.shared:
            storage = self.tensor.untyped_storage().clone()
            self.tensor = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            self.version, self.shared = self.tensor._version, False


@dataclass(eq=False)
class Output(Node):
    """The `index`-th tensor that `call` returned."""

    call: Call
    index: int
    nbytes: int
    device: torch.device


@dataclass(eq=False)
class Written(Node):
    """`before`, after `call` wrote to it."""

    call: Call
    before: Node
    targets: tuple[Ref, ...]  # where on the storage
    nbytes: int
    device: torch.device


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor: a geometry (in elements) on the storage that `node` stands for."""

    node: Node
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    flags: tuple[bool, bool]  # conjugate bit, negative bit

    @classmethod
    def of(cls, tensor: torch.Tensor, node: Node) -> Ref:
        flags = (tensor.is_conj(), tensor.is_neg())
        return cls(
            node, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), flags
        )

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """This tensor, laid on `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]
        if self.flags[0]:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.flags[1] else tensor


@dataclass(frozen=True)
class Draw:
    """Where the random numbers of a call begin."""

    device: torch.device
    state: torch.Tensor  # uint8, 1-D: generator state before the call
    explicit: bool  # the call was given a generator; else the device's default one
    after: bytes | None = None  # digest of the state after it, where that was computed and not drawn


@dataclass(eq=False)
class Call:
    """One operation, with a `Ref` for every tensor among its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draw: Draw | None = None
    serial: int = field(default_factory=count().__next__)  # the order of the recording

    def refs(self) -> Iterator[Ref]:
        return (leaf for leaf in tree_iter((self.args, self.kwargs)) if isinstance(leaf, Ref))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on `device` use when they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


_DEFAULT_GENERATOR = threading.Lock()


@contextmanager
def _drawing(func: Any, draw: Draw | None, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The call's keyword arguments, with its random numbers set to begin where they did."""
    if draw is None:
        yield kwargs
    elif draw.explicit or any(argument.name == "generator" for argument in func._schema.arguments):
        # One of its own, so that several threads can draw. It gives the numbers that the default one would.
        generator = torch.Generator(device=draw.device)
        generator.set_state(draw.state)
        yield {**kwargs, "generator": generator}
        check_end(func, draw, generator)
    else:
        generator = default_generator(draw.device)
        with _DEFAULT_GENERATOR:
            kept = generator.get_state()
            generator.set_state(draw.state)
            try:
                yield kwargs
            finally:
                generator.set_state(kept)


def check_end(func: Any, draw: Draw, generator: torch.Generator) -> None:
    """Raise if a draw ended in another state than was computed for what is drawn next."""
    if draw.after is not None and mersenne.digest(generator.get_state()) != draw.after:
        skipping.distrust()
        raise InitialisationError(
            f"`{func}` took more or fewer random numbers than when it was first seen in this process, so what was "
            "drawn after it is not what eager construction draws; build the model again: from now on every draw "
            "is made, as slowly as in eager construction, and no state is computed"
        )


def replay(target: Node, known: tuple[Node, torch.UntypedStorage] | None = None) -> torch.UntypedStorage:
    """A private storage with the contents of `target`.

    The calls that lead to it run once each, in their original order. So every read of a storage comes before the next
    write to it, as it did then, and one copy of each storage is enough. `known` is a node computed before.
    """
    calls, uses = reachable(target, known)
    storages: dict[Node, torch.UntypedStorage] = {}

    def fetch(node: Node) -> torch.UntypedStorage:
        if node not in storages:
            storages[node] = known[1].clone() if known is not None and known[0] is node else _base(node)
        return storages[node]

    for call in sorted(calls, key=lambda call: call.serial):
        args, kwargs = tree_map_only(Ref, lambda ref: ref.on(fetch(ref.node)), (call.args, call.kwargs))
        with _drawing(call.func, call.draw, kwargs) as kwargs:
            results = call.func(*args, **kwargs)
        outputs = [leaf for leaf in tree_iter(results) if isinstance(leaf, torch.Tensor)]
        for node in calls[call]:
            storages[node] = outputs[node.index].untyped_storage() if isinstance(node, Output) else fetch(node.before)
        for ref in call.refs():
            uses[ref.node] -= 1
            if not uses[ref.node]:
                del storages[ref.node]
    return fetch(target)


def reachable(
    target: Node, known: tuple[Node, torch.UntypedStorage] | None
) -> tuple[dict[Call, list[Output | Written]], Counter[Node]]:
    """The calls behind `target` with the nodes wanted from each, and how often each node is read."""
    calls: dict[Call, list[Output | Written]] = {}
    uses: Counter[Node] = Counter()
    waiting, seen = [target], {target}
    uses[target] = 1
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (Output, Written)) or (known is not None and known[0] is node):
            continue
        if node.call not in calls:
            calls[node.call] = []
            for ref in node.call.refs():
                uses[ref.node] += 1
                if ref.node not in seen:
                    seen.add(ref.node)
                    waiting.append(ref.node)
        calls[node.call].append(node)
    return calls, uses


def _base(node: Node) -> torch.UntypedStorage:
    if isinstance(node, Blank):
        return torch.UntypedStorage(node.nbytes, device=node.device)
    assert isinstance(node, Constant), node
    if node.tensor._version != node.version:
        raise InitialisationError("a tensor that it was made from has been changed since")
    return node.tensor.untyped_storage().clone()


# Results as unwritten as their input.
_COPIES = frozenset({aten.clone.default, aten._to_copy.default})


def unwritten_numel(ref: Ref) -> int:
    """How many elements of a tensor no call ever wrote; an indexed write counts for its whole target."""
    chain: list[Written] = []
    node = ref.node
    while isinstance(node, Written):
        chain.append(node)
        node = node.before
    if isinstance(node, Output) and node.call.func in _COPIES and not chain:
        return unwritten_numel(node.call.args[0])
    if not isinstance(node, Blank):
        return 0
    itemsize = ref.dtype.itemsize
    nbytes = max(node.nbytes, ref.node.nbytes)  # `out=` may have resized it
    mask = torch.zeros(nbytes // itemsize, dtype=torch.bool)
    for written in reversed(chain):
        if not (is_overwrite(written.call.func) or written.call.func in SCATTERS):
            continue
        for target in written.targets:
            if target.dtype.itemsize != itemsize:
                return 0  # reinterpreted bits: not followed
            mask.as_strided(target.size, target.stride, target.offset).fill_(True)
    return int(torch.count_nonzero(~mask.as_strided(ref.size, ref.stride, ref.offset)))
