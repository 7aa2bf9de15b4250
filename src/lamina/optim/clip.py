"""The global norm of the gradients, and clipping by it, over flat ranges.

`torch.nn.utils.clip_grad_norm_` is right on `Shard`s, at the price of a list entry per parameter, and it cannot know
that a plain parameter is one part of a larger one (tensor parallelism beside `ddp`). Here neighbouring gradients are
one range, and every element counts once:

    spread over the shard group, over further axes, or both    summed over just these groups
    replicated (not sharded, or left alone)                    counted where it lies, without communication
    without a gradient                                         left out, though its range may hold old values

Ranks meet in one all-reduce for each group that gradients are spread over. The host never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lamina.core.control import finish
from lamina.core.forked import refuse_in_fork
from lamina.core.group_sets import refuse_destroyed
from lamina.core.shard_collectives import COUNTERS
from lamina.core.shard_optim import cut
from lamina.core.shard_tensor import Shard
from lamina.core.slots import DebugMode
from lamina.core.uncompiled import uncompiled
from lamina.errors import StateError, UsageError
from lamina.optim.places import Place, find_places, local_of
from lamina.runtime.parts import PARTS
from lamina.runtime.summing import HOST_PIECE_NUMEL
from lamina.runtime.unit import Unit
from lamina.runtime.unit_gradients import UnitGradients, clear_gaps

Groups = tuple[dist.ProcessGroup, ...]
_grad = attrgetter("grad")
_grad_dtype = attrgetter("grad.dtype")
_reach = attrgetter("spec.group", "spec.outer")


@dataclass
class Spread:
    """Gradients whose elements lie over the same groups."""

    groups: Groups
    members: list[int] = field(default_factory=list)  # numbers of the parameters
    ranges: list[Tensor] = field(default_factory=list)  # what lies here of all of them; no two overlap
    whole: list[UnitGradients] | None = field(default_factory=list)  # units that they are all of; None: not only such
    last: Place | None = None  # of the range that is being extended
    start: int = 0


@uncompiled
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`; returns the norm before that.

    Collective: every rank calls it with the same parameters. Semantics of `torch.nn.utils.clip_grad_norm_`.

    Args:
        parameters: a model, a parameter, or parameters. Those without a gradient do not count.
        max_norm: the largest norm that stays as it is.
        norm_type: 2, 1, 3, inf, or any other order; 0 counts the parameters whose gradient is not all zero.
        error_if_nonfinite: raise instead of scaling when the norm is inf or NaN. Makes the host wait.

    Returns:
        The norm: plain, 0-dim, float32 (float64 for float64 gradients), equal on all ranks.

    Raises:
        StateError: the norm is not finite and `error_if_nonfinite`; names the first parameters to blame.
    """
    order = _order(norm_type)
    if not isinstance(max_norm, (int, float, Tensor)):
        raise UsageError(f"clip_grad_norm_(max_norm={max_norm!r}): a number such as 1.0")
    params = _with_gradient(parameters)
    if not params:
        return torch.tensor(0.0)
    places = find_places(params)
    spreads = _spreads(params, places)
    total = _total_of_any_order(params, spreads, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise StateError(_blame(params, places, spreads, order, total))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    units = {place.unit.gradients for place in places if place is not None}
    for gradients in units:
        gradients.has_squares = False
    for (device, _), ranges in _by_device(spread.ranges for spread in spreads).items():
        torch._foreach_mul_(ranges, scale.to(device))
    clear_gaps(units, scale)
    return total


class Norm:
    """The global norm of order 2 of the same gradients, step after step: where they lie is looked up once."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        """Parameters with a gradient."""
        self._params = list(params)
        self._spreads = _spreads(self._params, find_places(self._params))
        self._dtype = _result_dtype(self._params) if self._params else torch.float32

    def meets_readers(self, unit: Unit) -> bool:
        """Whether all who read this rank's part of a unit take part in one sum: it ends when all have come to it."""
        group = unit.mesh.gather[0].pg
        if group is None:
            return False
        readers = set(dist.get_process_group_ranks(group))
        groups = {group for spread in self._spreads for group in spread.groups}
        return any(readers <= set(dist.get_process_group_ranks(group)) for group in groups)

    def total(self) -> Tensor:
        """0-dim, float32 (float64 for float64 gradients), equal on all ranks. Collective."""
        if not self._params:
            return torch.tensor(0.0)
        return _total(self._params[0].device, self._dtype, self._spreads)


def _order(norm_type: Any) -> float:
    try:
        return float(norm_type)
    except (TypeError, ValueError):
        raise UsageError(f"clip_grad_norm_(norm_type={norm_type!r}): a number such as 2.0, or float('inf')") from None


def _with_gradient(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    elif not isinstance(parameters, Iterable):
        raise UsageError(
            f"clip_grad_norm_() takes a model, a parameter or parameters, not a {type(parameters).__name__}"
        )
    params = []
    for param in {id(param): param for param in parameters}.values():
        if not isinstance(param, Tensor):
            raise UsageError(f"clip_grad_norm_(): {param!r} is among the parameters, and no tensor")
        grad = param.grad
        if grad is None:
            continue
        if type(param) is Shard and type(grad) is not Shard:
            param.grad = cut(grad, param)  # whole, from outside the forward
        params.append(param)
    return params


# -- ranges


def _spreads(params: Sequence[Tensor], places: Sequence[Place | None]) -> list[Spread]:
    """Gradients by the groups they lie over, neighbours as one range, in an order that is the same on every rank."""
    spreads: dict[Groups, Spread] = {}
    units: dict[int, list[int]] = {}  # parameters by unit, in the order in which they were given
    for number, place in enumerate(places):
        units.setdefault(-1 if place is None else id(place.unit), []).append(number)
    for key, members in units.items():
        if key == -1:
            for number in members:
                _enter(spreads, params[number], None, number)
            continue
        ordered = sorted([(place.position, number, place) for number in members if (place := places[number])])
        if not _enter_whole(spreads, params, ordered):
            for _, number, place in ordered:
                _enter(spreads, params[number], place, number)
    for spread in spreads.values():
        _close(spread)
        spread.ranges = [grad for grad in spread.ranges if grad.numel()]
    return list(spreads.values())


def _enter(spreads: dict[Groups, Spread], param: Tensor, place: Place | None, number: int) -> None:
    groups = _groups_of(param)
    spread = spreads.get(groups) or spreads.setdefault(groups, Spread(groups))
    spread.members.append(number)
    spread.whole = None
    if place is not None and _is_flat(param, place):
        _extend(spread, place)
    else:
        _close(spread)
        assert param.grad is not None
        spread.ranges.append(local_of(param.grad.detach()))


def _enter_whole(
    spreads: dict[Groups, Spread], params: Sequence[Tensor], ordered: Sequence[tuple[int, int, Place]]
) -> bool:
    """Enter all parameters of a unit at once, if all are here, flat, and spread alike: the usual case, no loop."""
    unit = ordered[0][2].unit
    members = [number for _, number, _ in ordered]
    if len(members) != len(unit.params) or len(unit.gradients.views) != len(members):
        return False
    if not all(map(is_, map(_grad, unit.params), unit.gradients.views)):
        return False
    if type(unit.params[0]) is not Shard or len(set(map(_reach, unit.params))) != 1:
        return False
    groups = _groups_of(unit.params[0])
    spread = spreads.get(groups) or spreads.setdefault(groups, Spread(groups))
    _close(spread)
    spread.members += members
    if spread.whole is not None:
        spread.whole.append(unit.gradients)
    at = 0
    for grad, segment in zip(unit.gradients.ranges, unit.layout.segments, strict=True):
        first, last = ordered[at][2], ordered[at + len(segment.params) - 1][2]
        spread.ranges.append(grad[first.start : last.stop])
        at += len(segment.params)
    return True


def _groups_of(param: Tensor) -> Groups:
    if isinstance(param, Shard):
        return param.spec.groups
    part = PARTS.get(param) if PARTS else None  # one part of a larger tensor
    return () if part is None else (part[0],)


def _is_flat(param: Tensor, place: Place) -> bool:
    gradients = place.unit.gradients
    if not gradients.views or param.grad is not gradients.views[place.position]:
        return False
    return type(param) is Shard or gradients.in_place([place.position])[0]


def _extend(spread: Spread, place: Place) -> None:
    if spread.last is None or not spread.last.is_followed_by(place):
        _close(spread)
        spread.start = place.start
    spread.last = place


def _close(spread: Spread) -> None:
    place = spread.last
    if place is not None:
        spread.ranges.append(place.unit.gradients.ranges[place.segment][spread.start : place.stop])
        spread.last = None


def _by_device(lists: Iterable[Sequence[Tensor]]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for ranges in lists:
        for grad in ranges:
            found.setdefault((grad.device, grad.dtype), []).append(grad)
    return found


# -- norms


def _total(device: torch.device, dtype: torch.dtype, spreads: Sequence[Spread], order: float = 2.0) -> Tensor:
    sums = torch.stack([_power_sum(spread, order, device) for spread in spreads])
    return _reduced(sums, spreads, dist.ReduceOp.SUM).sum().pow_(1.0 / order).to(dtype)


def _total_of_any_order(params: Sequence[Tensor], spreads: Sequence[Spread], order: float) -> Tensor:
    device, dtype = params[0].device, _result_dtype(params)
    if order > 0 and not math.isinf(order):
        return _total(device, dtype, spreads, order)
    if order == math.inf:
        return _largest(spreads, device).to(dtype)
    return _of_parameters(params, spreads, order, device).to(dtype)


def _result_dtype(params: Sequence[Tensor]) -> torch.dtype:
    dtypes = set(map(_grad_dtype, params))
    return torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32


def _power_sum(spread: Spread, order: float, device: torch.device) -> Tensor:
    """The sum of |x|^order over what lies here. 0-dim, float64."""
    squares = _noted_squares(spread) if order == 2.0 else None
    if squares is None or DebugMode.enabled:
        read = _read_power_sum(spread.ranges, order, device)
        if squares is not None:
            torch.testing.assert_close(squares.to(device), read, rtol=1e-4, atol=1e-30, equal_nan=True)
        return read
    return squares.to(device)


def _noted_squares(spread: Spread) -> Tensor | None:
    """The sum of the squares, as the reductions have noted it. 0-dim, float64; None: the gradients are to be read."""
    if not spread.whole:
        return None
    noted = [gradients.sums_of_squares() for gradients in spread.whole]
    if any(squares is None for squares in noted):
        return None
    return torch.cat([sums for squares in noted for sums in squares or ()]).sum(dtype=torch.float64)


def _read_power_sum(ranges: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    norms = []
    for (where, dtype), same in _by_device([ranges]).items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        pieces = same
        if where.type == "cpu" and not dtype.is_complex:
            wide, pieces = torch.float64, [piece for grad in same for piece in _pieces(grad)]
        norms.append(torch.stack(torch._foreach_norm(pieces, order, wide)).to(device, torch.float64))
    return torch.cat(norms).pow_(order).sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def _pieces(grad: Tensor) -> Sequence[Tensor]:
    return (grad,) if grad.numel() <= HOST_PIECE_NUMEL or grad.dim() != 1 else grad.split(HOST_PIECE_NUMEL)


def _largest(spreads: Sequence[Spread], device: torch.device) -> Tensor:
    """The largest magnitude, NaN if there is one anywhere. 0-dim, float64."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    here = []
    for spread in spreads:
        tops = [top for (_, _), same in _by_device([spread.ranges]).items() for top in _maxima(same)]
        here.append(torch.stack([zero, *(top.to(device, torch.float64) for top in tops)]).max())
    # backends compare a > b, in which a NaN wins or loses by the order of ranks: it travels beside the maximum
    values = torch.stack(here)
    is_nan = values.isnan()
    both = torch.stack([values.masked_fill(is_nan, 0.0), is_nan.double()], dim=1)
    largest, nan_somewhere = _reduced(both, spreads, dist.ReduceOp.MAX).max(dim=0).values.unbind()
    return largest.masked_fill(nan_somewhere > 0, math.nan)


def _maxima(ranges: Sequence[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(list(ranges), math.inf))


def _of_parameters(params: Sequence[Tensor], spreads: Sequence[Spread], order: float, device: torch.device) -> Tensor:
    """Orders at which zeros or the borders of parameters matter: one value a parameter, as torch defines them."""
    if order == -math.inf:
        magnitudes = _by_parameter(params, spreads, _smallest, dist.ReduceOp.MIN, device)
        return magnitudes.min()
    if order == 0:
        counts = _by_parameter(params, spreads, torch.count_nonzero, dist.ReduceOp.SUM, device)
        return torch.count_nonzero(counts).double()
    powers = _by_parameter(params, spreads, lambda g: g.abs().double().pow_(order).sum(), dist.ReduceOp.SUM, device)
    return powers.sum().pow_(1.0 / order)


def _smallest(grad: Tensor) -> Tensor:
    return grad.abs().double().min() if grad.numel() else grad.new_full((), math.inf, dtype=torch.float64)


def _by_parameter(
    params: Sequence[Tensor],
    spreads: Sequence[Spread],
    value: Callable[[Tensor], Tensor],
    op: dist.ReduceOp.RedOpType,
    device: torch.device,
) -> Tensor:
    """`value` of every parameter's local gradient, reduced. 1-D, float64, in the order of the spreads."""
    found = []
    for spread in spreads:
        grads = [params[number].grad for number in spread.members]
        values = torch.stack([value(local_of(grad)).to(device, torch.float64) for grad in grads if grad is not None])
        for group in spread.groups:
            _all_reduce(values, op, group)
        found.append(values)
    return torch.cat(found)


def _reduced(rows: Tensor, spreads: Sequence[Spread], op: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce row i over the groups of spread i, in place: one all-reduce a group for all rows that it concerns."""
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for row, spread in enumerate(spreads):
        for group in spread.groups:
            groups.setdefault(group, []).append(row)
    for group, concerned in groups.items():
        if len(concerned) == len(rows):
            _all_reduce(rows, op, group)
        else:
            part = torch.stack([rows[row] for row in concerned])
            _all_reduce(part, op, group)
            for row, value in zip(concerned, part, strict=True):
                rows[row].copy_(value)
    return rows


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        refuse_in_fork()
        refuse_destroyed(group)
        COUNTERS.all_reduces += 1
        finish(dist.all_reduce(values, op=op, group=group, async_op=True), values, "sums the gradients' norm")


# -- what to blame


def _blame(
    params: Sequence[Tensor], places: Sequence[Place | None], spreads: Sequence[Spread], order: float, total: Tensor
) -> str:
    """Names the parameters with elements that are not finite, the same on every rank. Collective."""
    device = total.device
    bad = _by_parameter(params, spreads, lambda grad: (~torch.isfinite(grad)).any().double(), dist.ReduceOp.MAX, device)
    numbers = sorted(
        number
        for number, flag in zip((n for spread in spreads for n in spread.members), bad.tolist(), strict=True)
        if flag
    )
    start = f"the gradients' norm of order {order:g} is {total.item():g}, so they cannot be clipped: "
    cure = ". Skip the step (`zero_grad()`), or look for the forward that made it; `error_if_nonfinite=False` goes on"
    if not numbers:
        return f"{start}all elements are finite, but their sum is too large for {total.dtype}{cure}"
    names = [_name(params[number], places[number], number) for number in numbers[:3]]
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"{start}inf or NaN in {', '.join(f'`{name}`' for name in names)}{more}{cure}"


def _name(param: Tensor, place: Place | None, number: int) -> str:
    if isinstance(param, Shard):
        return param.name
    return place.name if place is not None else f"parameter {number} of shape {tuple(param.shape)}"
