"""Reductions of a `Shard` to one number: local, then one all-reduce; the result is plain and equal on all ranks.

Collective, all of them: every rank has to ask. A list (`_foreach_norm`, which `clip_grad_norm_` calls) costs one
all-reduce however long it is. Norms travel as float64 powers, so 16-bit gradients and large counts lose nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.core.shard_collectives import all_reduce_, all_reduce_max
from lamina.core.shard_losses import differentiable
from lamina.core.shard_ops import handles, lead_of, local_of, op_name, refuse, shards_in
from lamina.core.shard_spec import ShardSpec
from lamina.core.shard_tensor import Shard

_SUM, _MIN, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX

_dtype = attrgetter("dtype")
_reach = attrgetter("spec.group", "spec.outer", "local.device")  # over what a Shard's reductions go


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
    """An argument by its schema name, wherever it was passed."""
    if name in kwargs:
        return kwargs[name]
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[at] if at < len(args) else default
    return default


def _over_everything(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    """The operand, after making sure that the reduction is over no dim in particular or over all of them."""
    source = args[0]
    dims = _argument(func, args, kwargs, "dim")
    if dims is not None:
        dims = [dims] if isinstance(dims, int) else dims
        if len({dim % max(source.dim(), 1) for dim in dims}) not in (0, source.dim()) and source.dim():
            refuse(func, args, kwargs, "a reduction over some dims needs the elements of other ranks")
    if "out" in kwargs:
        refuse(func, args, kwargs, "the result is a plain tensor, which `out=` cannot name")
    return source


def _shaped(result: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return result.view((1,) * args[0].dim()) if _argument(func, args, kwargs, "keepdim", False) else result


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _total(local: Tensor, spec: ShardSpec, dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype]:
    """The sum over all pieces in an accumulating dtype, and the dtype that torch would return."""
    wanted = dtype or (local.dtype if local.dtype.is_floating_point or local.dtype.is_complex else torch.int64)
    return all_reduce_(local.sum(dtype=_accumulator(wanted)), _SUM, spec), wanted


@handles("sum", "nansum")
@differentiable
def total(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source = _over_everything(func, args, kwargs)
    local = source.local
    if op_name(func) == "nansum":
        local = local.masked_fill(local.isnan(), 0)
    result, wanted = _total(local, source.spec, kwargs.get("dtype"))
    return _shaped(result.to(wanted), func, args, kwargs)


@handles("mean")
@differentiable
def mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source = _over_everything(func, args, kwargs)
    dtype = kwargs.get("dtype") or source.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean(): `{source.name}` is {dtype}; as with plain tensors, give a floating dtype")
    result, wanted = _total(source.local, source.spec, dtype)
    return _shaped((result / source.spec.total_numel).to(wanted), func, args, kwargs)


@handles("count_nonzero")
def count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source = _over_everything(func, args, kwargs)
    return all_reduce_(torch.count_nonzero(source.local), _SUM, source.spec)


@handles("dot")
def inner_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Of vectors, as optimizers that estimate their own step size take it."""
    if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards_in(args)):
        refuse(func, args, kwargs, "a gradient through it is not offered; `(a * b).sum()` has one")
    func(*(torch.empty(arg.shape, dtype=arg.dtype, device="meta") for arg in args))  # torch's own errors
    spec = lead_of(args, kwargs).spec
    first, second = (local_of(arg, spec, func, args) for arg in args)
    result, wanted = _total(first * second, spec, first.dtype)
    return result.to(wanted)


# -- extremes


def _extreme(local: Tensor, is_max: bool) -> Tensor:
    """max or min of one piece, 0-dim; of no elements the value that never wins."""
    if local.numel():
        return local.max() if is_max else local.min()
    if local.dtype.is_floating_point:
        return local.new_full((), -math.inf if is_max else math.inf)
    if local.dtype is torch.bool:
        return local.new_full((), not is_max)
    bounds = torch.iinfo(local.dtype)
    return local.new_full((), bounds.min if is_max else bounds.max)


