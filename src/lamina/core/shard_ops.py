"""What every operation does on a `Shard`: the table, and the elementwise part of it.

torch offers the tag `pointwise`: an operation with it works on a flat range exactly as on the whole. That, plus a short
list of names, decides most operations; lists, reductions and random fills live in the neighbouring files. Whatever is
not found raises `ShardOpError`: there is no fallback that would compute something else.

Note [one range]. A handler may mix operands only after each was brought to the range of one spec: a Shard of the same
geometry gives its local elements, one that is cut differently is gathered and sliced (all ranks know both cuts, so all
do), a plain tensor is broadcast and sliced, a plain 0-dim tensor passes as it is. An in-place or `out=` operation
writes to Shards only. What a graph records is not gathered: its backward would be, too, at another moment on each rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from lamina.core import past_the_forward
from lamina.core.shard_collectives import gather_flat
from lamina.core.shard_losses import checksum_of
from lamina.core.shard_spec import ShardSpec
from lamina.core.shard_tensor import Handler, Shard
from lamina.errors import ShardOpError

INTO_PLAIN = (
    "it would write this rank's part into a plain tensor (to average weights copy the model after lamina.shard(): the "
    "copy is sharded, too)"
)
_NUMBERS = (float, int, bool)
_Handler = TypeVar("_Handler", bound=Handler)
BY_NAME: dict[str, Handler] = {}  # "op" or "op.overload" -> handler, filled by the @handles of four files

# Elementwise, though not every torch version tags all of their overloads so.
ELEMENTWISE = {
    *("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_", "clamp_", "clamp_min_", "clamp_max_", "pow_"),
    *("where", "zero_", "nan_to_num_", "abs_", "neg_", "sign_"),
    *("sqrt_", "ldexp_", "isnan", "isinf", "isfinite", "isclose", "complex"),
}
# Tagged pointwise and yet no function of one element: random, or a choice that all elements take part in.
NOT_ELEMENTWISE = {"rrelu", "rrelu_", "rrelu_with_noise", "native_dropout"}


def handles(*names: str) -> Callable[[_Handler], _Handler]:
    """Register a handler for operations, each named "op" (all overloads) or "op.overload"."""

    def keep(handler: _Handler) -> _Handler:
        for name in names:
            assert name not in BY_NAME, name
            BY_NAME[name] = handler
        return handler

    return keep


def op_name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def resolve(func: Any) -> Handler:
    """The handler of one overload; asked once per overload."""
    from lamina.core import shard_lists, shard_random, shard_reductions  # noqa: F401  # they fill BY_NAME

    name = op_name(func)
    found = BY_NAME.get(f"{name}.{func._schema.overload_name}") or BY_NAME.get(name)
    if found is not None:
        return found
    if name.startswith("_fused_") and name.endswith("_"):
        return shard_lists.fused
    if name.startswith("_foreach_") and _is_elementwise(name.removeprefix("_foreach_")):
        return shard_lists.foreach_in_place if name.endswith("_") else shard_lists.foreach
    if name not in NOT_ELEMENTWISE and (torch.Tag.pointwise in func.tags or name in ELEMENTWISE):
        written = [at for at, arg in enumerate(func._schema.arguments) if arg.alias_info and arg.alias_info.is_write]
        if not written:
            return elementwise
        if written == [0]:
            return in_place
        if len(written) == 1:
            return into_out
    return refuse


def _is_elementwise(name: str) -> bool:
    """Of what a list operation does to each entry; what torch adds, such as a reduction, is refused until handled."""
    overloads = getattr(torch.ops.aten, name, None)
    tagged = overloads is not None and any(
        torch.Tag.pointwise in getattr(overloads, each).tags for each in overloads.overloads()
    )
    return tagged or name in ELEMENTWISE or name in ("copy_", "clone", "maximum_", "minimum_")


# -- errors


def shards_in(values: Iterable[Any]) -> Iterable[Shard]:
    for value in values:
        if type(value) is Shard:
            yield value
        elif isinstance(value, list | tuple):
            yield from shards_in(value)


def lead_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    """The first Shard among the operands."""
    for arg in args:
        if type(arg) is Shard:
            return arg
    return next(iter(shards_in((*args, *kwargs.values()))))


def refuse(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "it needs the whole tensor"
) -> NoReturn:
    lead = lead_of(args, kwargs)
    in_a_loss = any(shard.requires_grad for shard in shards_in((*args, *kwargs.values())))
    cure = past_the_forward.cure_of(lead.name, sys._getframe(1)) or (
        "Call the module that owns it (inside its forward the parameter is whole), or use `with lamina.gathered(p) as "
        f"full:`, or `p.full()` (collective{_for_gradients(lead) if in_a_loss else ''})."
    )
    raise ShardOpError(f"`{op_name(func)}` cannot work on the sharded {lead.spec.describe()}: {why}. {cure}")


def _for_gradients(named: Shard | ShardSpec) -> str:
    """What to type instead of full values, which are detached, where a gradient is to reach the parameter."""
    if not torch.is_grad_enabled():
        return ""
    return f", without gradients; a loss outside the forward needs lamina.shard(..., replicate=[{named.name!r}])"


def _mismatch(func: Any, value: Tensor, spec: ShardSpec) -> NoReturn:
    got = value.spec.describe() if type(value) is Shard else f"a plain tensor of shape {tuple(value.shape)}"
    if type(value) is Shard and value.spec.detached:
        raise ShardOpError(
            f"`{op_name(func)}` got the sharded {spec.describe()} beside {got}, which comes out of a file of that "
            "rank's parts. Save whole models with `lamina.save` or `lamina.export` on every rank; or let each rank "
            "write, and later read, a file of its own"
        )
    cure = past_the_forward.cure_of(spec.name, sys._getframe(1)) or (
        f"Sharded operands must have one shape, in a loss be cut alike, and plain ones must broadcast to "
        f"{tuple(spec.shape)}. Work in the forward, or use `.full()` on both (collective{_for_gradients(spec)})."
    )
    raise ShardOpError(f"`{op_name(func)}` got the sharded {spec.describe()} beside {got}. {cure}")


# -- bringing operands to one range; see Note [one range]


def slice_of(value: Tensor, spec: ShardSpec, func: Any) -> Tensor:
    """The elements of a plain tensor that lie on `spec`'s range, after broadcasting. 1-D, a view where possible."""
    shape = spec.shape
    if value.dim() == 0 and shape:
        return value
    if value.shape != shape:
        try:
            value = value.expand(shape)
        except RuntimeError:
            _mismatch(func, value, spec)
    if spec.start == spec.stop:
        return value.new_empty(0)
    if value.is_contiguous() or not shape:
        return value.reshape(-1)[spec.start : spec.stop]
    row_numel = math.prod(shape[1:])  # copy only the rows that are touched, not the whole expanded tensor
    first = spec.start // row_numel
    rows = value[first : -(-spec.stop // row_numel)].reshape(-1)
    return rows[spec.start - first * row_numel : spec.stop - first * row_numel]


def local_of(value: Any, spec: ShardSpec, func: Any, operands: Iterable[Any] | None = None) -> Any:
    """The elements of a value on `spec`'s range. `operands`: all of the operation, if it only reads this value."""
    if type(value) is Shard:
        if value.geometry is not spec.geometry and not value.spec.same(spec):
            return _cut_anew(value, spec, func, operands)
        return value.local
    if isinstance(value, Tensor):
        return slice_of(value, spec, func)
    return value


def _cut_anew(value: Shard, spec: ShardSpec, func: Any, operands: Iterable[Any] | None) -> Tensor:
    """Of a Shard that is cut differently, such as the encoder that a momentum encoder follows. Collective."""
    in_backward = torch._C._current_graph_task_id() != -1
    if operands is None or value.shape != spec.shape or value.spec.detached or spec.detached or in_backward:
        _mismatch(func, value, spec)
    if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards_in(operands)):
        _mismatch(func, value, spec)
    return gather_flat(value.local, value.spec)[spec.start : spec.stop]


def locals_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: ShardSpec) -> tuple[list[Any], dict]:
    if kwargs:
        kwargs = {key: local_of(value, spec, func, args) for key, value in kwargs.items()}
    return [
        # the two usual operands without a call: for-loop optimizers come here twenty times a parameter
        arg.local
        if type(arg) is Shard and arg.geometry is spec.geometry
        else arg
        if type(arg) in _NUMBERS
        else local_of(arg, spec, func, args)
        for arg in args
    ], kwargs


