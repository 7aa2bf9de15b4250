"""Weights that hooks of torch compute before each forward: pruning, and weight and spectral norms of the older kind.

They lie in the module as plain tensors whose graph leads to the parameters. After a cast or a move parameters have new
nodes; that graph keeps the old ones alive, and with them the memory that is to be sharded.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def let_go_of_computed_weights(model: nn.Module) -> None:
    """Their values stay to be read; the next forward computes them anew."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                name = hook._tensor_name
            elif isinstance(hook, (SpectralNorm, WeightNorm)):
                name = hook.name
            else:
                continue
            computed = module.__dict__.get(name)
            if isinstance(computed, Tensor):
                module.__dict__[name] = computed.detach()
