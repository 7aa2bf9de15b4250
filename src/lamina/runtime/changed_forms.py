"""Parameters that lost the form that `shard()` gave them: cast, moved, or exchanged for a plain tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.core.layout import ParamSpec
from lamina.core.shard_tensor import Shard
from lamina.errors import ParameterChanged


def refuse_changed_forms(
    params: Sequence[Tensor], specs: Sequence[ParamSpec], device: torch.device, are_shards: bool
) -> None:
    for param, spec in zip(params, specs, strict=True):
        if are_shards and type(param) is not Shard:
            raise ParameterChanged(
                f"`{spec.name}` became a plain tensor after lamina.shard(), by torch.utils.swap_tensors, as where a "
                "weight with a parametrization is assigned. Assign it inside `with lamina.gathered(model, write=True):`"
            )
        if param.dtype is not spec.master:
            raise ParameterChanged(
                f"`{spec.name}` was cast from {spec.master} to {param.dtype} after lamina.shard(): cast the model "
                "before it, or use precision="
            )
        if param.device != device:
            raise ParameterChanged(
                f"`{spec.name}` was moved from {device} to {param.device} after lamina.shard(): move the model "
                "before it"
            )
