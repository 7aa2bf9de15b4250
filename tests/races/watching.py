"""Runs the runtime as on a GPU, on a CPU, and writes down who touches which memory on which lane.

Note [As on a GPU]
    The lanes are StreamLanes; collectives are queued on the lane that is running, as NCCL's are; gradients are given
    back between steps; sums of 16 bits alone are exchanged; `transport="peer"` is that of GPUs. Numbers come out the
    same as on any other lanes, for all work runs at once where it is called.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.core import lanes, slots
from lamina.core.shard_tensor import Shard
from lamina.core.slots import Slot, SlotState
from lamina.runtime import api, assemble, direct, hooks, recompute
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.engine import Engine
from lamina.runtime.gathering import Gatherer
from lamina.runtime.publishing import inbox_bytes, published_places
from lamina.runtime.unit import Unit
from lamina.transport.c10d import C10d
from lamina.transport.symmetric import SymmetricPeers
from races.streams import FakeCuda, FakeDevice, FakeEvent, FakeStream, place_of_caller, stack_of_caller
from races.trace import Access, GivenBack, Met, Place, Taken, Trace, Waited
from transport.test_symmetric import SharedFiles, map_file

# which arguments are written; the schemas of these do not say it
COLLECTIVES = {
    "c10d::_allgather_base_": (0,),
    "c10d::alltoall_base_": (0,),
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::allgather_": (0,),
    "c10d::reduce_scatter_": (0,),
    "c10d::gather_": (0,),
    "c10d::scatter_": (0,),
    "c10d::send": (),
}
ALL_MEET = (
    "_allgather_base_",
    "alltoall_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "reduce_scatter_",
    "allreduce_",
)
READ_TOO = ("c10d::allreduce_", "c10d::broadcast_", "c10d::reduce_", "c10d::allreduce_coalesced_")
OF_THE_HOST = ("core/control.py",)  # its tensors are the host's
UNTOUCHED = ("aten::set_", "aten::resize_", "aten::record_stream", "c10d::barrier")


class Signature:
    """What an operator does with the memory of its arguments."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.removeprefix("aten::")
        self.ignored = schema.name in UNTOUCHED
        self.meets = schema.name.removeprefix("c10d::") in ALL_MEET
        self.reads: list[tuple[int, str]] = []
        self.writes: list[tuple[int, str]] = []
        self.returns_views = all(returned.alias_info is not None for returned in schema.returns)
        self.makes = not schema.name.startswith(("aten::empty", "aten::new_empty"))  # writes what it returns
        for place, argument in enumerate(schema.arguments):
            if "Tensor" not in str(argument.type):
                continue
            key, alias = (place, argument.name), argument.alias_info
            if schema.name in COLLECTIVES:
                (self.writes if place in COLLECTIVES[schema.name] else self.reads).append(key)
            elif schema.name in READ_TOO:
                self.reads.append(key)
                self.writes.append(key)
            elif alias is None:
                self.reads.append(key)
            elif alias.is_write:
                self.writes.append(key)
            # else a view of it is returned: nothing is touched


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def span_of(tensor: Tensor) -> tuple[int, int]:
    """[start, stop) in bytes of its storage, from its first element to its last."""
    if not tensor.numel():
        return 0, 0
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + reach + 1) * tensor.itemsize