def as_shard(result: Any, spec: ShardSpec) -> Any:
    """The local result of an operation (for some, such as frexp, several) as Shards."""
    if isinstance(result, Tensor):
        return Shard(result, spec)
    return tuple(Shard(item, spec) for item in result)


def mark(spec: ShardSpec) -> None:
    if spec.dirty is not None:
        spec.dirty.mark()


# -- elementwise


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else None
    spec = first.spec if type(first) is Shard else lead_of(args, kwargs).spec
    local_args, local_kwargs = locals_of(func, args, kwargs, spec)
    result = as_shard(func(*local_args, **local_kwargs), spec.derived)
    if torch.is_grad_enabled() and type(result) is Shard and any(shard.requires_grad for shard in shards_in(args)):
        result._mixed = checksum_of(spec, (*args, *kwargs.values()))
    return result


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if type(target) is not Shard:
        refuse(func, args, kwargs, INTO_PLAIN)
    local_args, kwargs = locals_of(func, args, kwargs, target.spec)
    func(*local_args, **kwargs)
    mark(target.spec)
    return target


def into_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = next(kwargs[arg.name] for arg in func._schema.arguments if arg.alias_info and arg.alias_info.is_write)
    if type(target) is not Shard:
        refuse(func, args, kwargs, "the tensor given as `out=` is plain")
    local_args, local_kwargs = locals_of(func, args, kwargs, target.spec)
    func(*local_args, **local_kwargs)
    mark(target.spec)
    return target


