"""Runs what is real and records what is deferred: the dispatcher side of `deferred`.

A `TorchDispatchMode` sees every operation after autograd and decomposition, so in-place operations, views and factories
come here as a small set of primitives. Storages are known by address; a storage that a parameter took to meta shares
its record with the real one it came from. Values of deferred tensors that an operation reads are computed on the spot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from lamina.errors import InitialisationError, UsageError
from lamina.runtime import skipping
from lamina.runtime.init_program import (
    Blank,
    Call,
    Constant,
    Draw,
    Node,
    Output,
    Ref,
    Written,
    aten,
    default_generator,
    is_overwrite,
    replay,
)

# The one mark on a parameter: it must follow the object through `.data =` and end with it, and a table of weak
# references would make `torch.utils.swap_tensors` refuse the parameter.
_MARK = "_lamina_recorded"

_BLANK_FACTORIES = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
# Operations that ask a tensor for its shape, type and place only.
_SHAPE_READERS = _BLANK_FACTORIES | frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
_SETTERS = frozenset({aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset, aten.set_.source_Storage})


@dataclass(frozen=True)
class Recorded:
    """What `deferred` leaves on a parameter."""

    value: Ref
    version: int  # the parameter's version counter when the block ended


@dataclass(eq=False)
class _Record:
    """The history of one storage of the block. A real storage and its meta twin share one."""

    head: Node
    stale: bool = False  # written through the twin: the real storage, if it lives, is behind `head`


def recorded(parameter: torch.Tensor) -> Recorded | None:
    """How `parameter` is to be computed, if it was built inside `deferred`."""
    return parameter.__dict__.get(_MARK)


def forget(parameter: torch.Tensor) -> None:
    """Drop the recording; called when the value has been handed out."""
    parameter.__dict__.pop(_MARK, None)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Operations in here are ours: no mode sees them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, nn.Parameter)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _returns_view(func: Any) -> bool:
    infos = [result.alias_info for result in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos) or torch.Tag.inplace_view in func.tags


def _overwrites(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> bool:
    """Whether what the written storages held before has no part in what they hold after."""
    if not written or not is_overwrite(func) or not all(_covers_storage(t) for t in written):
        return False
    targets = {_key(t) for t in written}
    read = [t for t in _tensors((args, kwargs)) if not any(t is w for w in written)]
    return all(t.layout is torch.strided and _key(t) not in targets for t in read)


def _covers_storage(tensor: torch.Tensor) -> bool:
    """Whether each element of the storage belongs to exactly one element of the tensor."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def check_seed(seed: Any, caller: str) -> None:
    """What every generator of torch takes and an exchange between ranks can carry."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise UsageError(f"{caller}(seed={seed!r}): a whole number of 64 bits, such as 0")


class Recorder(TorchDispatchMode):
    """Runs what is real, records what is deferred. One per `deferred` block."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._records: dict[int, tuple[_Record, StorageWeakRef]] = {}  # by address of the storage
        self._constants: WeakValueDictionary[int, Constant] = WeakValueDictionary()
        self._parameters: list[nn.Parameter] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []  # with their state before the block
        self._recent: tuple[Node, torch.UntypedStorage] | None = None  # last computed value: loops that read and write
        self._scratch: dict[torch.device, torch.UntypedStorage] = {}  # as large as the largest parameter rehearsed
        self._purge_at = 1024

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's guard against being compiled imports the compiler, which takes seconds; we never are

    # -- the block's ends

    def seed_generator(self, device: torch.device) -> None:
        """Seed the default generator of `device`, once, as `torch.manual_seed` would; `close` gives its state back."""
        generator = default_generator(device)
        if all(generator is not known for known, _ in self._generators):
            self._generators.append((generator, generator.get_state()))
            generator.manual_seed(self._seed)

    def close(self) -> None:
        """Leave each parameter its recording, and the random streams as they were."""
        for generator, state in self._generators:
            generator.set_state(state)
        for parameter in self._parameters:
            record = self._find(parameter)
            if record is not None and parameter.is_meta:
                parameter.__dict__[_MARK] = Recorded(Ref.of(parameter, record.head), parameter._version)
        self._records.clear()
        self._parameters.clear()
        self._scratch.clear()
        self._recent = None

    # -- storages and their records

    def _find(self, tensor: torch.Tensor) -> _Record | None:
        if tensor.layout is not torch.strided or not _is_plain(tensor):
            return None
        entry = self._records.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def _head(self, tensor: torch.Tensor) -> Node:
        record = self._find(tensor)
        if record is not None:
            return record.head
        # From outside the block. Held weakly: only a call that read it may keep it.
        key = tensor.untyped_storage()._cdata
        constant = self._constants.get(key)
        if constant is None:
            constant = self._constants[key] = Constant.of(tensor)
        return constant

    def _record(self, tensor: torch.Tensor) -> _Record:
        return self._find(tensor) or self._enter(tensor, _Record(self._head(tensor)))

    def _enter(self, tensor: torch.Tensor, record: _Record) -> _Record:
        if len(self._records) >= self._purge_at:
            self._records = {key: entry for key, entry in self._records.items() if not entry[1].expired()}
            self._purge_at = max(1024, 2 * len(self._records))
        storage = tensor.untyped_storage()
        # The weak reference also keeps the key: an address is not used again while one exists.
        self._records[storage._cdata] = (record, StorageWeakRef(storage))
        return record

    def is_deferred(self, tensor: torch.Tensor) -> bool:
        """Whether only the history of `tensor` exists."""
        return tensor.device.type == "meta" and self._find(tensor) is not None

    def home(self, tensor: torch.Tensor) -> torch.device:
        """Where a deferred tensor would be."""
        return self._head(tensor).device

    def adopt(self, parameter: nn.Parameter) -> None:
        self._parameters.append(parameter)

    def defer(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor with the history of `tensor`, whose memory is free once the caller lets go of it."""
        if not _is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            return tensor
        record = self._record(tensor)
        twin = torch.empty(0, dtype=tensor.dtype, device="meta")
        storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
        twin.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
        self._enter(twin, record)
        return twin

    def compute(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a deferred tensor, to be read only."""
        node = self._head(tensor)
        if self._recent is None or self._recent[0] is not node:
            self._recent = (node, replay(node, self._recent))
        return Ref.of(tensor, node).on(self._recent[1])

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            kwargs = dict(kwargs or {})
            tensors = _tensors((args, kwargs))
            if all(_is_plain(t) and (not t.is_meta or self.is_deferred(t)) for t in tensors):
                return self._dispatch(func, args, kwargs, [t for t in tensors if t.is_meta])
        return func(*args, **kwargs)  # subclasses and meta tensors from elsewhere are not ours

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], deferred: list[torch.Tensor]) -> Any:
        if getattr(kwargs.get("device"), "type", None) == "meta":
            # Inside the block meta means "where the parameters will be": `zeros(3, device=self.weight.device)`.
            kwargs["device"] = self.home(deferred[0]) if deferred else torch.device("cpu")
        if func in _SETTERS and deferred:
            return func(*tree_map_only(torch.Tensor, self.defer, args), **kwargs)
        if _returns_view(func):
            return func(*args, **kwargs)  # geometry only: a `Ref` reads it off the tensor when it is used
        written = _written(func, args, kwargs)
        if any(self.is_deferred(t) for t in written):
            return self._write(func, args, kwargs, written)
        if func is aten._to_copy.default and deferred:
            return self._convert(func, args, kwargs)
        return self._run(func, args, kwargs, written)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
        """Run on real values, and remember where the results come from."""
        for tensor in _tensors((args, kwargs)):
            self._refresh(tensor)
        for tensor in written:
            record = self._record(tensor)
            if isinstance(record.head, Constant):
                record.head.own()
        call, before = self._call(func, args, kwargs, written)
        real = self._stand_in if func in _SHAPE_READERS else self._real
        results = func(*tree_map_only(torch.Tensor, real, args), **tree_map_only(torch.Tensor, real, kwargs))
        self._advance(call, before, written)
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs)) if t.layout is torch.strided}
        for index, result in enumerate(_tensors(results)):
            if result.layout is torch.strided and _is_plain(result) and result.untyped_storage()._cdata not in known:
                nbytes, device = result.untyped_storage().nbytes(), result.device
                blank = func in _BLANK_FACTORIES
                self._enter(result, _Record(Blank(nbytes, device) if blank else Output(call, index, nbytes, device)))
        return results

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]) -> Any:
        """Record a write to deferred tensors; run it only as far as errors and random numbers need."""
        if not all(self.is_deferred(t) for t in written) or torch.Tag.inplace_view in func.tags:
            raise InitialisationError(
                f"`{func}` on a parameter cannot be recorded inside `lamina.deferred()`; initialise the parameter with "
                "in-place operations on it alone (`torch.nn.init`, `copy_`, `w[...] = `)"
            )
        for tensor in _tensors((args, kwargs)):
            self._refresh(tensor)
        call, before = self._call(func, args, kwargs, written)

        def rehearse(t: torch.Tensor) -> torch.Tensor:
            if call.draw is None:
                return t if t.is_meta else t.to("meta")
            return self._stand_in(t) if any(t is w for w in written) else self._real(t)

        def run() -> None:
            func(*tree_map_only(torch.Tensor, rehearse, args), **tree_map_only(torch.Tensor, rehearse, kwargs))

        with contextlib.suppress(NotImplementedError):  # no meta kernel: an error in it will show at replay
            if call.draw is None:
                run()
            else:
                generator = kwargs.get("generator") or default_generator(call.draw.device)
                call.draw = replace(call.draw, after=skipping.draw(generator, func, args, kwargs, run))
        self._advance(call, before, written)
        for tensor in written:
            self._record(tensor).stale = True
        returns = len(func._schema.returns)
        return None if returns == 0 else written[0] if returns == 1 else tuple(written)

    def _convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """`.to()` of a deferred tensor stays deferred, so that `module.bfloat16()` keeps parameters where they are."""
        call, _ = self._call(func, args, kwargs, [])
        device = kwargs.get("device") or self.home(args[0])
        result = func(*args, **{**kwargs, "device": torch.device("meta")})
        self._enter(result, _Record(Output(call, 0, result.untyped_storage().nbytes(), device)))
        return result

    # -- pieces of the above

    def _refresh(self, tensor: torch.Tensor) -> None:
        record = self._find(tensor)
        if record is not None and record.stale and not tensor.is_meta:
            tensor.untyped_storage().copy_(replay(record.head))
            record.stale = False

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.compute(tensor) if self.is_deferred(tensor) else tensor

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.is_deferred(tensor):
            return tensor
        # One piece of memory for all: freed and taken again, pieces of changing size would leave holes in the heap.
        home, nbytes = self.home(tensor), tensor.untyped_storage().nbytes()
        scratch = self._scratch.get(home)
        if scratch is None or scratch.nbytes() < nbytes:
            scratch = self._scratch[home] = torch.UntypedStorage(nbytes, device=home)
        stand_in = torch.empty(0, dtype=tensor.dtype, device=home)
        return stand_in.set_(scratch, 0, tensor.size(), tensor.stride())  # type: ignore[call-overload]

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> tuple[Call, dict[int, Node]]:
        """The call as data, and by storage the node that it refers to."""
        fresh = func in _SHAPE_READERS or _overwrites(func, args, kwargs, written)
        drop = {
            _key(t)
            for t in _tensors((args, kwargs))
            if t.layout is torch.strided and fresh and (func in _SHAPE_READERS or any(t is w for w in written))
        }
        nodes: dict[int, Node] = {}

        def refer(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return None  # its state is in the draw
            if leaf.layout is not torch.strided:
                return leaf
            key, node = _key(leaf), self._head(leaf)
            if key in drop:
                node = nodes.get(key) or Blank(node.nbytes, node.device)
            nodes[key] = node
            return Ref.of(leaf, node)

        new_args, new_kwargs = tree_map_only((torch.Tensor, torch.Generator), refer, (args, kwargs))
        return Call(func, new_args, new_kwargs, self._draw(func, args, kwargs)), nodes

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
        generator = kwargs.get("generator")
        if generator is not None:
            return Draw(generator.device, generator.get_state(), explicit=True)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        tensors = _tensors((args, kwargs))
        place = kwargs.get("device") or (self._head(tensors[0]).device if tensors else torch.device("cpu"))
        self.seed_generator(place)
        return Draw(place, default_generator(place).get_state(), explicit=False)

    def _advance(self, call: Call, before: dict[int, Node], written: list[torch.Tensor]) -> None:
        """The written storages now hold what `call` left there."""
        for key, tensor in {_key(t): t for t in written}.items():
            node = before[key]
            targets = tuple(Ref.of(t, node) for t in written if _key(t) == key)
            nbytes = tensor.untyped_storage().nbytes()
            self._record(tensor).head = Written(call, node, targets, nbytes, node.device)