class Watch(TorchDispatchMode):
    """Writes every operation's accesses to a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace, self.cuda = trace, FakeCuda(trace)
        self.blocks: dict[int, tuple[weakref.ref[Any], int]] = {}  # by the storage's address
        self.aliases: dict[int, int] = {}  # where storages over other's memory begin in it, by their address
        self.block_count = 0
        self.dead: deque[tuple[int, int]] = deque()
        self.signatures: dict[Any, Signature] = {}
        self.marks: dict[int, int] = {}  # numbers in the trace, by those of the runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Shard) for kind in types):
            return NotImplemented  # its own operations on plain tensors come by
        kwargs = kwargs or {}
        signature = self.signatures.get(func)
        if signature is None:
            signature = self.signatures[func] = Signature(func)
        stack = stack_of_caller()
        if signature.ignored or (stack and stack[0].file.endswith(OF_THE_HOST)):
            return func(*args, **kwargs)
        self.flush()
        for keys, writes in ((signature.reads, False), (signature.writes, True)):
            for place, name in keys:
                value = args[place] if place < len(args) else kwargs.get(name)
                for tensor in tensors_in(value):
                    self.touch(tensor, writes, signature.name, stack)
            if signature.meets and not writes:  # what arrives comes after what all have sent
                self.meet(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        result = func(*args, **kwargs)
        self.flush()
        if not signature.returns_views:
            for tensor in tensors_in(result):
                self.take(tensor, signature, stack)
        return result

    def meet(self, boxed: torch.ScriptObject) -> None:
        pg = dist.ProcessGroup.unbox(boxed)
        self.meet_in(pg.group_name, tuple(dist.get_process_group_ranks(pg)))

    def meet_in(self, what: str, ranks: tuple[int, ...], place: Place | None = None) -> None:
        self.flush()
        self.trace.events.append(Met(self.cuda.current.name, what, ranks, place))

    # ---- memory ------------------------------------------------------------------------------------------------

    def touch(self, tensor: Tensor, writes: bool, what: str, stack: Any) -> None:
        if tensor.device.type != "cpu" or type(tensor) is Shard or tensor.layout is not torch.strided:
            return
        start, stop = span_of(tensor)
        if start < stop:
            storage = tensor.untyped_storage()
            block, at = self.block_of(storage), self.aliases.get(storage._cdata, 0)
            self.trace.events.append(Access(self.cuda.current.name, block, at + start, at + stop, writes, what, stack))

    def take(self, tensor: Tensor, signature: Signature, stack: Any) -> None:
        """What an operation has returned: memory that it has taken and written, unless it is known already."""
        if tensor.device.type != "cpu" or type(tensor) is Shard or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self.blocks and storage.nbytes():
            self.take_storage(storage, signature.name, stack)
            if signature.makes:
                self.touch(tensor, True, signature.name, stack)

    def take_storage(self, storage: torch.UntypedStorage, what: str, stack: Any) -> None:
        block = self.block_of(storage, renew=True)
        self.trace.events.append(Taken(self.cuda.current.name, block, storage.nbytes(), what, stack))

    def block_of(self, storage: torch.UntypedStorage, renew: bool = False) -> int:
        """The number of the memory that a storage has now."""
        address = storage._cdata
        known = self.blocks.get(address)
        if known is not None and not renew:
            return known[1]
        self.aliases.pop(address, None)
        if not renew and (found := self.memory_of(storage)) is not None:
            number, self.aliases[address] = found
            self.blocks[address] = weakref.ref(storage, functools.partial(self.forget_alias, address)), number
            return number
        self.block_count += 1
        number, dead = self.block_count * dist.get_world_size() + self.trace.rank, self.dead
        gone = weakref.ref(storage, lambda _: dead.append((address, number)))
        self.blocks[address] = gone, number
        return number

    def memory_of(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Of one that is laid over another's memory: the number of that, and where it begins there."""
        for known, number in self.blocks.values():
            other = known()
            if other is None or other._cdata in self.aliases or not storage.nbytes():
                continue
            start = storage.data_ptr() - other.data_ptr()
            if 0 <= start < other.nbytes():
                return number, start
        return None

    def forget_alias(self, address: int, reference: weakref.ref[Any]) -> None:
        if self.blocks.get(address, (None, 0))[0] is reference:
            del self.blocks[address], self.aliases[address]

    def share(self, tensor: Tensor, path: str) -> None:
        """Memory that all ranks map: its number is theirs, too."""
        storage = tensor.untyped_storage()
        self.blocks[storage._cdata] = weakref.ref(storage), -1 - zlib.crc32(path.encode())

    def flush(self) -> None:
        """Memory whose last user has gone; Gloo's threads may have been that."""
        while self.dead:
            address, number = self.dead.popleft()
            if address in self.blocks and self.blocks[address][1] == number:
                del self.blocks[address]
            self.trace.events.append(GivenBack(number))

    def resize(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """What `UntypedStorage.resize_` does on CUDA: new memory, a copy, and the old memory given back."""
        self.flush()
        events, lane, stack = self.trace.events, self.cuda.current.name, stack_of_caller()
        before_bytes, known = storage.nbytes(), self.blocks.pop(storage._cdata, None)
        if known is None and before_bytes:
            known = weakref.ref(storage), self.block_of(storage)
        old = None if known is None or not before_bytes else known[1]
        kept_bytes = min(before_bytes, size_bytes)
        if kept_bytes and old is not None:
            events.append(Access(lane, old, 0, kept_bytes, False, "resize_", stack))
        resize_on_cpu(storage, size_bytes)
        if size_bytes:
            self.take_storage(storage, "resize_", stack)
        if old is not None:
            events.append(GivenBack(old))

    def keep(self, tensor: Tensor, stream: FakeStream) -> None:
        self.cuda.keep(self.block_of(tensor.untyped_storage()), stream)

    def gather(self, gatherer: Gatherer, unit: Unit, slot: Slot) -> None:
        """`Gatherer.start`. Over the same weights, in use, it writes the bytes that are there: it only reads them."""
        is_used = slot.state is SlotState.WEIGHTS and slot.pins > 0
        before, first = slot.buffer.numpy().tobytes() if is_used else b"", len(self.trace.events)
        real_start(gatherer, unit, slot)
        if is_used and slot.buffer.numpy().tobytes() == before:
            block = self.block_of(slot.buffer.untyped_storage())
            for event in self.trace.events[first:]:
                if isinstance(event, Access) and event.block == block:
                    event.writes = False

    # ---- lanes -------------------------------------------------------------------------------------------------

    def wait(self, lane: lanes.StreamLane, mark: lanes.Mark | None) -> None:
        """StreamLane.wait, of which the trace tells also where it found nothing to wait for."""
        events = self.trace.events
        before = len(events)
        self.flush()
        real_wait(lane, mark)
        if mark is not None and not any(isinstance(event, Waited) for event in events[before:]):
            events.append(Waited(lane._current().name, self.marks[mark.number], place_of_caller(), is_queued=False))

    # ---- names -------------------------------------------------------------------------------------------------

    def note_names(self) -> None:
        """What lies where, of all models that are there now."""
        for number, runtime in enumerate(list(RUNTIMES.values())):
            model = f"model {number} " if len(RUNTIMES) > 1 else ""
            for unit in runtime.units:
                title = model + (unit.name or "root")
                slots = [("slot", unit.slot)] if unit.slot is not None else []
                for kind, slot in slots + [("overflow slot", slot) for slot in unit.overflow]:
                    self.name(slot.buffer, f"{kind} of {title}")
                for kind, tensors in (
                    ("masters", unit.masters),
                    ("gradients", unit.gradients.ranges),
                    ("squares", unit.gradients.squares),
                    ("published weights", unit.published),
                ):
                    for tensor in tensors:
                        self.name(tensor, f"{kind} of {title}")
                for master in unit.halved.values():
                    self.name(master.remainders, f"remainders of {title}")
            reducer = runtime.engine.reducer
            for role, buffer in reducer._buffers.items():
                self.name(buffer, f"{model}reduction's {role}")
            for index, partial in reducer.partials.items():
                for total in partial.sums:
                    self.name(total, f"{model}partial sums of unit {index}")

    def name(self, tensor: Tensor, what: str) -> None:
        known, (start, stop) = self.blocks.get(tensor.untyped_storage()._cdata), span_of(tensor)
        if known is not None and start < stop:
            names = self.trace.names.setdefault(known[1], [])
            if (start, stop, what) not in names:
                names.append((start, stop, what))


class WatchedFiles(SharedFiles):
    """Memory of all ranks, and barriers, of which the trace tells."""

    def __init__(self, own: Tensor, pg: dist.ProcessGroup) -> None:
        names: list[Any] = [None] * pg.size()
        dist.all_gather_object(names, own.path, group=pg)  # type: ignore[attr-defined]
        super().__init__(own, pg)
        self.name, self.ranks = pg.group_name, tuple(dist.get_process_group_ranks(pg))
        self.watch: Watch = own.watch  # type: ignore[attr-defined]
        for buffer, name in zip([own, *self.buffers], [own.path, *names], strict=True):  # type: ignore[attr-defined]
            self.watch.share(buffer, name)

    def barrier(self, channel: int) -> None:
        place = place_of_caller("SharedFiles.barrier", "SymmetricPeers.meet")
        self.watch.meet_in(f"{self.name} channel {channel}", self.ranks, place)
        super().barrier(channel)


real_start, real_wait = Gatherer.start, lanes.StreamLane.wait
resize_on_cpu = torch.UntypedStorage.resize_


@contextlib.contextmanager
def watching(trace: Trace) -> Iterator[Watch]:
    """Models that are sharded in here run as on a GPU, and what they do is written to `trace`."""
    watch, files = Watch(trace), tempfile.TemporaryDirectory()
    made = iter(range(1 << 30))

    def resize(storage: torch.UntypedStorage, size_bytes: int) -> None:
        watch.resize(storage, int(size_bytes))

    def mark(self: Any, stream: FakeStream, event: FakeEvent | None = None) -> None:
        watch.flush()
        real_mark(self, stream, event)
        watch.marks[self.number] = self.event.number

    def begin_engine(self: Engine, *args: Any, **kwargs: Any) -> None:
        real_engine(self, *args, **kwargs)
        self.gradients.gives_back = True

    def begin_c10d(self: C10d, device: torch.device) -> None:
        real_c10d(self, device)
        self.asynchronous = False

    def make_reducer(transport: Any, control: Any, own: Any, use_inbox: bool, wire: Any = None) -> Any:
        return real_reducer(transport, control, own, False, wire)

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        path = str(Path(files.name, str(next(made))))
        tensor = map_file(path, numel)
        tensor.path, tensor.watch = path, watch  # type: ignore[attr-defined]
        return tensor

    def open_peers(
        control: Any, mesh: Any, layouts: Any, meshes: Any, wire: Any = None, share: float = 1.0
    ) -> SymmetricPeers | None:
        size_bytes = published_places(layouts, meshes)[1]
        if not size_bytes:
            return None
        return SymmetricPeers(mesh.gather[0], mesh.device, size_bytes, inbox_bytes(layouts, wire))

    @contextlib.contextmanager
    def disable_others() -> Iterator[None]:
        """What the runtime does is hidden from the user's modes."""
        with disable_modes(), watch:
            yield

    disable_modes = hooks._disable_current_modes
    real_mark, real_engine, real_c10d = lanes.Mark.__init__, Engine.__init__, C10d.__init__
    real_reducer, real_lanes = assemble.Reducer, lanes.Lanes
    with pytest.MonkeyPatch.context() as patch, files:
        patch.setattr(lanes, "torch", watch.cuda)
        patch.setattr(lanes, "_record", FakeEvent.record)
        patch.setattr(lanes, "_wait", FakeEvent.wait)
        patch.setattr(lanes.Mark, "__init__", mark)
        patch.setattr(lanes.StreamLane, "wait", lambda lane, mark: watch.wait(lane, mark))
        patch.setattr(slots, "running_stream", lambda device: watch.cuda.current)
        patch.setattr(assemble, "Lanes", lambda device: real_lanes(FakeDevice()))  # type: ignore[arg-type]
        patch.setattr(assemble, "Reducer", make_reducer)
        patch.setattr(Gatherer, "start", lambda gatherer, unit, slot: watch.gather(gatherer, unit, slot))
        patch.setattr(Engine, "__init__", begin_engine)
        patch.setattr(C10d, "__init__", begin_c10d)
        patch.setattr(torch.UntypedStorage, "resize_", resize)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: watch.keep(tensor, stream))
        patch.setattr(symmetric_memory, "empty", empty)
        patch.setattr(symmetric_memory, "rendezvous", WatchedFiles)
        patch.setattr(api, "open_peers", open_peers)
        patch.setattr(direct, "LEAST_PIECE_BYTES", 0)
        for module in (hooks, recompute):
            patch.setattr(module, "_disable_current_modes", disable_others)
        with watch:
            yield watch
        watch.flush()
