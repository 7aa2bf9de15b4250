"""What else works on the gradients of a sharded model: torch's DistributedDataParallel, and optimizers in the backward.

Around the model the wrapper averages the same gradients. Where ranks hold whole parameters, it takes them for its own
and no operation fails. Averages of averages are right; but in its `no_sync()`, which frameworks enter to accumulate,
and after it, each averages what the other has summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from lamina.core.past_the_forward import LEAVE_DDP_OUT
from lamina.errors import StateError
from lamina.runtime.unit import Unit


def refuse_averaging_twice(units: Sequence[Unit]) -> None:
    """Before a root forward: raise inside the forward of a wrapper that averages gradients of these units, too."""
    around = DistributedDataParallel._active_ddp_module  # type: ignore[attr-defined]
    if around is None or not torch.is_grad_enabled():
        return
    theirs = {id(param) for param in around._module_parameters}
    for unit in units:
        for param, spec in zip(unit.params, unit.layout.params, strict=True):
            if param.requires_grad and id(param) in theirs:
                raise StateError(
                    f"torch's DistributedDataParallel is around the sharded model and averages the gradient of "
                    f"`{spec.name}` once more. {LEAVE_DDP_OUT}"
                )


def refuse_steps_in_backward(units: Sequence[Unit]) -> None:
    """`_apply_optimizer_in_backward` of torch hangs on nodes that no backward of a shard runs, or before the mean."""
    for unit in units:
        for param, spec in zip(unit.params, unit.layout.params, strict=True):
            if hasattr(param, "_in_backward_optimizers"):
                raise StateError(
                    f"_apply_optimizer_in_backward gave `{spec.name}` an optimizer of its own, which would not see the "
                    "gradient averaged over ranks. Type `p.register_post_accumulate_grad_hook(...)`, and step in there"
                )
