"""A model without memory that runs as it would on a device: kernels chosen as there, bytes counted, nothing computed.

torch can run a model on fake tensors, but a fake GPU needs a torch built for one, and tensors on meta take the slow
paths of attention and normalisation, which save other tensors than the kernels that will really run. Here a copy of
the model lies on meta, those two operations are sent to the kernels of the wanted device, and `LiveBytes` follows the
birth and the death of every storage: what an allocator would have handed out at each moment, of all ranks' one.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamina.errors import UsageError
from lamina.planner.known_values import KnownValues
from lamina.planner.measure_data import Event, Happens

_aten: Any = torch.ops.aten
CUDA_BLOCK_BYTES = 512  # what the caching allocator rounds to
FLASH_WIDTH = 256  # of a head, the widest that flash attention takes
UNSORTED_INDICES = 3072  # up to which an embedding's backward adds its rows without sorting them
FLASH = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters, buffers and other tensors lie on meta; ties stay ties. No memory is taken.

    Raises `UsageError` for lazy parameters, modules of torch.jit, and attributes that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"`{name}` of this {type(model).__name__}" if name else "this model"
            raise UsageError(
                f"{what} is compiled by torch.jit, and cannot be looked into: give the module it was made of"
            )
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise UsageError(f"{name} of this {type(model).__name__} is lazy and has no shape yet: run the model once")
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    for module in model.modules():
        for value in [*module._buffers.values(), *vars(module).values()]:
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().to("meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as problem:  # whatever an attribute of the model's own raises
        culprit = _not_copied(model, memo)
        raise UsageError(
            f"{type(model).__name__} cannot be copied to be tried without memory: {culprit}{type(problem).__name__}: "
            f"{str(problem).splitlines()[0] if str(problem) else 'no words'}. Set it after planning, or give the "
            "class a __deepcopy__"
        ) from None


def _not_copied(model: nn.Module, memo: dict[int, Any]) -> str:
    """The attribute that a copy of the model fails at; empty if it is none of a module's own."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                return f"`{prefix}.{name}`: " if prefix else f"`{name}`: "
    return ""


class KernelsOf(TorchFunctionMode):
    """Attention and normalisation by the kernels of a kind of device, "cuda" or "cpu"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__contains__:
            return _is_among(*args)
        if func in (torch.bincount, Tensor.bincount):
            return _rows_of_each(func, *args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func in (F.rms_norm, torch.rms_norm) and self.kind == "cuda":
            return self._rms_norm(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.expand(*query.shape[:-2], query.shape[-2], key.shape[-2])
        alike = query.shape[-1] == value.shape[-1]  # heads of one width
        if self.kind == "cpu":
            if not alike:
                more = {"scale": scale, "enable_gqa": enable_gqa}
                return _aten._scaled_dot_product_attention_math(
                    query, key, value, attn_mask, dropout_p, is_causal, **more
                )[0]
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        if attn_mask is None and query.dtype.itemsize == 2 and alike and query.shape[-1] <= FLASH_WIDTH:
            return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]

    def _rms_norm(
        self,
        func: Any,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        """As torch chooses it (aten/src/ATen/native/layer_norm.cpp): one kernel, with or without weights, unless these
        are of another dtype, or numbers are complex."""
        if (weight is not None and weight.dtype is not input.dtype) or input.is_complex():
            return func(input, normalized_shape, weight, eps)
        if tuple(input.shape[-len(normalized_shape) :]) != tuple(normalized_shape):
            return func(input, normalized_shape, weight, eps)  # which says what is wrong
        return _FusedNorm.apply(input, weight, len(normalized_shape))


def _rows_of_each(func: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How many rows each expert gets is a value, how many experts there are is not; torch has no rule for it."""
    if not input.is_meta or minlength < 1:
        return func(input, weights, minlength)
    wide = torch.int64 if weights is None else weights.dtype if weights.is_floating_point() else torch.float64
    return torch.empty(minlength, dtype=wide, device=input.device)


def _is_among(values: Tensor, element: Any) -> bool:
    """Models look for padding among the tokens, to warn of it. Tokens have no values here: there is none."""
    try:
        return bool((values == element).any())
    except RuntimeError:
        return False


