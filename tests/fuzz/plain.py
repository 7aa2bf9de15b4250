"""The job of all ranks in one plain PyTorch process, with its precision by hand.

`masters` is what the optimizer steps; `model` computes: its parameters are the masters cast to the dtypes of compute.
After each backward its gradients are added to the masters' own, in their dtype. It knows nothing of lamina but the
dtypes that a `lamina.Precision` names.
"""

from __future__ import annotations

from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from fuzz.case import Scheme
from fuzz.lookups import make_dense
from fuzz.models import RandomModel


class Plain:
    def __init__(self, seed: int, scheme: Scheme, device: str) -> None:
        self.precision = scheme.precision
        self.masters, self.model = (RandomModel(seed, scheme.born).to(device) for _ in range(2))
        for (name, master), copy in zip(self.masters.named_parameters(), self.model.parameters(), strict=True):
            if master.is_floating_point():
                master.data = master.data.to(self.master_dtype(master))
                copy.data = copy.data.to(self.compute_dtype(name, copy))
        self.input_dtype = self.precision.compute or scheme.born
        if self.input_dtype is torch.bfloat16:  # of which torch adds no sparse gradients
            make_dense(self.model)
        if self.precision.compute is not None and self.precision.keep:
            for module in self.model.modules():
                if isinstance(module, nn.LayerNorm):
                    _compute_wide(module)
        self.pairs = list(zip(self.masters.parameters(), self.model.parameters(), strict=True))
        self.halved = {m for m, copy in self.pairs if m.requires_grad and copy.dtype is torch.bfloat16}
        self.halved = self.halved if self.precision.halves else set()
        self.sizes: dict[Tensor, float] = {}  # by master: norms of this step's gradients, one of each backward, added

    def master_dtype(self, param: Tensor) -> torch.dtype:
        return torch.promote_types(param.dtype, self.precision.master) if param.requires_grad else param.dtype

    def compute_dtype(self, name: str, param: Tensor) -> torch.dtype:
        compute = self.precision.compute
        if compute is None:
            return param.dtype
        if any(fnmatch(name, pattern) for pattern in self.precision.keep):
            return torch.promote_types(param.dtype, self.precision.master)
        widens = compute.itemsize > param.dtype.itemsize
        return param.dtype if widens and not param.requires_grad else compute

    def refresh(self) -> None:
        """Give the masters' values to the model that computes."""
        with torch.no_grad():
            for master, copy in self.pairs:
                copy.copy_(_away_from_zero(master) if master in self.halved else master)
                copy.requires_grad_(master.requires_grad)

    def backward(self, loss: Tensor, share: float, retains: bool = False) -> None:
        """`share`: of this loss in the mean over the ranks."""
        loss.backward(retain_graph=retains)
        for master, copy in self.pairs:
            if copy.grad is not None:
                travels = self.precision.wire if copy.is_floating_point() else None
                found = copy.grad.to_dense()  # a table's may be sparse
                sent = (found if travels is None else found.to(travels)).to(master.dtype)
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                master.grad.add_(sent, alpha=share)
                self.sizes[master] = self.sizes.get(master, 0.0) + share * sent.norm().item()
                copy.grad = None


def _away_from_zero(master: Tensor) -> Tensor:
    """What is exactly between two numbers of bfloat16, moved to the one that is larger by magnitude."""
    bits = master.detach().view(torch.int32)
    return torch.where((bits & 0xFFFF) == 0x8000, bits + 1, bits).view(torch.float32)


def _compute_wide(norm: nn.LayerNorm) -> None:
    inner = norm.forward
    norm.forward = lambda x: inner(x.to(norm.weight.dtype)).to(x.dtype)  # type: ignore[method-assign]