def _extremes(pieces: Sequence[Tensor], is_max: bool, spec: ShardSpec, floor: float | None = None) -> Tensor:
    """One extreme per piece, over all ranks. 1-D, dtype of the pieces. `floor`: the least that no elements give."""
    here = torch.stack([_extreme(piece, is_max) for piece in pieces])
    if floor is not None and is_max:
        here = here.clamp_min(floor)
    if here.dtype.is_floating_point:
        return all_reduce_max(here, spec) if is_max else -all_reduce_max(-here, spec)
    wide = all_reduce_(here.to(torch.int64), _MAX if is_max else _MIN, spec)
    return wide.to(here.dtype)


@handles("max", "min", "amax", "amin")
@differentiable
def extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if len(args) > 1 and op_name(func) in ("max", "min"):  # max(dim) returns indices too
        refuse(func, args, kwargs, "a reduction over some dims needs the elements of other ranks")
    source = _over_everything(func, args, kwargs)
    _need_elements(source, func)
    result = _extremes([source.local], op_name(func) in ("max", "amax"), source.spec)[0]
    return _shaped(result, func, args, kwargs)


def _need_elements(source: Shard, func: Any) -> None:
    if source.numel() == 0:
        raise RuntimeError(f"{op_name(func)}(): `{source.name}` has no elements and the operation has no identity")


@handles("aminmax")
@differentiable
def aminmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    source = _over_everything(func, args, kwargs)
    _need_elements(source, func)
    low = _extremes([source.local], False, source.spec)[0]
    high = _extremes([source.local], True, source.spec)[0]
    return _shaped(low, func, args, kwargs), _shaped(high, func, args, kwargs)


# -- truth


def _agreed(value: Tensor, op: dist.ReduceOp.RedOpType, spec: ShardSpec) -> Tensor:
    return all_reduce_(value.to(torch.int32), op, spec)


@handles("all", "any")
def truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source = _over_everything(func, args, kwargs)
    if op_name(func) == "all":
        result = _agreed(source.local.all(), _MIN, source.spec)
    else:
        result = _agreed(source.local.any(), _MAX, source.spec)
    wanted = torch.uint8 if source.dtype is torch.uint8 else torch.bool
    return _shaped(result.to(wanted), func, args, kwargs)


@handles("equal", "allclose")
def same_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    spec = lead_of(args, kwargs).spec
    if args[0].shape != args[1].shape and op_name(func) == "equal":
        return False
    here = func(*(local_of(arg, spec, func, ()) for arg in args[:2]), *args[2:], **kwargs)  # no graph records it
    return bool(_agreed(torch.tensor(here, device=args[0].device), _MIN, spec))


# -- norms


def _norms(pieces: Sequence[Tensor], order: float, spec: ShardSpec) -> Tensor:
    """The norm of each tensor of a list, with one all-reduce. 1-D, float64."""
    if math.isinf(order):
        magnitudes = [piece.abs() for piece in pieces]
        widest = magnitudes[0].dtype if len(set(map(_dtype, magnitudes))) == 1 else torch.float64
        return _extremes([m.to(widest) for m in magnitudes], order > 0, spec, floor=0.0).double()
    if order == 0:
        counts = torch.stack([torch.count_nonzero(piece) for piece in pieces])
        return all_reduce_(counts, _SUM, spec).double()
    powers = _local_norms(pieces, order).pow_(order)  # of no elements: 0 for every order
    return all_reduce_(powers, _SUM, spec).pow_(1.0 / order)


def _local_norms(pieces: Sequence[Tensor], order: float) -> Tensor:
    """Norms of this rank's pieces, of 16-bit ones computed in fp32. 1-D, float64."""
    filled = [piece for piece in pieces if piece.numel()]  # kernels differ about empty tensors
    dtypes = set(map(_dtype, filled))
    if len(dtypes) == 1 and len(filled) > 1:
        dtype = dtypes.pop()
        wide = _accumulator(dtype)
        norms = torch.stack(torch._foreach_norm(filled, order, None if wide is dtype else wide)).double()
    else:
        each = [torch.linalg.vector_norm(piece, order, dtype=_accumulator(piece.dtype)) for piece in filled]
        norms = torch.stack([norm.double() for norm in each]) if each else pieces[0].new_empty(0, dtype=torch.float64)
    if len(filled) == len(pieces):
        return norms
    every = norms.new_full((len(pieces),), 0.0 if order > 0 else math.inf)
    places = tuple([at for at, piece in enumerate(pieces) if piece.numel()])
    # a fake tensor of the compiler's must not meet a real one, nor be kept
    index_of = _kept_index if type(every) is Tensor else _index
    return every.index_copy_(0, index_of(places, every.device), norms)