@handles("fill_", "fill", "masked_fill_", "masked_fill")
def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The last operand is one number for all elements, and stays one also where the parameter has no dim."""
    target, value, in_place = args[0], args[-1], op_name(func).endswith("_")
    if isinstance(value, Tensor) and (type(value) is Shard or value.dim()):
        refuse(func, args, kwargs, "the value has to be a number or a plain 0-dim tensor")
    if in_place and type(target) is not Shard:
        refuse(func, args, kwargs, INTO_PLAIN)
    spec = lead_of(args, kwargs).spec
    result = func(*(local_of(arg, spec, func, args) for arg in args[:-1]), value)
    if not in_place:
        return Shard(result, spec.derived)
    mark(spec)
    return target


@handles("copy_")
def copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if type(target) is not Shard:
        refuse(func, (source, target), kwargs, INTO_PLAIN)
    spec = target.spec
    target.local.copy_(local_of(source, spec, func, args), *args[2:], **kwargs)
    mark(spec)
    return target


@handles("index_put_")
def masked_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`p[mask] = number`, the one indexed write that needs no other elements."""
    target, indices, value = args[:3]
    index = indices[0] if len(indices) == 1 else None
    accumulates = len(args) > 3 and args[3]
    if type(target) is not Shard or index is None or value.dim() or accumulates:
        refuse(func, args, kwargs, "an indexed write reaches elements of other ranks")
    if target.numel() == 1 and index.dtype is torch.int64 and type(index) is not Shard:
        if index.numel():  # torch has turned the mask of a 0-dim tensor into the index 0, or into none
            target.local.fill_(value)
    elif index.dtype is torch.bool and index.shape == target.shape:
        func(target.local, [local_of(index, target.spec, func, args)], value)
    else:
        refuse(func, args, kwargs, "an indexed write reaches elements of other ranks")
    mark(target.spec)
    return target


# -- copies and views


