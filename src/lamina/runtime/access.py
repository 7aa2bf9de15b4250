"""Full values outside compute: `gathered`, `sync`, and the runtime of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.core.control import finish
from lamina.core.shard_tensor import Shard
from lamina.core.uncompiled import uncompiled
from lamina.errors import StateError, UsageError
from lamina.runtime.agreement import checksum
from lamina.runtime.assemble import RUNTIMES, Runtime
from lamina.runtime.failed_backward import close_stale

LENT: set[int] = set()  # ids of the full tensors that stand in modules now, inside `gathered(module)`
_OTHER_PARAMETERS = (
    "Add and remove weight norms, other parametrizations and pruning before lamina.shard(), or in a plain copy that "
    "takes the `state_dict()` of the model inside gathered()"
)


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} is no model: pass the module that lamina.shard() returned")
    runtime = RUNTIMES.get(model)
    if runtime is None:
        wrapped = next((name for name, module in model.named_modules() if module in RUNTIMES), None)
        if wrapped is not None:
            raise StateError(
                f"this {type(model).__name__} is around the model that was sharded: pass its `{wrapped}`, which "
                "lamina.shard() returned"
            )
        if any(isinstance(param, Shard) for param in model.parameters()):
            raise StateError(
                f"this {type(model).__name__} is a copy of a sharded model that has not run yet, or a part of one: "
                "call the copy once, on every rank (its first forward makes its runtime), or pass the whole model"
            )
        raise StateError(
            f"this {type(model).__name__} is not sharded: call lamina.shard() on it first, and "
            "pass the module that it returned"
        )
    _refuse_half_changed(runtime)
    if runtime.engine.is_stale():
        runtime.engine.close_failed()
    return runtime


def runtimes_with(params: Sequence[Tensor]) -> list[Runtime]:
    """Runtimes that own any of the parameters."""
    wanted = {id(p) for p in params}
    found = [r for r in list(RUNTIMES.values()) if any(id(p) in wanted for unit in r.units for p in unit.params)]
    for runtime in found:
        _refuse_half_changed(runtime)
    return found


def _refuse_half_changed(runtime: Runtime) -> None:
    if runtime.refusal:
        raise StateError(runtime.refusal)


@uncompiled
def sync(model: nn.Module) -> None:
    """Tell lamina that parameters were written past it (raw memory, another library): the next forward gathers anew."""
    for unit in runtime_of(model).units:
        unit.dirty.mark()


@contextlib.contextmanager
@uncompiled
def gathered(target: nn.Module | Tensor | Sequence[Tensor], write: bool = False) -> Iterator[Any]:
    """Full values inside the block. Collective; may be nested.

    Args:
        target: a module: its parameters are plain full tensors (master dtype, detached) inside, and it is yielded. A
            `Shard`: its full tensor is yielded. A list of them: the list of full tensors, in order.
        write: keep edits. They must be the same on every rank, which is checked.

    Raises:
        StateError: values were edited without `write=True`, or differently on different ranks.
    """
    close_stale()
    if isinstance(target, nn.Module):
        with _module_gathered(target, write):
            yield target
        return
    single = isinstance(target, Tensor)
    if not isinstance(target, Iterable):
        raise UsageError(f"gathered() takes a module, a parameter or a list of parameters, not {type(target).__name__}")
    params: list[Tensor] = [target] if single else list(target)  # type: ignore[list-item]
    for param in params:
        if not isinstance(param, Tensor):
            kind = type(param).__name__
            raise UsageError(f"gathered() takes a module, a parameter or a list of parameters, not {kind}")
    fulls = [full_value(p) for p in params]
    yield fulls[0] if single else fulls
    _settle(params, fulls, write)


@contextlib.contextmanager
@uncompiled
def _module_gathered(module: nn.Module, write: bool) -> Iterator[None]:
    places = [
        (m._parameters, name, p)
        for m in module.modules()
        for name, p in m._parameters.items()
        if isinstance(p, nn.Parameter)
    ]
    buffers = [(m, frozenset(m._buffers)) for m in module.modules()]
    params = list({id(p): p for _, _, p in places}.values())
    fulls = {id(p): full_value(p) for p in params}
    lent = {id(full) for full in fulls.values()}
    LENT.update(lent)
    for parameters, name, p in places:
        parameters[name] = fulls[id(p)]  # type: ignore[assignment]
    try:
        yield
        replaced = [(d, n) for d, n, p in places if d.get(n) is not fulls[id(p)]]
        for parameters, name in replaced:
            how = "replaced" if name in parameters else "deleted"
            raise StateError(
                f"`{name}` was {how} inside gathered(): edit it in place, `p.copy_(new)`. {_OTHER_PARAMETERS}"
            )
        _refuse_buffers_for_parameters(module, buffers)
    finally:
        LENT.difference_update(lent)
        for parameters, name, p in places:
            parameters[name] = p
    _settle(params, [fulls[id(p)] for p in params], write)


def _refuse_buffers_for_parameters(module: nn.Module, before: Sequence[tuple[nn.Module, frozenset[str]]]) -> None:
    """Raise where values of parameters have become buffers, which no step would train.

    So does `remove_parametrizations`: the module that held the parameters goes, and what it computed stays.
    """
    names = {m: name for name, m in module.named_modules()}
    left = [m for m, _ in before if m not in names and any(True for _ in m.parameters())]
    if not left:
        return
    for owner, had in before:
        for key, buffer in owner._buffers.items():
            if owner in names and key not in had and buffer is not None and buffer.is_floating_point():
                place = f"{names[owner]}.{key}".lstrip(".")
                raise StateError(
                    f"`{place}` became a buffer inside gathered(), where a {type(left[0]).__name__} left the model "
                    f"with its parameters: it would not train. {_OTHER_PARAMETERS}"
                )


def full_value(param: Tensor) -> Tensor:
    """The full value in master dtype, detached; a copy. Collective for a `Shard`."""
    return param.full() if isinstance(param, Shard) else param.detach().clone()


def _settle(params: Sequence[Tensor], fulls: Sequence[Tensor], write: bool) -> None:
    """Write edits back, or make sure that there are none: each rank looks at its own range, all learn the result."""
    for param, full in zip(params, fulls, strict=True):
        name = param.name if isinstance(param, Shard) else "the parameter"
        if write:
            if isinstance(param, Shard):
                _check_same_everywhere(name, full, param)
        elif not _edited(param, full):
            continue
        if not _alike(param, full):
            raise StateError(
                f"`{name}` went into gathered() as {tuple(param.shape)} {param.dtype} and is {tuple(full.shape)} "
                f"{full.dtype} at its end: a sharded parameter keeps its shape and dtype. Resize and cast before "
                "lamina.shard()"
            )
        if not write:
            raise StateError(
                f"`{name}` was edited inside gathered() without write=True, so the edit would be lost: type "
                "gathered(..., write=True)"
            )
        with torch.no_grad():
            param.copy_(full)


def _alike(param: Tensor, full: Tensor) -> bool:
    """False where `full.data = ...` has brought another tensor."""
    return full.shape == param.shape and full.dtype == param.dtype


def _edited(param: Tensor, full: Tensor) -> bool:
    if not isinstance(param, Shard):
        return not _alike(param, full) or not torch.equal(_bits(param.detach()), _bits(full))
    same = _alike(param, full) and torch.equal(
        _bits(full.reshape(-1)[param.start : param.stop]), _bits(param.local.detach())
    )
    return _any_rank(param, not same)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _any_rank(param: Shard, flag: bool) -> bool:
    group = param.spec.group
    if group is None:
        return flag
    count = torch.tensor([int(flag)], dtype=torch.int32, device=param.device)
    work = torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=group, async_op=True)
    finish(work, count, f"leaves gathered(`{param.name}`)")
    return bool(count.item())


def _check_same_everywhere(name: str, full: Tensor, param: Shard) -> None:
    if param.spec.group is None:
        return
    here = checksum(full)
    bounds = torch.tensor([here, -here], dtype=torch.int64, device=param.device)
    maximum, group = torch.distributed.ReduceOp.MAX, param.spec.group
    work = torch.distributed.all_reduce(bounds, op=maximum, group=group, async_op=True)
    finish(work, bounds, f"leaves gathered(`{name}`, write=True)")
    if int(bounds[0]) != -int(bounds[1]):
        raise StateError(
            f"`{name}` was edited differently on different ranks inside gathered(write=True): make "
            "the same edit on every rank"
        )
