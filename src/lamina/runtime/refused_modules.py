"""Modules that cannot be right on several ranks, known before anything is changed.

Most of what a forward may not do is seen when it does it. These two are not: a scripted module keeps its parameters in
C++, where nothing can be exchanged, and an embedding that renorms its rows writes each rank's own rows where every rank
holds a whole copy, which torch's `DistributedDataParallel` lets drift apart without a word.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.jit import ScriptModule

from lamina.errors import UsageError


def refuse_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ScriptModule) and next(module.parameters(), None) is not None:
            raise UsageError(
                f"`{name or type(model).__name__}` is a torch.jit module, whose parameters cannot be exchanged for "
                "gathered ones: shard the plain module (torch.compile, or compile=True, works on it), and script a "
                "plain copy for serving"
            )


def refuse_renorming(model: nn.Module, copied: Collection[str]) -> None:
    """`copied`: parameters of which several ranks hold and update whole copies, without gathering them."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            weight = f"{name}.weight" if name else "weight"
            if weight in copied:
                raise UsageError(
                    f"`{weight}` has max_norm={module.max_norm:g}: its forward changes the rows that this rank looks "
                    "up, and the ranks' copies would part. Leave max_norm out and renorm between steps (`with "
                    "torch.no_grad(): weight.copy_(torch.renorm(weight, 2, 0, max_norm))`)"
                )
