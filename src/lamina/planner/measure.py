"""What a step of a model needs, found by running it without memory: products, bytes, activations, who lives when.

Formulas of activations fit the architecture they were written for. Here the model itself runs forward and backward on
meta (meta_run.py), with the units, dtypes and recomputation that `lamina.shard` would give it, and is watched: every
product is counted in the unit it belongs to, every saved tensor once by storage, and every storage from birth to death.
A full gradient lives until its unit's reduction has taken it, on GPUs until the next one begins, as in the runtime.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lamina.errors import LaminaError, UsageError
from lamina.planner import cannot_run
from lamina.planner.chunked import ChunkedLoss
from lamina.planner.fusion import FusedCount
from lamina.planner.measure_data import Event, Happens, Measured, Moment
from lamina.planner.meta_run import KernelsOf, LiveBytes, id_of, on_meta, tensors_in
from lamina.planner.products import MATRIX, PRODUCTS, WRITING_PRODUCTS, ProductCount, product_of
from lamina.planner.state import UnitShape
from lamina.planner.traffic import moved_bytes, runs_no_kernel
from lamina.planner.workload import UnitWork, Workload
from lamina.runtime.lookups import is_lookup
from lamina.runtime.precision import (
    Precision,
    cast_tree,
    is_kept,
    resolve_precision,
    spec_of,
    wide_dtype,
    wrap_kept_module,
)
from lamina.runtime.recompute import apply_recompute, check_recompute
from lamina.runtime.units import UnitPlan, plan_units

_aten: Any = torch.ops.aten
MOST_TOKENS = 1 << 40  # of a micro-batch: sizes in bytes stay numbers that torch can hold
MANY_OPERATIONS = 100_000  # of a forward and backward; 126 blocks have 30,000
Loss = Callable[[nn.Module, Mapping[str, Tensor] | Sequence[Tensor]], Tensor]


def measure(
    model: nn.Module,
    batch: int,
    seq: int,
    *,
    inputs: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
    loss: Loss | None = None,
    precision: str | Precision | None = None,
    recompute: str | int = "none",
    units: str | Sequence[Any] = "auto",
    kind: str = "cuda",
) -> Measured:
    """Run `model` forward and backward without memory.

    Args:
        model: on any device, meta included; it is copied, not changed.
        batch, seq: sequences of a micro-batch on one rank, and their length.
        inputs: keyword or positional inputs on any device; None: token numbers [batch, seq].
        loss: of the copy of the model and the inputs on meta; None: its own, or cross entropy of its logits.
        kind: whose kernels are meant, "cuda" or "cpu".

    Raises:
        UsageError: sizes that are not positive; a model that reads values and cannot run without them.
    """
    check_sizes(batch, seq)
    check_recompute(recompute)
    copied = on_meta(model)
    chosen = resolve_precision(precision)
    plans = plan_units(copied, units)  # type: ignore[arg-type]
    params = dict(copied.named_parameters())
    shapes = tuple(
        UnitShape(plan.title, tuple(spec_of(n, params[n], chosen) for n in plan.parameters), _encloses(plan, plans))
        for plan in plans
    )
    for shape in shapes:
        for spec in shape.params:
            params[spec.name].data = params[spec.name].data.to(spec.compute)
    _wrap(copied, plans, chosen, recompute)
    given = _inputs(copied, batch, seq) if inputs is None else _moved(inputs)
    watch = _Watch(copied, plans, kind)
    try:
        watch.run(given, loss or default_loss)
    except LaminaError:
        raise
    except Exception as problem:  # the model's own code runs here: it may raise whatever it likes
        place = (watch.place, watch.is_backward)
        raise UsageError(cannot_run.why(copied, *place, problem, given)) from problem
    works = tuple(watch.work_of(i, plan, shape) for i, (plan, shape) in enumerate(zip(plans, shapes, strict=True)))
    if isinstance(loss, ChunkedLoss):
        held = {f"{loss.head}.{name}" for name, _ in copied.get_submodule(loss.head).named_parameters()}
        works = tuple(
            replace(work, holds_head=bool(held & set(plan.parameters))) for work, plan in zip(works, plans, strict=True)
        )
    workload = Workload(type(model).__name__, works, batch, seq, watch.logits_bytes)
    input_bytes = sum(t.nbytes for t in tensors_in(given))
    return Measured(workload, shapes, tuple(watch.moments), input_bytes, kind, recompute, tuple(watch.settled_events()))


def run_backward(loss: Tensor) -> None:
    """Past torch's own entry, which takes the modes off: forwards that run again must choose the same kernels."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def check_sizes(batch: int, seq: int) -> None:
    for word, value in (("batch", batch), ("seq", seq)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{word}={value!r}: a positive number is wanted")
    if batch * seq > MOST_TOKENS:
        raise UsageError(
            f"batch={batch}, seq={seq}: more tokens than any run has; up to {MOST_TOKENS} can be asked for"
        )


def default_loss(model: nn.Module, inputs: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """The model's own loss if it gives one, else cross entropy of its logits in fp32, else the sum of its output."""
    result = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    own = getattr(result, "loss", None)
    if isinstance(own, Tensor):
        return own
    output = getattr(result, "logits", None)
    if output is None:
        output = result if isinstance(result, Tensor) else next(tensors_in(result), None)
    if not isinstance(output, Tensor):
        raise UsageError(cannot_run.no_loss(type(model).__name__, result))
    if output.dim() < 2:
        return output.sum()
    rows = output.flatten(0, -2)
    del result
    labels = torch.empty(rows.shape[0], dtype=torch.long, device=rows.device)
    return cross_entropy(rows if rows.dtype is torch.float64 else rows.float(), labels)


def _encloses(plan: UnitPlan, plans: Sequence[UnitPlan]) -> bool:
    """As the runtime says it (assemble.py): its window holds another unit's."""
    others = [m for other in plans if other is not plan for m in other.modules]
    return any(name == "" or any(inner.startswith(name + ".") for inner in others) for name in (plan.modules or ("",)))


def _cast(dtype: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    assert dtype is not None
    return cast_tree(args, dtype), cast_tree(kwargs, dtype)


def _wrap(model: nn.Module, plans: Sequence[UnitPlan], precision: Precision, recompute: str | int) -> None:
    """Wide modules, recomputation, and casts of what goes in and comes out, as `shard` wraps them."""
    modules = dict(model.named_modules())
    compute, output = precision.compute, precision.output
    for name in {"", *(n for plan in plans for n in plan.modules)} if compute is not None else ():
        modules[name].register_forward_pre_hook(functools.partial(_cast, compute), with_kwargs=True)
    if output is not None:
        model.register_forward_hook(lambda _, args, result: cast_tree(result, output))
    if precision.compute is not None:
        for prefix, module in modules.items():
            names = [f"{prefix}.{n}" if prefix else n for n, p in module._parameters.items() if p is not None]
            if names and all(is_kept(name, precision) for name in names):
                wrap_kept_module(module, wide_dtype(module, precision))
    blocks = [name for plan in plans if plan.is_block for name in plan.modules]
    apply_recompute(recompute, modules, blocks or [name for plan in plans for name in plan.modules if name])


def _inputs(model: nn.Module, batch: int, seq: int) -> dict[str, Any]:
    """Token numbers under the first name of the forward, and as labels under a second one that must be given."""
    accepted = inspect.signature(model.forward).parameters
    tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
    if "input_ids" in accepted:
        return {"input_ids": tokens} | ({"use_cache": False} if "use_cache" in accepted else {})
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [name for name, p in accepted.items() if p.default is p.empty and p.kind in kinds]
    return {name: torch.empty_like(tokens) for name in wanted[:2]}


def _moved(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {k: v.detach().to("meta") if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return [v.detach().to("meta") if isinstance(v, Tensor) else v for v in inputs]


@dataclass
class _UnitCount:
    fused: FusedCount
    products: ProductCount = field(default_factory=ProductCount)
    memory_bytes: int = 0
    kernels: int = 0
    backward_bytes: int = 0  # of everything that is no product
    backward_kernels: int = 0
    saved_bytes: int = 0
    output_bytes: int = 0
    missing: set[int] = field(default_factory=set)  # trainable parameters without a gradient so far
    held: list[Tensor] = field(default_factory=list)  # their full gradients


class _Watch(LiveBytes):
    """Runs the model once and counts."""

    def __init__(self, model: nn.Module, plans: Sequence[UnitPlan], kind: str) -> None:
        super().__init__(kind)
        self.model, self.plans = model, plans
        self.counts = [_UnitCount(FusedCount(self.number_of)) for _ in plans]
        self.moments: list[Moment] = []
        self.logits_bytes = self._seen = 0
        self.deepest = ""  # the module that was entered last, for messages
        roots = [i for i, p in enumerate(plans) if "" in p.modules]
        self._open = roots[:1] or [0]
        self._behind = self._open[0]  # the unit whose backward runs
        self._label, self._forward = "forward " + plans[self._open[0]].title, True
        self._reduced: list[int] = []
        self._previous: list[Tensor] = []  # gradients that the last reduction is copying
        self._late = roots[:1]  # units whose inputs no node has made: they end with the backward, in this order
        self._first_late = len(self._late)
        self._saved: dict[int, Tensor] = {}
        self._weights: set[int] = set()
        self._weights_kept = list(model.parameters()) + list(model.buffers())

    def run(self, inputs: Any, loss: Loss) -> None:
        self._weights = {id_of(t) for t in self._weights_kept} | {id_of(t) for t in tensors_in(inputs)}
        self._register()
        with KernelsOf(self.kind_of_device), torch.device("meta"), self:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed):
                value: object = loss(self.model, inputs)
            if not isinstance(value, Tensor):
                raise UsageError(f"loss= returned {type(value).__name__}, wanted a tensor")
            self._saved.clear()
            self._forward = False
            self._border("backward loss")
            if value.requires_grad:
                run_backward(value)
            elif any(count.missing for count in self.counts):
                raise UsageError(cannot_run.no_gradient(type(self.model).__name__))
            del value
            for index in self._late:
                if self.counts[index].held:
                    self._reduce(index)
            self._border("end")
        self._previous.clear()

    @property
    def is_backward(self) -> bool:
        return not self._forward

    @property
    def place(self) -> str:
        """Where the run is, for messages; empty where no unit has begun."""
        if self.is_backward:
            return "" if self._label == "backward loss" else self.plans[self._behind].title
        return self.deepest

    @property
    def kind_of_device(self) -> str:
        return "cuda" if self.rounding_bytes > 1 else "cpu"

    def work_of(self, index: int, plan: UnitPlan, shape: UnitShape) -> UnitWork:
        count = self.counts[index]
        has_blocks = any(p.is_block for p in self.plans)
        recomputed = [[m for m in p.modules if m and (p.is_block or not has_blocks)] for p in self.plans]
        return UnitWork(
            name=plan.title,
            trainable_numel=sum(s.numel for s in shape.params if s.trainable),
            frozen_numel=sum(s.numel for s in shape.params if not s.trainable),
            forward_products=count.products.result(),
            forward_memory_bytes=float(count.memory_bytes),
            kernel_count=count.kernels,
            backward_memory_bytes=float(count.backward_bytes),
            backward_kernel_count=count.backward_kernels,
            fused_memory_bytes=float(count.fused.memory_bytes),
            fused_kernel_count=count.fused.kernels,
            encloses=shape.encloses,
            recomputable=bool(recomputed[index]),
            block_index=sum(map(len, recomputed[:index])),
            blocks=max(1, len(recomputed[index])),
            saved_bytes=count.saved_bytes,
            output_bytes=count.output_bytes,
            is_lookup=[is_lookup(self.model.get_submodule(name)) for name in plan.modules] == [True],
            params=shape.params,
        )

    # ---- counting ----------------------------------------------------------------------------------------------

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any, made: bool) -> None:
        self._seen += 1
        if self._seen == MANY_OPERATIONS:
            warnings.warn(cannot_run.takes_long(type(self.model).__name__, self.place, self._seen), stacklevel=2)
        writes = func._schema.is_mutable and func.overloadpacket not in WRITING_PRODUCTS
        if made and not self._forward and func is _aten.add.Tensor and not torch.is_grad_enabled():
            self.note_sum(args[0], result)  # autograd's own: what runs forward again has gradients on
        if func in MATRIX:
            self.events.append(Event(Happens.PRODUCT, int(not self._forward)))
        if not (made or writes) or runs_no_kernel(func):
            return
        if not self._forward:
            if not torch.is_grad_enabled():  # what runs forward again is counted by the time of a forward
                self._saw_backward(func, args, kwargs, result)
            return
        count = self.counts[self._open[-1]]
        count.kernels += 1
        product = product_of(func, args, result)
        count.fused.saw(func, tensors_in((args, kwargs)), tensors_in(result), product is not None)
        if product is not None:
            count.products.add(product)
        else:
            count.memory_bytes += moved_bytes(func, args, kwargs, result)

    def _saw_backward(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = self.counts[self._behind]
        count.backward_kernels += 1
        if func not in PRODUCTS:
            count.backward_bytes += moved_bytes(func, args, kwargs, result)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = id_of(tensor)
        if key not in self._saved and key not in self._weights:
            self._saved[key] = tensor.detach()
            self.counts[self._open[-1]].saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def _border(self, label: str) -> None:
        """One stretch ends, another begins."""
        self.moments.append(Moment(self._label, self.begin_stretch(), tuple(self._reduced)))
        self._label = label

    # ---- borders -----------------------------------------------------------------------------------------------

    def _register(self) -> None:
        modules = dict(self.model.named_modules())
        for index, plan in enumerate(self.plans):
            for name in plan.modules:
                if name:
                    modules[name].register_forward_pre_hook(self._entering(index), with_kwargs=True)
                    modules[name].register_forward_hook(self._leaving(index))
            for name in plan.parameters:
                param = self.model.get_parameter(name)
                if param.requires_grad:
                    self.counts[index].missing.add(id(param))
                    param.register_post_accumulate_grad_hook(self._arrived(index))
        for name, module in modules.items():
            module.register_forward_pre_hook(self._naming(name))
        self.model.register_forward_hook(self._ended)

    def _naming(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any) -> None:
            self.deepest = name

        return note

    def _entering(self, index: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if index not in self._late and all(tensor.grad_fn is None for tensor in tensors_in((args, kwargs))):
                self._late.insert(self._first_late, index)  # what was used last begins its backward first
            self._open.append(index)
            self._border(f"forward {self.plans[index].title}")

        return enter

    def _leaving(self, index: int) -> Callable[..., None]:
        title = self.plans[index].title

        def begin(gradients: Any) -> None:
            self._behind = index
            self._border(f"backward {title}")

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._open.pop()
            outputs = list(tensors_in(output))
            self.counts[index].fused.left(outputs)
            self.counts[index].output_bytes += sum(t.nbytes for t in outputs)
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(begin)

        return leave

    def _ended(self, module: nn.Module, args: Any, output: Any) -> None:
        logits = getattr(output, "logits", output)
        self.logits_bytes = logits.nbytes if isinstance(logits, Tensor) and logits.dim() > 1 else 0
        self._border("loss")

    def _arrived(self, index: int) -> Callable[[Tensor], None]:
        def arrive(param: Tensor) -> None:
            count = self.counts[index]
            assert param.grad is not None
            number = self.number_of(param.grad)
            if number is not None:
                self.events.append(Event(Happens.GRADIENT, number))
            count.held.append(param.grad)
            param.grad = None
            count.missing.discard(id(param))
            if not count.missing and index not in self._late:
                self._reduce(index)

        return arrive

    def _reduce(self, index: int) -> None:
        """All gradients of a unit are there; those of the one before are copied by now."""
        count = self.counts[index]
        self._border(self._label)
        self._reduced.append(index)
        self.events.append(Event(Happens.REDUCE, index))
        self._previous = count.held if self.kind_of_device == "cuda" else []
        count.held = []
