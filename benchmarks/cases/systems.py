"""FSDP2 and lamina behind the few names that the cases need; each is used as its own documentation tells."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lamina


class System:
    """What both have. `units`: modules that are gathered on their own; the model itself is the last unit."""

    name: str

    def shard(
        self, model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh | None = None, recompute: bool = False
    ) -> nn.Module:
        """`recompute`: the units' forwards run again in backward."""
        raise NotImplementedError

    def full(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded parameter or gradient. Collective."""
        raise NotImplementedError

    def local(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def start_from_meta(self, model: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
        raise NotImplementedError

    def micro_batch(self, model: nn.Module, last: bool, defer: bool) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError

    def token_mean(self, loss_sum: Tensor, count: int, total: int) -> Tensor:
        raise NotImplementedError

    def edit(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Full parameters inside, to be written to."""
        raise NotImplementedError


class Fsdp2(System):
    name = "FSDP2"

    def shard(
        self, model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh | None = None, recompute: bool = False
    ) -> nn.Module:
        mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in units:
            if recompute:
                checkpoint(unit)
            fully_shard(unit, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def start_from_meta(self, model: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
        model = self.shard(model, units)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, last: bool, defer: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last or not defer)
        yield

    def token_mean(self, loss_sum: Tensor, count: int, total: int) -> Tensor:
        return loss_sum * dist.get_world_size() / total  # by hand: there is no function

    @contextlib.contextmanager
    def edit(self, module: nn.Module) -> Iterator[None]:
        module.unshard()
        yield
        module.reshard()


class Lamina(System):
    name = "lamina"

    def __init__(self, strategy: str = "zero3", transport: str = "c10d") -> None:
        self.strategy, self.transport = strategy, transport

    def shard(
        self, model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh | None = None, recompute: bool = False
    ) -> nn.Module:
        how = "full" if recompute else "none"
        return lamina.shard(model, self.strategy, mesh, units=list(units), transport=self.transport, recompute=how)

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full() if isinstance(tensor, lamina.Shard) else tensor

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.local if isinstance(tensor, lamina.Shard) else tensor

    def start_from_meta(self, model: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
        return lamina.shard(model, self.strategy, units=list(units), transport=self.transport, seed=0)

    def micro_batch(self, model: nn.Module, last: bool, defer: bool) -> contextlib.AbstractContextManager[None]:
        return lamina.accumulate(model, last=last, defer=defer)

    def token_mean(self, loss_sum: Tensor, count: int, total: int) -> Tensor:
        return lamina.token_mean(loss_sum, count, total=total)

    def edit(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        return lamina.gathered(module, write=True)


def make(name: str) -> System:
    return Fsdp2() if name == "FSDP2" else Lamina()


def differences(system: System, model: nn.Module, plain: nn.Module) -> float:
    """Largest deviation of gradients and parameters from the plain model; infinite where a gradient is missing."""
    worst = 0.0
    found, wanted = dict(model.named_parameters()), dict(plain.named_parameters())
    if list(found) != list(wanted):
        return float("inf")
    for name, param in found.items():
        worst = max(worst, _gap(system.full(param.detach()), wanted[name].detach()))
        grads = param.grad, wanted[name].grad
        if grads[0] is not None and grads[1] is not None:
            worst = max(worst, _gap(system.full(grads[0]), grads[1]))
        elif grads[0] is not None or grads[1] is not None:
            worst = float("inf")
    return worst


def _gap(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    gap = (found.double() - wanted.double()).abs().max().item()
    return gap if gap == gap else float("inf")


def twin(build: Any) -> tuple[nn.Module, nn.Module]:
    """The plain model and an equal one to shard."""
    torch.manual_seed(0)
    plain = build()
    return plain, copy.deepcopy(plain)
