"""Values of the few tensors on meta that no input decides: positions, masks made of them, constants.

Models look at such tensors ("is this one packed sequence?") and a run without values would end there. What is made
from numbers alone is small, so it is computed for real beside its shape, and looked at there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

MOST_NUMEL = 1 << 22  # positions of 32 sequences of 128 thousand tokens
_aten: Any = torch.ops.aten
READERS = (_aten._local_scalar_dense.default, _aten.is_nonzero.default)
UNKNOWN = (_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default)


class KnownValues:
    """Real values beside tensors on meta."""

    def __init__(self) -> None:
        self._values = WeakTensorKeyDictionary()  # tensor on meta -> the same on the CPU

    def read(self, func: Any, args: Any) -> Any:
        """What a function that looks at a value finds; None: this is no such function, or nobody knows."""
        if func not in READERS or args[0] not in self._values:
            return None
        return func(self._values[args[0]])

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute what has just been computed without values, if all of its arguments have them."""
        if not isinstance(result, Tensor):
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_unknown = func in UNKNOWN or torch.Tag.nondeterministic_seeded in func.tags
        if is_unknown or result.numel() > MOST_NUMEL or not all(t in self._values for t in tensors):
            for tensor in tensors if func._schema.name.endswith("_") else ():
                self._values.pop(tensor, None)  # written with what nobody knows
            return
        real_args, real_kwargs = tree_map(self._real, (args, kwargs))
        self._values[result] = func(*real_args, **real_kwargs)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._values[value]
        return torch.device("cpu") if isinstance(value, torch.device) else value