class _FusedNorm(torch.autograd.Function):
    """What the GPU's kernel for rms_norm takes, moves and saves; on meta, torch would take it apart."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        """`dims`: at the end, that are normalised together."""
        rows = input.shape[: input.dim() - dims]
        wide = torch.promote_types(input.dtype, torch.float32)
        scale = torch.empty((*rows, *[1] * dims), dtype=wide, device=input.device)
        ctx.save_for_backward(input, weight, scale)
        ctx.rows = len(rows)
        return torch.neg(input.contiguous())  # one pass to read, one to write; the kernel wants plain rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        result = torch.mul(gradient, input.contiguous())
        if weight is None or not ctx.needs_input_grad[1]:
            return result, None, None
        of_rows = gradient.flatten(0, ctx.rows - 1) if ctx.rows else gradient[None]
        return result, of_rows.sum(0).to(weight.dtype), None


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that are alive and were made under this mode, and their largest sum in each stretch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rounding_bytes = CUDA_BLOCK_BYTES if kind == "cuda" else 1
        self.live_bytes = 0
        self.peak_bytes = 0  # since the last `begin_stretch`
        self.values = KnownValues()
        self.events: list[Event] = []  # births and deaths in order
        self._alive: dict[int, tuple[weakref.ref, int, int]] = {}  # by storage: its bytes, its number among births
        self._born = 0
        self._sums: dict[int, int] = {}  # sum of two gradients: the first of them

    def begin_stretch(self) -> int:
        """The peak of the stretch that ends here."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self.values.read(func, args)
        if known is not None:
            return known
        result = func(*args, **kwargs)
        self.values.note(func, args, kwargs, result)
        before = {id_of(t) for t in tensors_in((args, kwargs))}
        made = [t for t in tensors_in(result) if id_of(t) not in before]
        for tensor in made:
            self._follow(tensor)
        scratch = scratch_bytes(func, args)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + sum(scratch))
        numbers = [self._note_birth(size_bytes) for size_bytes in scratch]
        self.events += [Event(Happens.GIVE, number) for number in numbers[::-1]]
        self.saw(func, args, kwargs, result, bool(made))
        return result

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any, made: bool) -> None:
        """For whoever counts operations; `made`: the result is no view and no input."""

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size_bytes = -(-storage.nbytes() // self.rounding_bytes) * self.rounding_bytes
        number = self._note_birth(storage.nbytes())
        self._alive[key] = weakref.ref(storage, functools.partial(self._forget, key)), size_bytes, number
        self.live_bytes += size_bytes

    def _forget(self, key: int, reference: Any) -> None:
        _, size_bytes, number = self._alive.pop(key)
        self.live_bytes -= size_bytes
        self.events.append(Event(Happens.GIVE, number))

    def _note_birth(self, size_bytes: int) -> int:
        number, self._born = self._born, self._born + 1
        self.events.append(Event(Happens.TAKE, number, size_bytes))
        return number

    def number_of(self, tensor: Tensor) -> int | None:
        """Of its storage among births; None: it is older than this mode."""
        found = self._alive.get(id_of(tensor))
        return None if found is None else found[2]

    def note_sum(self, left: Any, result: Tensor) -> None:
        """Two gradients of one tensor were added: into the first, if nobody else has it. Under a mode, torch never does
        (can_accumulate_inplace of torch/csrc/autograd/input_buffer.cpp), so whether it would is found out afterwards.
        """
        first, sum_ = self.number_of(left), self.number_of(result)
        if first is not None and sum_ is not None and not left._is_view():
            self._sums[sum_] = first

    def settled_events(self) -> Iterator[Event]:
        """The events with sums in place: those whose first gradient is gone before anything else is born."""
        same: dict[int, int] = {}
        over: set[int] = set()  # gradients that have become their sum
        for at, event in enumerate(self.events):
            first = self._sums.get(event.number) if event.what is Happens.TAKE else None
            if first is not None and self._goes_next(at, first):
                same[event.number] = same.get(first, first)
                over.add(first)
            elif event.what is Happens.GIVE and event.number in over:
                continue
            elif event.what in (Happens.TAKE, Happens.GIVE, Happens.GRADIENT):
                yield event._replace(number=same.get(event.number, event.number))
            else:
                yield event

    def _goes_next(self, at: int, number: int) -> bool:
        for event in itertools.islice(self.events, at + 1, None):
            if event.what is Happens.TAKE:
                return False
            if event == (Happens.GIVE, number, 0):
                return True
        return False


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def id_of(tensor: Tensor) -> int:
    """Of its storage: views have their base's."""
    return tensor.untyped_storage()._cdata


def scratch_bytes(func: Any, args: Any) -> list[int]:
    """What a GPU's kernel takes for itself beside its results, in order; what is too small to matter is left out."""
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        return _attention_backward_bytes(*args[1:3])
    if func is _aten.embedding_dense_backward.default:
        return _embedding_backward_bytes(*args[:2])
    return []


def _attention_backward_bytes(query: Tensor, key: Tensor) -> list[int]:
    """Row sums, fp32 sums of dQ, and dK, dV of every query head, in one piece: the workspace of cuDNN, whose attention
    torch 2.11 takes on Hopper. Flash attention, on older cards, takes them one by one.
    """
    batch, heads, length, width = query.shape
    rows = batch * heads * -(-length // 128) * 128
    spread = query.element_size() * batch * heads * key.shape[2] * width if heads != key.shape[1] else 0
    return [rows * 4 + rows * -(-width // 32) * 32 * 4 + 2 * spread]


def _embedding_backward_bytes(gradient: Tensor, indices: Tensor) -> list[int]:
    """Sorted indices and their places, and an fp32 row for each (ATen/native/cuda/EmbeddingBackwardKernel.cu)."""
    if indices.numel() <= UNSORTED_INDICES:
        return []
    return [8 * indices.numel()] * 6 + [4 * indices.numel() * gradient.shape[-1]]