def _alias(source: Shard, spec: ShardSpec) -> Shard:
    if torch.is_inference_mode_enabled():  # an inference tensor would refuse the version counter of its source
        with torch.inference_mode(False):
            return source.alias(spec)
    made = source.alias(spec)
    if source._mixed:
        made._mixed = source._mixed
    return made


@handles("detach", "alias", "lift_fresh")
def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    return _alias(args[0], args[0].spec)


@handles("view", "_unsafe_view", "reshape")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    """A row-major view of the same elements has the same flat range, whatever its shape or what its bits stand for."""
    source, shape = args[0], args[1]
    spec = source.spec
    if isinstance(shape, torch.dtype):
        if shape.itemsize != source.dtype.itemsize:
            refuse(func, args, kwargs, "a view as a dtype of another size has no flat range")
        return Shard(source.local.view(shape), spec.reshaped(spec.shape))
    shape = list(shape)
    if -1 in shape:
        shape[shape.index(-1)] = spec.numel // max(math.prod(length for length in shape if length != -1), 1)
    if math.prod(shape) != spec.numel:
        refuse(func, args, kwargs, f"its {spec.numel} elements do not have the shape {tuple(args[1])}")
    wanted = torch.Size(shape)
    return _alias(source, spec if wanted == spec.shape else spec.reshaped(wanted))


@handles("unsqueeze", "squeeze")
def view_with_ones(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    source = args[0]
    wanted = func(torch.empty(source.spec.shape, device="meta"), *args[1:], **kwargs).shape
    return _alias(source, source.spec.reshaped(wanted))


@handles("slice")
def everything(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    """`p[::n]` where n is 1, and other slices that leave nothing out; their backwards would know no Shards."""
    source = args[0]
    is_whole = func(torch.empty(source.spec.shape, device="meta"), *args[1:], **kwargs).shape == source.spec.shape
    if not is_whole or (torch.is_grad_enabled() and source.requires_grad):
        refuse(func, args, kwargs)
    return _alias(source, source.spec)


@handles("expand")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    source, shape = args[0], args[1]
    if len(shape) != source.dim() or any(new not in (-1, old) for new, old in zip(shape, source.shape, strict=True)):
        refuse(func, args, kwargs, "an expanded view has no flat range")
    return _alias(source, source.spec)


@handles("view_as_real", "view_as_complex")
def view_as_other_field(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    """Complex parameters: the optimizers of torch work on their real and imaginary parts."""
    source = args[0]
    spec = source.spec
    if op_name(func) == "view_as_real":
        return Shard(torch.view_as_real(source.local).view(-1), spec.stretched(torch.Size((*spec.shape, 2)), 2, 1))
    if not spec.shape or spec.shape[-1] != 2 or any(at % 2 for bounds in spec.ranges for at in bounds):
        refuse(func, args, kwargs, "its last dim is not a whole number of complex elements on every rank")
    return Shard(torch.view_as_complex(source.local.view(-1, 2)), spec.stretched(spec.shape[:-1], 1, 2))


@handles("clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like")
def like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard:
    source = args[0]
    if kwargs:
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return Shard(func(source.local, *args[1:], **kwargs), source.spec.derived)


@handles("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
def new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A plain tensor, except where checkpointing makes its staging copy: the own shape on a named device."""
    source = args[0]
    if (
        func is torch.ops.aten.new_empty.default
        and kwargs.get("device") is not None
        and tuple(args[1]) == tuple(source.shape)
    ):
        return Shard(source.local.new_empty(source.spec.local_numel, **kwargs), source.spec.derived)
    return func(source.local, *args[1:], **kwargs)


# -- questions about metadata


@handles("is_same_size")
def is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


@handles("is_pinned")
def is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(func(args[0].local, *args[1:], **kwargs))


@handles("_local_scalar_dense")
def item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`float(p)`, `bool(p)` of a tensor with one element. Collective."""
    return args[0].full().item()


@handles("record_stream")
def record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    func(args[0].local, *args[1:])