def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(places, dtype=torch.int64, device=device)


# the same lists come at every step, and the host would wait for the GPU each time
_kept_index = functools.lru_cache(maxsize=64)(_index)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


@handles("linalg_vector_norm", "norm")
@differentiable
def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source = _over_everything(func, args, kwargs)
    order = _argument(func, args, kwargs, "ord", None)
    order = _argument(func, args, kwargs, "p", 2) if order is None else order
    dtype = _argument(func, args, kwargs, "dtype")
    local = source.local if dtype is None else source.local.to(dtype)
    result = _norms([local], 2.0 if order is None else float(order), source.spec)[0]
    return _shaped(result.to(_real(dtype or source.dtype)), func, args, kwargs)


def _buckets(entries: Sequence[Tensor]) -> list[list[int]]:
    """The places of a list, by where the entries lie: plain ones, and Shards by their groups and device.

    In the order of the list, which is the same on every rank, so that ranks meet in the same collectives.
    """
    if set(map(type, entries)) == {Shard} and len(set(map(_reach, entries))) == 1:  # the usual list, without a loop
        return [list(range(len(entries)))]
    buckets: dict[Any, list[int]] = {}
    for at, entry in enumerate(entries):
        buckets.setdefault(_reach(entry) if type(entry) is Shard else None, []).append(at)
    return list(buckets.values())


@handles("_foreach_norm.Scalar", "_foreach_powsum.Scalar")
@differentiable
def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The norms of 16-bit Shards come back in fp32: rounding each would spoil the total that clipping takes of them."""
    entries = args[0]
    order = float(_argument(func, args, kwargs, "ord", 2))
    dtype = _argument(func, args, kwargs, "dtype")
    results: list[Any] = [None] * len(entries)
    for places in _buckets(entries):
        bucket = [entries[at] for at in places]
        if type(bucket[0]) is not Shard:
            found = func(bucket, *args[1:], **kwargs)
        else:
            pieces = [entry.local if dtype is None else entry.local.to(dtype) for entry in bucket]
            norms = _norms(pieces, order, bucket[0].spec)
            if op_name(func) == "_foreach_powsum":
                norms = norms.pow_(order)
            found = _as_dtypes(norms, [dtype or _accumulator(piece.dtype) for piece in pieces])
        for at, value in zip(places, found, strict=True):
            results[at] = value
    return results


def _as_dtypes(values: Tensor, dtypes: Sequence[torch.dtype]) -> Sequence[Tensor]:
    if len(set(dtypes)) == 1:
        return values.to(_real(dtypes[0])).unbind()
    return [value.to(_real(dtype)) for value, dtype in zip(values.unbind(), dtypes, strict=True)]


@handles("_foreach_max")
def foreach_max(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if "out" in kwargs:
        refuse(func, args, kwargs, "`out=` lists of sharded tensors are not supported")
    return [entry.max() for entry in args[0]]


@handles("_amp_foreach_non_finite_check_and_unscale_")
def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler: an inf on one rank is found by all, whether or not they hold elements of that parameter."""
    grads, found_inf, inverse_scale = args
    pieces = [grad.local if type(grad) is Shard else grad for grad in grads]
    pieces = [piece for piece in pieces if piece.numel()]  # the kernel refuses empty tensors
    if pieces:
        func(pieces, found_inf, inverse_scale)
    spread = {_reach(grad): grad.spec for grad in grads if type(grad) is Shard}
    for spec in spread.values():
        all_reduce_(found_inf, _MAX, spec)
