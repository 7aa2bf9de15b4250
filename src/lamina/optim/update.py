"""One call's update, by torch's fused kernel or, on GPUs where it fits, by ours (`adamw_kernel`)."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lamina.core.halves import PIECE_NUMEL
from lamina.optim.places import local_of
from lamina.runtime.unit_gradients import clear_gaps

if TYPE_CHECKING:
    from lamina.optim.adamw_kernel import Table
    from lamina.runtime.halved import HalvedMaster
    from lamina.runtime.unit import Unit


class Scaling(NamedTuple):
    """What a step does with all gradients before it takes them; each 0-dim, on any device, or None."""

    scale: Tensor | None  # they are divided by it
    found_inf: Tensor | None  # not 0: nothing is updated
    factor: Tensor | None  # they are multiplied by it


@dataclass
class Call:
    """One fused kernel: entry i of every list belongs to the same range. Empty ranges are left out."""

    group: int
    leads: bool = False  # for units that the next step gathers first
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    moments: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: list[Tensor] = field(default_factory=list)  # 0-dim
    published: list[Tensor] = field(default_factory=list)  # copies of `params` that peers read; none, or one each
    places: list[tuple[Unit, int, int, int]] = field(
        default_factory=list
    )  # unit, segment, start, stop; of the flat ones
    units: list[Unit] = field(default_factory=list)
    copies: list[list[Tensor]] = field(default_factory=list)  # by unit, its `published` when those above were found
    loose: list[tuple[int, Tensor]] = field(default_factory=list)  # entry, parameter: looked up at every step
    halved: list[tuple[int, HalvedMaster, int, int]] = field(
        default_factory=list
    )  # entry, master, start, stop; all flat ones or none
    table: Table | None = None  # for our own kernel


def published_of(call: Call) -> list[Tensor]:
    """The copies that peers read of what a call writes, one an entry; empty if there are not all of one dtype."""
    found = []
    for unit, segment, start, stop in call.places:
        if not unit.published or unit.published[segment].numel() != unit.masters[segment].numel():
            return []
        found.append(unit.published[segment][start:stop])
    is_all = len(found) == len(call.params) and len({copy.dtype for copy in found}) == 1
    return found if is_all else []


def is_same_place(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def real_of(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def gradient_for(grad: Tensor, param: Tensor) -> Tensor:
    """In the dtype and memory order of its parameter, which the kernel takes for granted."""
    grad = real_of(grad)
    if grad.dtype is param.dtype and grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)


def by_torch(call: Call, group: dict[str, Any], lr: float | Tensor, scaling: Scaling) -> None:
    """By torch's kernel."""
    for entry, param in call.loose:
        assert param.grad is not None
        call.params[entry] = real_of(local_of(param.detach()))
        call.grads[entry] = gradient_for(local_of(param.grad.detach()), call.params[entry])
    for entry, master, start, stop in call.halved:
        call.params[entry] = master.make_whole()[start:stop]
    _scale(call, scaling)
    _run_torchs(call.params, call.grads, call.moments, call.steps, group, lr, scaling)
    for entry, _ in call.loose:  # nothing of a step is kept: see Note [gradient views]
        call.params[entry] = call.grads[entry] = call.steps[entry]
    for entry, _, _, _ in call.halved:  # what is kept is held: see Note [Halved masters] 3
        call.params[entry] = call.moments["exp_avg"][entry]


def by_torch_in_halves(call: Call, group: dict[str, Any], lr: float | Tensor, scaling: Scaling) -> None:
    """By torch's kernel, piece after piece; what peers read is written, too."""
    _scale(call, scaling)
    for entry, master, start, stop in call.halved:
        numel = PIECE_NUMEL.get(call.params[entry].device.type, PIECE_NUMEL["cuda"])
        for begin in range(start, stop, numel):
            end = min(begin + numel, stop)
            here = slice(begin - start, end - start)
            numbers = master.read(begin, end)
            moments = {key: [values[entry][here]] for key, values in call.moments.items()}
            _run_torchs([numbers], [call.grads[entry][here]], moments, [call.steps[entry]], group, lr, scaling)
            master.write(begin, numbers)


def _scale(call: Call, scaling: Scaling) -> None:
    if scaling.factor is not None:
        torch._foreach_mul_(call.grads, scaling.factor.to(call.grads[0].device, non_blocking=True))
        clear_gaps({unit.gradients for unit, *_ in call.places}, scaling.factor)


def _run_torchs(
    params: list[Tensor],
    grads: list[Tensor],
    moments: dict[str, list[Tensor]],
    steps: list[Tensor],
    group: dict[str, Any],
    lr: float | Tensor,
    scaling: Scaling,
) -> None:
    device = params[0].device
    scale, found_inf, _ = scaling
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.to(device, non_blocking=True)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        params,
        grads,
        moments["exp_avg"],
        moments["exp_avg_sq"],
        moments.get("max_exp_avg_sq", []),
        steps,
        amsgrad=bool(group["amsgrad"]),
        lr=lr,
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None if scale is None else scale.to(device, non_blocking=True),
        found_inf=None if found_inf is None else found_inf.to(device, non_blocking=True),
    )


def by_own_kernel(
    call: Call, group: dict[str, Any], lr: float | Tensor, scaling: Scaling, publishes: bool = False
) -> bool:
    """By our kernel, on a GPU, for ranges of float32 at fixed places; whether it could.

    `publishes`: write `call.published`, too.
    """
    scale, found_inf, factor = scaling
    device = call.params[0].device
    if device.type != "cuda" or call.loose or group["amsgrad"] or call.params[0].dtype is not torch.float32:
        return False
    kernel = _own_kernel()
    if kernel is None or (call.halved and not publishes):
        return False
    if call.table is None:
        remainders = [master.remainders[start:stop] for _, master, start, stop in call.halved]
        columns = (call.params, call.grads, call.moments["exp_avg"], call.moments["exp_avg_sq"], call.steps)
        call.table = kernel.Table(columns, call.published, remainders)
    if scale is not None:
        scale = scale.to(device, non_blocking=True).reciprocal()
        factor = scale if factor is None else factor.to(device, non_blocking=True) * scale
    beta1, beta2 = group["betas"]
    kernel.launch(
        call.table,
        lr,
        None if factor is None else factor.to(device, non_blocking=True),
        None if found_inf is None else found_inf.to(device, non_blocking=True),
        (float(beta1), float(beta2)),
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group["maximize"]),
        publishes,
    )
    return True


@functools.cache
def _own_kernel() -> Any:
    """The module of our kernel; None where Triton is missing or cannot compile."""
    try:
        from lamina.optim import adamw_kernel

        numel = adamw_kernel.CHUNK_BLOCKS * adamw_kernel.BLOCK + 4  # more than one row of the table
        param, grad, mean, square = torch.full((4, numel), 0.5, device="cuda").unbind()
        step = torch.ones((), device="cuda")
        published = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
        table = adamw_kernel.Table([[param], [grad], [mean], [square], [step]], [published])
        adamw_kernel.launch(table, 0.1, None, None, (0.9, 0.99), 1e-8, 0.0, False, True)
        wanted = 0.5 - 0.1 * (0.5 / 0.1) / ((0.4975 / 0.01) ** 0.5 + 1e-8)
        works = torch.allclose(param, torch.full_like(param, wanted), rtol=1e-5)
        works = works and torch.equal(published, param.to(torch.bfloat16))
    except Exception as error:  # a compiler is missing, or any of the many ways in which one fails
        warnings.warn(f"lamina.optim.AdamW takes torch's kernel, for Triton does not work here: {error}", stacklevel=2)
        return None
    return adamw_kernel if works else None
