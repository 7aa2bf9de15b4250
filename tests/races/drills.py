"""Short jobs that come by every wait of the runtime: few blocks of uneven size, one inside another, some left out.

Nothing is compared with a plain model here: other tests do that. What is looked at is the trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lamina
from lamina.runtime import halving
from races.watching import Watch

WIDTH = 4


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor, inside: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        hidden = self.up(x).tanh()
        return x + self.down(hidden if inside is None else hidden * inside(x).mean())


class Drilled(nn.Module):
    """`path`: the numbers of blocks in order; of a pair the second is called inside the first."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(64 * (blocks - number)) for number in range(blocks)])

    def forward(self, x: Tensor, path: Sequence[int | tuple[int, int]]) -> Tensor:
        x = self.first(x)
        for step in path:
            x = self.blocks[step](x) if isinstance(step, int) else self.blocks[step[0]](x, self.blocks[step[1]])
        return self.last(x)


@dataclass(frozen=True)
class Drill:
    """How a drill shards, and what else it does."""

    strategy: Any = "zero3"
    transport: str = "c10d"
    slots: int = 1
    precision: Any = None
    recompute: Any = "none"
    path: tuple[int | tuple[int, int], ...] = (0, 1, 2)
    max_norm: float | None = None
    flat: bool = True  # lamina's optimizer
    defer: bool = False
    debug: bool = False
    replicas: int = 1  # of hsdp
    patience: int = 0  # steps, after which masters that lamina has halved are whole again; 0: it halves none

    def __call__(self, watch: Watch) -> None:
        lamina.debug(self.debug)
        pays, patience = (
            patch.object(halving, "pays_on", self.pays_on),
            patch.object(halving, "PATIENCE", self.patience),
        )
        try:
            with pays, patience:
                self.train(watch)
        finally:
            lamina.debug(False)

    def pays_on(self, device: torch.device) -> bool:
        return self.patience > 0

    def train(self, watch: Watch) -> None:
        torch.manual_seed(0)
        model = lamina.shard(
            Drilled(3),
            self.strategy,
            mesh=self.mesh(),
            units=["blocks.*"],
            transport=self.transport,
            slots=self.slots,
            precision=self.precision,
            recompute=self.recompute,
        )
        optimizer = (
            lamina.optim.AdamW(model.parameters(), lr=0.01, max_norm=self.max_norm)
            if self.flat
            else torch.optim.SGD(model.parameters(), lr=0.01)
        )
        for act in (self.read_inside, self.evaluate_and_edit, self.fail):
            act(model)
            for micro in range(2):
                with lamina.accumulate(model, last=micro == 1, defer=self.defer):
                    self.output(model).square().mean().backward()
            if act != self.fail:
                self.look(model)
            optimizer.step()
            optimizer.zero_grad()
            self.read(model)
        watch.note_names()

    def mesh(self) -> DeviceMesh | None:
        sizes = self.replicas, dist.get_world_size() // self.replicas
        return None if self.replicas == 1 else init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))

    def output(self, model: nn.Module, path: Sequence[int | tuple[int, int]] | None = None) -> Tensor:
        data = torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype)
        return model(data, self.path if path is None else path).float()

    def look(self, model: nn.Module) -> None:
        """A forward of which there is no backward. Rank 1 leaves out what stands last: it waits for no gather of it."""
        self.output(model, self.path[: len(self.path) - dist.get_rank()])

    def read(self, model: nn.Module) -> None:
        for param in model.parameters():
            (param.local if isinstance(param, lamina.Shard) else param).sum()

    def read_inside(self, model: nn.Module) -> None:
        """From now on, whenever a forward has begun."""
        model.first.register_forward_hook(lambda module, args, output: self.read(model.blocks))

    def evaluate_and_edit(self, model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(2):
                self.look(model)
        self.edit(model)

    def edit(self, model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)

    def fail(self, model: nn.Module) -> None:
        """A backward ends in an error that the user catches: before that of the first block and behind it, when the
        others are reduced; then at once."""
        for number, hang in ((0, _fail_before), (0, _fail_behind), (-1, _fail_before)):
            handle = model.blocks[self.order[number]].register_forward_hook(hang)
            with contextlib.suppress(ZeroDivisionError):
                self.output(model).sum().backward()
            handle.remove()
            model.zero_grad(set_to_none=False)
        self.edit(model)

    @property
    def order(self) -> list[int]:
        return [step if isinstance(step, int) else step[0] for step in self.path]


def _fail_before(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    output.register_hook(_fail)


def _fail_behind(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    args[0].register_hook(_fail)


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


NESTED: tuple[int | tuple[int, int], ...] = ((0, 1), 2, 1)
HALVES = lamina.Precision(compute=torch.bfloat16, halves=True)
DRILLS = {
    "slots=1": Drill(),
    "slots=3": Drill(slots=3, precision="bf16", flat=False),
    "nested": Drill(path=NESTED),
    "nested, recomputed": Drill(path=NESTED, recompute="full", slots=2),
    "nested, debug": Drill(path=NESTED, slots=2, debug=True),
    "wire": Drill(precision=lamina.Precision(compute=torch.bfloat16, wire=torch.float32), defer=True),
    "zero2": Drill("zero2", flat=False),
    "zero1": Drill("zero1", defer=True),
    "ddp": Drill("ddp"),
    "(1, 2, 2)": Drill(lamina.Strategy(1, 2, 2), slots=3),
    "peer": Drill(transport="peer"),
    "peer, slots=3": Drill(transport="peer", slots=3, precision="bf16", max_norm=1.0),
    "peer, halves": Drill(transport="peer", slots=3, precision=HALVES, max_norm=1.0),
    "peer, halves for a while": Drill(transport="peer", slots=3, precision="bf16", max_norm=1.0, patience=2),
    "peer, halves, nested": Drill(transport="peer", precision=HALVES, path=NESTED, flat=False),
}
ON_FOUR_RANKS = {
    "hsdp, peer": Drill("hsdp", "peer", precision="bf16", max_norm=1.0, replicas=2),
    "(2, 2, 4), peer": Drill(lamina.Strategy(2, 2, 4), "peer", slots=2),
}
