"""Scopes around forwards and backwards: `accumulate`, `keep`, `even`, and means over tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lamina.core.control import finish
from lamina.core.forked import refuse_in_fork
from lamina.core.group_sets import refuse_destroyed
from lamina.core.slots import DebugMode
from lamina.core.uncompiled import uncompiled
from lamina.errors import StateError, UsageError
from lamina.runtime.access import runtime_of, runtimes_with
from lamina.runtime.assemble import RUNTIMES, Runtime
from lamina.runtime.gradients import Share
from lamina.runtime.outside import TOKEN_MEAN
from lamina.runtime.tokens import divisor
from lamina.runtime.unit import Unit

Batch = TypeVar("Batch")


@contextlib.contextmanager
@uncompiled
def accumulate(model: nn.Module, last: bool, defer: bool = False) -> Iterator[None]:
    """One micro-batch of several: gradients are complete after the one with `last=True`.

    Args:
        last: whether this is the last micro-batch before the optimizer's step.
        defer: keep whole float32 sums on this rank (4 bytes a parameter) and reduce once, at the last micro-batch;
            otherwise every micro-batch is reduced into the gradient shards as far as the strategy splits gradients.
    """
    runtime = runtime_of(model)
    gradients = runtime.engine.gradients
    before = gradients.last_micro_batch, gradients.defer, gradients.accumulating
    gradients.last_micro_batch, gradients.defer, gradients.accumulating = bool(last), bool(defer), True
    gradients.tokens.scope += 1
    try:
        yield
    finally:
        gradients = runtime.engine.gradients  # another engine's, where one took over in the forward
        gradients.last_micro_batch, gradients.defer, gradients.accumulating = before


@contextlib.contextmanager
@uncompiled
def keep(target: nn.Module | Tensor | Sequence[nn.Module | Tensor]) -> Iterator[None]:
    """The units of `target` stay gathered inside, backward included; their gradients are reduced once, at the end.

    For losses computed in chunks, for gradient penalties and other second derivatives, for generation. Collective.

    Args:
        target: a sharded model, a part of one, a parameter, or a list of these. Whole units are kept.
    """
    if not isinstance(target, (nn.Module, Tensor, Iterable)):
        raise UsageError(f"keep() takes modules or parameters, not {type(target).__name__}")
    held = _units_of([target] if isinstance(target, (nn.Module, Tensor)) else list(target))
    for runtime, units in held:
        late_peers, engine = runtime.engine.gatherer.late_peers, runtime.engine
        if late_peers is not None and (engine.phase is None or engine.is_stale()):
            late_peers.look()  # inside, no engine takes over
        runtime.engine.keep(units)
    try:
        yield
    except BaseException:
        for runtime, units in held:
            runtime.engine.let_go(units, reduce=False)
        raise
    for runtime, units in held:
        runtime.engine.let_go(units, reduce=True)


def _units_of(targets: Sequence[nn.Module | Tensor]) -> list[tuple[Runtime, list[Unit]]]:
    params: list[Tensor] = []
    for target in targets:
        if not isinstance(target, (nn.Module, Tensor)):
            raise UsageError(f"keep() takes modules or parameters, not {type(target).__name__}")
        params += list(target.parameters()) if isinstance(target, nn.Module) else [target]
    wanted = {id(param) for param in params}
    found = []
    for runtime in runtimes_with(params):
        units = [u for u in runtime.engine.units if wanted & {id(p) for p in u.params}]
        found.append((runtime, units))
    if not found:
        raise StateError("keep(): nothing in the target is sharded: call lamina.shard() on the model first")
    return found


def debug(enabled: bool = True) -> None:
    """Give units memory of their own, fill it with NaN when it is freed, and check every transition of a slot.

    For models that are sharded afterwards.
    """
    DebugMode.enabled = enabled


@uncompiled
def total(count: Tensor | float) -> Tensor:
    """The sum of `count` over the data ranks, on every rank. Collective.

    With several micro-batches, give it the sum of their counts and pass the result to each `token_mean`.
    """
    runtime = _recent()
    device = torch.device("cpu") if runtime is None else runtime.device
    return sum_over_ranks(_count(count, device, "lamina.total"), "sums a count with lamina.total()")


def sum_over_ranks(values: Tensor, doing: str) -> Tensor:
    """The sums of `values`, of any shape and kind, over the data ranks. Collective.

    `doing`: what is said of a rank that waits in it.
    """
    values, runtime = values.clone(), _recent()
    if runtime is not None and runtime.mesh.sums is not None:
        refuse_in_fork()
        refuse_destroyed(runtime.mesh.sums)
        values = values.to(runtime.device, non_blocking=True)
        work = torch.distributed.all_reduce(values, group=runtime.mesh.sums, async_op=True)
        finish(work, values, doing)
    return values


@uncompiled
def token_mean(loss_sum: Tensor, token_count: Tensor | float, total: Tensor | float | None = None) -> Tensor:
    """The loss to call `backward()` on, so that gradients are those of the mean over all tokens of all ranks.

    A mean over this rank's tokens, averaged over ranks, weighs tokens of short batches more; this does not.

    Args:
        loss_sum: sum of the loss over this rank's tokens in this micro-batch, a scalar.
        token_count: how many tokens that is.
        total: tokens of all ranks and micro-batches of the step, from `lamina.total`. None: outside `accumulate` the
            counts are summed over ranks now; inside it, gradients are divided once, by the last micro-batch.

    Returns:
        A scalar that shows the mean over this rank's tokens and whose gradient has the global weight.
    """
    runtime = _recent()
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        what = f"shape {tuple(loss_sum.shape)}" if isinstance(loss_sum, Tensor) else f"a {type(loss_sum).__name__}"
        raise UsageError(
            f"lamina.token_mean() got {what} as its loss, wanted a scalar tensor: the sum over this rank's tokens "
            "(F.cross_entropy(..., reduction='sum'))"
        )
    count = _count(token_count, loss_sum.device, "lamina.token_mean")
    shown = loss_sum.detach() / divisor(count)
    gradients = None if runtime is None else runtime.engine.gradients
    if gradients is not None and not gradients.contributes:
        count = torch.zeros_like(count)
    if total is None and gradients is not None and gradients.accumulating:
        gradients.tokens.add(count, gradients.give_up)
        weight: Tensor | float = 1.0
    else:
        given = None if total is None else _count(total, loss_sum.device, "lamina.token_mean")
        everything = sum_over_ranks(count, "sums tokens in lamina.token_mean()") if given is None else given
        weight = (1 if gradients is None else gradients.active_ranks) / divisor(everything.to(loss_sum.dtype))
    weighted = loss_sum * weight
    result = weighted - weighted.detach() + shown.to(weighted.dtype)
    node: Any = result.grad_fn
    if node is not None:
        node.metadata[TOKEN_MEAN] = True
    return result


def _count(given: Tensor | float, device: torch.device, function: str) -> Tensor:
    """A number of tokens, or the sum of their weights, on the device; the host does not wait for it."""
    is_number = isinstance(given, (int, float)) or (isinstance(given, Tensor) and not given.is_complex())
    count = torch.as_tensor(given).detach() if is_number else torch.empty(0)
    if count.numel() != 1 or (count.device.type == "cpu" and not bool(count >= 0)):
        raise UsageError(f"{function}() got {given!r} as a count of tokens: wanted one number, 0 or more")
    if count.device.type == "cpu" and device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"{function}() got {given!r} in a step that is recorded, which would keep the number of this one call: "
                "give the function a tensor on the GPU as an argument, and pass that"
            )
        if not isinstance(given, Tensor):
            return torch.full((), given, dtype=count.dtype, device=device)
    return count.to(device, non_blocking=True)


def _recent() -> Runtime | None:
    """The sharded model whose micro-batch it is, or else that was made or ran a forward last in this process."""
    open_ones = [runtime for runtime in RUNTIMES.values() if runtime.engine.gradients.accumulating]
    return max(open_ones or RUNTIMES.values(), key=lambda r: r.engine.last_forward, default=None)


def even(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate a loader that may hold more batches on some ranks than on others.

    A rank that has run out goes on with its last batch at weight 0 until all have: gradients are means over the ranks
    that still have data. Collective: every rank iterates.

    Raises:
        UsageError: some rank's loader is empty, on every rank.
    """
    try:
        iterator = iter(loader)
    except TypeError:
        raise UsageError(f"lamina.even() takes a loader of batches, not a {type(loader).__name__}") from None
    runtime = _recent()
    if runtime is None:
        yield from iterator
        return
    batch, started = None, False
    try:
        while True:
            item: Any = next(iterator, _OVER)
            has = item is not _OVER
            flags = [row[0] for row in runtime.control.exchange([int(has)], "even")]
            if not started and not all(flags):
                empty = [rank for rank, flag in enumerate(flags) if not flag]
                raise UsageError(
                    f"lamina.even(): the loader of rank {empty[0]} is empty; every rank needs one batch at least"
                )
            if not any(flags):
                return
            started, batch = True, item if has else batch
            _share(Share(has, sum(flags), runtime.control.ranks))
            yield batch  # type: ignore[misc]
    finally:
        _share(None)


def _share(now: Share | None) -> None:
    """Of all models, and of those that are made before the next batch."""
    Share.now = now
    for runtime in list(RUNTIMES.values()):
        runtime.engine.gradients.take_share()


_OVER = object()
