"""`capture()`: a whole training step as one CUDA graph.

Where a model is small for its GPU, the host cannot launch kernels as fast as they run. torch.cuda.graph records what a
function launches and launches it all at once, but leaves to its user everything that the function does on the host:
numbers are frozen into the kernels, streams must be forked and joined, inputs must stay where they were. Here a step of
a sharded model is recorded as it is, and what would be frozen silently is kept fresh or named.

Note [Frozen]
    1. Tensor arguments have memory of their own in the graph; a call copies into it. Other arguments must stay equal.
    2. The learning rate of `lamina.optim.AdamW` lies on the device and is copied there before each call. Everything
       else in the groups of an optimizer that stepped is compared before each call: a change is an error.
    3. The runtime's programs are walked once, while recording. Marks of other lanes made before or while recording mean
       nothing afterwards: all lanes are empty when a recording begins and when it has ended.
    4. Weights are cast in every call, for a graph cannot know whether they have changed; after a call they count as
       changed, for the host does not see the optimizer that ran in the graph.

Note [Graphs hold groups]
    NCCL does not let a communicator go while a graph that has recorded one of its collectives lives, and
    `destroy_process_group()`, with the captured step still in a variable, would wait for ever. The watch sees a rank
    that does not come back from there, and frees all graphs.

Note [Memory of a graph]
    What a graph takes has a pool of its own, which shares nothing with what eager steps have cached. torch gives that
    cache back to the device when a recording begins, as far as nothing lies in it. So the memory of gradients goes
    back before, or else it would stay where eager steps had it while the graph took as much anew. Room for gradients
    (core/room.py) is made in the graph's pool, for all of them, and none is for the eager steps. What an optimizer
    makes in its first step lasts: the cache goes back before, too, so that none of it comes to lie there and holds it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from lamina.core.teardown import on_teardown
from lamina.errors import StateError, UsageError
from lamina.optim.adamw import AdamW
from lamina.optim.whole_step import WholeStep
from lamina.runtime.assemble import RUNTIMES, Runtime
from lamina.runtime.engine import Engine
from lamina.runtime.publishing import PeerGatherer

EAGER_CALLS = 3
NOT_RECORDABLE = (
    "lamina.capture(): the step does something that cannot be recorded, such as reading a value from the device "
    "(.item(), print(loss), `if loss > x`) or bringing a tensor from the CPU. Move it out of the step"
)
_captured: weakref.WeakSet[Captured] = weakref.WeakSet()
RECORDS = "lamina.capture records steps"
NOT_COMPARED = ("params", "lr", "initial_lr", "param_names")  # of a group


def capture(step: Callable[..., Any]) -> Captured:
    """Record a training step as one CUDA graph.

    The first three calls run as they are; the fourth records and runs the graph, and all later ones run it. On a CPU
    every call runs as it is. Collective: all ranks call it alike.

    Args:
        step: forward, backward, clipping, optimizer step, `zero_grad`: what is the same at every call. It must not read
            a value from the device (`loss.item()`) nor set a learning rate: do both outside.

    Returns:
        A function with the arguments of `step`. Tensors among them must be on the GPU and keep their shape and dtype;
        other arguments must stay equal. Tensors that it returns are overwritten by the next call: clone what is kept.
        Its `release()` frees the graph and the memory that it holds.

    Raises:
        UsageError: an argument that a graph cannot take, an optimizer whose learning rate would be frozen, or a part of
            a step: gradients for an optimizer outside of it, or from a backward outside.
        StateError: something that is frozen in the graph was changed.
    """
    if not callable(step):
        raise UsageError(f"lamina.capture() takes a function, not a {type(step).__name__}")
    return Captured(step)


class Captured:
    """A step that becomes a graph. Made by `capture`."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self._lock = threading.RLock()  # of the graph: the watch's thread may release it
        self._forget()
        _captured.add(self)

    def _forget(self) -> None:
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self._optimizers: list[Optimizer] = []
        self._frozen: dict[Optimizer, list[dict[str, Any]]] = {}  # constants of their groups, as recorded
        self._runtimes: list[Runtime] = []  # whose models the step runs
        self._engines: list[Engine] = []  # that they had then
        self._held: list[list[Tensor]] = []  # what its kernels read and nobody else keeps
        self._inputs: list[Any] = []
        self._result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available() or not _on_gpus():
            return self.step(*args, **kwargs)
        self.calls += 1
        if self.graph is None:
            keep_masters_whole()
            _make_no_room()
        if self.graph is None and self.calls <= EAGER_CALLS:
            return self._run_eagerly(args, kwargs)
        if self._are_uneven():
            return self._run_beside(args, kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        with self._lock:
            if self.graph is None:
                self._record(leaves, form)
            else:
                self._check_arguments(leaves, form)
                self._check_frozen()
            self._replay(leaves)
            return self._result

    def release(self) -> None:
        """Free the graph and the memory that it holds, once it has run.

        Later calls begin anew: three run as they are, the fourth records. On a CPU nothing happens.
        """
        with self._lock:
            graph = self.graph
            if graph is not None:
                with torch.cuda.device(self._stream.device):
                    torch.cuda.synchronize()
                    graph.reset()
            self._forget()

    # ---- before there is a graph -------------------------------------------------------------------------------

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        """On the stream that will record: what torch binds to a stream at its first use is bound to that one."""
        if self.calls == 1:
            self._stream = torch.cuda.Stream()
        seen: dict[Optimizer, list[Any]] = {}

        def note(optimizer: Optimizer, *_: Any) -> None:
            whole.check_update(optimizer)
            if self.calls == 1:
                torch.cuda.empty_cache()
            seen.setdefault(optimizer, [group["lr"] for group in optimizer.param_groups])

        rates = {optimizer: [group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers}
        handle = register_optimizer_step_pre_hook(note)
        self._stream.wait_stream(torch.cuda.current_stream())
        watched = self.calls == EAGER_CALLS  # the last one before the recording, which an attempt would spoil
        mode = torch.cuda.get_sync_debug_mode()
        whole = WholeStep(_on_gpus())
        rehearsing = [o for o in self._optimizers if watched and isinstance(o, AdamW)]
        try:
            with torch.cuda.stream(self._stream):
                for optimizer in rehearsing:
                    optimizer.rehearse(True)
                torch.cuda.set_sync_debug_mode("error" if watched else mode)
                result = self.step(*args, **kwargs)
        except RuntimeError as error:
            if watched and "synchronizing CUDA operation" in str(error):
                raise StateError(NOT_RECORDABLE) from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            for optimizer in rehearsing:
                optimizer.rehearse(False)
            handle.remove()
            torch.cuda.current_stream().wait_stream(self._stream)
        whole.check_end()
        self._check_rates(rates, seen)
        self._optimizers, self._runtimes = list(seen), whole.ran()
        return result

    def _are_uneven(self) -> bool:
        """Some ranks have run out of data (`lamina.even`), and a graph holds the mean over all of them."""
        return any(r.engine.gradients.active_ranks != r.control.world for r in self._runtimes)

    def _run_beside(self, args: Any, kwargs: Any) -> Any:
        """As it is, between two runs of a graph."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self.step(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _check_rates(self, before: dict[Optimizer, list[Any]], seen: dict[Optimizer, list[Any]]) -> None:
        """A rate that the function sets would be set once, while recording."""
        for optimizer, rates in before.items():
            after = [group["lr"] for group in optimizer.param_groups]
            for number, (old, new, used) in enumerate(zip(rates, after, seen.get(optimizer, rates), strict=True)):
                changed = any(not isinstance(value, Tensor) and value != old for value in (new, used))
                if changed and not isinstance(old, Tensor):
                    raise UsageError(
                        f"lamina.capture(): the function sets the learning rate of group {number} of "
                        f"{type(optimizer).__name__} ({old} -> {new}), and a graph would keep the value of one call: "
                        "set it (or call scheduler.step()) before calling the captured step"
                    )

    # ---- recording ---------------------------------------------------------------------------------------------

    def _record(self, leaves: list[Any], form: pytree.TreeSpec) -> None:
        self._check_optimizers()
        self._form, self._inputs = form, [_own_memory(number, leaf) for number, leaf in enumerate(leaves)]
        for optimizer in self._optimizers:
            if isinstance(optimizer, AdamW):
                optimizer.hold_rates()
        runtimes = _on_gpus()
        whole = WholeStep(runtimes)
        torch.cuda.synchronize()
        for runtime in runtimes:
            _forget_lanes(runtime)
            _mark_changed(runtime)
            runtime.engine.gradients.give_back()
        args, kwargs = pytree.tree_unflatten(self._inputs, form)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        for runtime in runtimes:
            runtime.engine.lanes.is_recording = True
        try:
            # thread_local: NCCL's own threads look at their events meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                for runtime in self._runtimes:
                    runtime.engine.gradients.make_room(1.0)
                self._result = self.step(*args, **kwargs)
                self._runtimes = whole.ran()
                for runtime in self._runtimes:
                    runtime.engine.lanes.join()
        except Exception as error:
            _end_allocating(pool)
            if "captur" not in str(error):
                raise
            raise StateError(f"{NOT_RECORDABLE} (torch says: {_first_line(error)})") from error
        finally:
            for runtime in runtimes:
                runtime.engine.lanes.is_recording = False
                _forget_lanes(runtime)
        self._held = [o.end_recording() for o in self._optimizers if isinstance(o, AdamW)]
        self.graph = graph
        self._engines = [runtime.engine for runtime in self._runtimes]
        self._frozen = {optimizer: _constants(optimizer) for optimizer in self._optimizers}

    def _check_optimizers(self) -> None:
        for optimizer in self._optimizers:
            if isinstance(optimizer, AdamW):
                continue
            for number, group in enumerate(optimizer.param_groups):
                if not isinstance(group["lr"], Tensor) or not group.get("capturable", False):
                    raise UsageError(
                        f"lamina.capture(): group {number} of {type(optimizer).__name__} would keep its learning rate "
                        "of now for ever: use lamina.optim.AdamW, or build it with capturable=True and "
                        "lr=torch.tensor(..., device='cuda')"
                    )

    # ---- running -----------------------------------------------------------------------------------------------

    def _replay(self, leaves: list[Any]) -> None:
        assert self.graph is not None
        for runtime in self._runtimes:
            runtime.engine.lanes.join()  # evaluations, or steps that ran as they are, may have left something there
        with torch.no_grad():
            for own, given in zip(self._inputs, leaves, strict=True):
                if isinstance(own, Tensor):
                    own.copy_(given)
        for optimizer in self._optimizers:
            if isinstance(optimizer, AdamW):
                optimizer.refresh_rates()
        self.graph.replay()
        for runtime in self._runtimes:
            _mark_changed(runtime)

    def _check_arguments(self, leaves: list[Any], form: pytree.TreeSpec) -> None:
        if form != self._form:
            raise UsageError(f"the captured step was recorded with arguments {self._form}, and now gets {form}")
        for number, (own, given) in enumerate(zip(self._inputs, leaves, strict=True)):
            if isinstance(own, Tensor):
                if not isinstance(given, Tensor) or given.shape != own.shape or given.dtype is not own.dtype:
                    raise UsageError(
                        f"the captured step was recorded with {_describe(own)} as tensor {number}, and now gets "
                        f"{_describe(given)}: drop the last, smaller batch (drop_last=True), or make a captured step "
                        "for each shape"
                    )
            elif given != own:
                raise UsageError(
                    f"the captured step was recorded with {own!r} as argument {number}, and now gets {given!r}: pass "
                    "what changes as a tensor on the GPU"
                )

    def _check_frozen(self) -> None:
        for optimizer, constants in self._frozen.items():
            for number, (before, now) in enumerate(zip(constants, _constants(optimizer), strict=False)):
                for key in before:
                    if before[key] != now.get(key):
                        raise StateError(
                            f"`{key}` of group {number} of {type(optimizer).__name__} was changed from {before[key]!r} "
                            f"to {now.get(key)!r} after the step was captured, which holds the old one: capture it anew"
                        )
            if len(constants) != len(optimizer.param_groups):
                raise StateError("a group was added to an optimizer after the step was captured: capture it anew")
        for runtime, engine in zip(self._runtimes, self._engines, strict=True):
            if runtime.engine is not engine:
                raise StateError(
                    "lamina.adopt() gave the model further parameters after the step was captured, which holds none of "
                    "them: capture it anew"
                )
            for unit in engine.units:
                recorded = unit.requires
                unit.look()
                if unit.requires != recorded:
                    raise StateError(
                        f"requires_grad of a parameter of `{unit.name}` was changed after the step was captured: "
                        "capture it anew"
                    )


def _on_gpus() -> list[Runtime]:
    return [runtime for runtime in RUNTIMES.values() if runtime.device.type == "cuda"]


def _release_all() -> None:
    """Note [Graphs hold groups]."""
    for captured in list(_captured):
        captured.release()


def keep_masters_whole() -> None:
    """For good: between their two forms they come and go at the host's choice. Raises where halves were asked for."""
    for runtime in RUNTIMES.values():
        gatherer = runtime.engine.gatherer
        if gatherer.late_peers is not None:
            gatherer.late_peers.refusal = f"{RECORDS}, with whole masters"
        if isinstance(gatherer, PeerGatherer):
            gatherer.keep_whole(runtime.units, RECORDS)
        if any(unit.halved for unit in runtime.units):
            raise UsageError(
                "lamina.capture() does not record steps of a model with Precision(halves=True): leave halves out, or "
                "the capture"
            )


def _make_no_room() -> None:
    """Note [Memory of a graph]."""
    for runtime in RUNTIMES.values():
        runtime.engine.gradients.room_part = 0.0


def _own_memory(number: int, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_cuda:
        raise UsageError(
            f"lamina.capture(): tensor {number} of the arguments is on {leaf.device}, and a graph would read the "
            "memory of this call for ever: move it to the GPU first, `.to('cuda', non_blocking=True)`"
        )
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _end_allocating(pool: Any) -> None:
    """torch's allocator goes on recording when a recording fails, and the process would end at its next look."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _constants(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What a recording freezes of an optimizer's groups; tensors are read at every call."""
    return [
        {k: v for k, v in group.items() if k not in NOT_COMPARED and not isinstance(v, Tensor)}
        | {"number of parameters": len(group["params"]), "max_norm": getattr(optimizer, "max_norm", None)}
        for group in optimizer.param_groups
    ]


def _forget_lanes(runtime: Runtime) -> None:
    """Note [Frozen] 3. The device is idle, or the marks belong to a recording."""
    for unit in runtime.engine.units:
        unit.dirty.written = None
        for slot in unit.slots:
            slot.freed = slot.ready = None
    runtime.engine.gatherer.forget_marks()
    runtime.engine.reducer.forget_marks()


def _mark_changed(runtime: Runtime) -> None:
    for unit in runtime.engine.units:
        unit.dirty.mark()


on_teardown(_release_all)
