"""Models that compute in float32 here and there, run in float64 throughout.

Many transformers models cast to float32 inside norms, routers and rotary embeddings whatever the parameters are. A
rounding there turns a difference in the sixteenth digit into one in the eighth, and no parity to 1e-10 can be asked
for. `in_double` replaces the request for float32 by one for float64; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class in_double(TorchFunctionMode):
    """While active, float32 asked for by dtype, `.float()` or `.type()` is float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        widened = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*widened, **named)
