"""Backwards that come into a unit past its outputs: by attributes, hooks on layers inside, lists of the user's.

Auxiliary losses, losses of features, heads on detached features. What lamina finds equals one process; through what it
does not find, weights are never read that are not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from harness import run_ranks
from parity.reference import TOLERANCE, gradient_deviation

DIM, BLOCKS = 8, 4
WAYS: tuple[dict[str, Any], ...] = (
    {"slots": 1, "transport": "c10d"},
    {"transport": "peer"},
    {"slots": 1, "recompute": "full"},
    {"strategy": "zero1"},
)
left: list[Tensor] = []


@dataclasses.dataclass
class Kept:
    feature: Tensor


class Bag:
    def __init__(self, feature: Tensor) -> None:
        self.items = [feature]


class Down(nn.Linear):
    """Appends to a list that it is given."""

    def forward(self, x: Tensor, found: list[Tensor] | None = None) -> Tensor:
        if found is not None:
            found.append(x * self.weight.sum())
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(DIM, 2 * DIM), Down(2 * DIM, DIM), keep
        self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))
        self.up.kept = None
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) if keep == "reentrant" else None
        self.kept: Any = 0.0 if keep == "zero" else None
        self.register_buffer("beside", torch.zeros(()))
        self.above: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.keep == "reentrant":
            return checkpoint(self.inner, x, use_reentrant=True).detach() + self.up(x).mean()
        h = (checkpoint(self.up, x, use_reentrant=False) if self.keep == "recomputed" else self.up(x)).tanh()
        found: list[Tensor] = []
        y = x + (self.down(h, found) if self.keep == "argument" else self.down(h))
        if self.keep == "attribute":
            self.kept = h
        elif self.keep == "container":
            self.kept = {"features": [h]}
        elif self.keep == "head":
            self.kept = self.head(y.detach())
        elif self.keep == "inside":
            self.up.kept = h
        elif self.keep == "dataclass":
            self.kept = Kept(h)
        elif self.keep == "object":
            self.kept = Bag(h)
        elif self.keep == "buffer":
            self.beside = h.square().mean()
        elif self.keep == "above":
            self.above[0].found.append(h)
        elif self.keep == "argument":
            self.above[0].found += found
        elif self.keep == "recomputed":
            left.append(self.down(h))
        elif self.keep == "elsewhere":
            left.append(h)
        return y


def net(keep: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(keep) for _ in range(BLOCKS)), nn.Linear(DIM, DIM)).double()
    model.found = []
    for block in list(model)[:BLOCKS]:
        block.above = (model,)
    return model


def features(model: nn.Module) -> list[Tensor]:
    blocks = [block for block in model if isinstance(block, Block)]
    if blocks[0].keep in ("above", "argument"):
        return model.found[-BLOCKS:]
    return [block.beside if block.keep == "buffer" else _in(block.kept) for block in blocks]


def _in(kept: Any) -> Any:
    if isinstance(kept, Kept):
        return kept.feature
    return kept.items[0] if isinstance(kept, Bag) else kept["features"][0] if isinstance(kept, dict) else kept


def hear(model: nn.Module) -> list[Tensor]:
    heard: list[Tensor] = []
    for block in list(model)[:BLOCKS]:
        block.down.register_forward_hook(lambda module, args, output: heard.append(output))
    return heard


# Each gives the losses of one rank's batch, to be run backward one after the other.


def of_attribute(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    model(x)
    return [features(model)[1].square().mean()]


def of_first_attribute(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """No unit's output is on the way of this backward."""
    model(x)
    return [features(model)[0].square().mean()]


def of_all_attributes(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    model(x)
    return [torch.stack([each.square().mean() for each in features(model)]).sum()]


def of_attribute_first(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    y = model(x)
    return [features(model)[1].square().mean(), y.square().mean()]


def of_output_first(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    y = model(x)
    return [y.square().mean(), features(model)[1].square().mean()]


def of_late_attribute(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    for block in list(model)[:BLOCKS]:
        block.keep = "attribute" if step == 4 else ""
    y = model(x)
    return [features(model)[1].square().mean() if step == 4 else y.square().mean()]


def of_late_attribute_of_layer(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """A layer of torch's own gets it, from the fifth step on."""
    for block in list(model)[:BLOCKS]:
        block.keep = "inside" if step == 4 else ""
    y = model(x)
    return [model[1].up.kept.square().mean() if step == 4 else y.square().mean()]


def of_hooks(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    if step == 0:
        model.heard = hear(model)
    model.heard.clear()
    y = model(x)
    return [model.heard[1].square().mean() + (y.sum() if step == 2 else 0)]


def of_late_hooks(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    if step != 1:
        return of_hooks(model, x, step)
    heard = hear(model)
    model(x)
    return [heard[1].square().mean() + 2 * model.heard[-1].square().mean()]


def of_frozen_features(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """The loss is that of the input's features; only the first block trains."""
    model[1:].requires_grad_(False)
    return of_hooks(model, x, step)


def of_layer(
    model: nn.Module, keep: Callable[[nn.Module, Callable[[Tensor], None]], Any]
) -> Callable[[Tensor], Tensor]:
    """A loss of what hooks on a layer of the second block keep of one forward."""

    def loss(x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handles = keep(model[1].down, kept.append)
        model(x)
        for handle in handles if isinstance(handles, tuple) else (handles,):
            handle.remove()
        return kept[0].square().mean()

    return loss


def of_what_a_hook_is_given(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    return [of_layer(model, lambda m, keep: m.register_forward_hook(lambda _, args, out: keep(args[0])))(x)]


def of_what_comes_in(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    return [of_layer(model, lambda m, keep: m.register_forward_pre_hook(lambda _, args: keep(args[0])))(x)]


def of_what_another_hook_changes(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    def hang(layer: nn.Module, keep: Callable[[Tensor], None]) -> Any:
        first = layer.register_forward_hook(lambda _, args, out: keep(out))
        return first, layer.register_forward_hook(lambda _, args, out: 2 * out.detach())

    return [of_layer(model, hang)(x)]


def of_output_of_layer(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    return [of_layer(model, lambda m, keep: m.register_forward_hook(lambda _, args, out: keep(out)))(x)]


def of_checkpoint(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    """The hook sees a tensor that gets its node afterwards, and the output is cut off."""
    kept: list[Tensor] = []
    handle = model[1].inner.register_forward_hook(lambda _, args, out: kept.append(out))
    model(x)
    handle.remove()
    return [kept[0].square().mean()]


def of_hook_on_all(model: nn.Module, x: Tensor, step: int) -> list[Tensor]:
    def hang(layer: nn.Module, keep: Callable[[Tensor], None]) -> Any:
        def look(module: nn.Module, args: Any, out: Tensor) -> None:
            if module is layer:
                keep(out)

        return nn.modules.module.register_module_forward_hook(look)

    return [of_layer(model, hang)(x)]


SEEN: dict[str, tuple[str, Callable[[nn.Module, Tensor, int], list[Tensor]]]] = {
    "attribute": ("attribute", of_attribute),
    "attribute of the first": ("attribute", of_first_attribute),
    "container": ("container", of_all_attributes),
    "attribute, then output": ("attribute", of_attribute_first),
    "output, then attribute": ("attribute", of_output_first),
    "head on a detached feature": ("head", of_output_first),
    "late attribute": ("", of_late_attribute),
    "hooks": ("", of_hooks),
    "more hooks": ("", of_late_hooks),
    "frozen features": ("", of_frozen_features),
    "dataclass": ("dataclass", of_first_attribute),
    "object": ("object", of_first_attribute),
    "buffer": ("buffer", of_first_attribute),
    "0 at first": ("zero", of_late_attribute),
    "attribute of a layer of torch's": ("", of_late_attribute_of_layer),
    "list of the model": ("above", of_attribute),
    "list that is given": ("argument", of_attribute),
    "given to a layer": ("", of_what_a_hook_is_given),
    "before a layer": ("", of_what_comes_in),
    "changed by another hook": ("", of_what_another_hook_changes),
    "reentrant": ("reentrant", of_checkpoint),
    "hook on all": ("", of_hook_on_all),
    "unit in a unit": ("", of_output_of_layer),
}


NESTED = ("unit in a unit", "list that is given")  # layers of a block are units, too


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def run(model: nn.Module, losses: list[Tensor], share: int) -> None:
    for number, loss in enumerate(losses):
        (loss / share).backward(retain_graph=number + 1 < len(losses))


def deviations(cases: list[str]) -> dict[str, float]:
    """Of gradients, by case and way."""
    found, rank, world = {}, dist.get_rank(), dist.get_world_size()
    for name in cases:
        keep, make = SEEN[name]
        number = list(SEEN).index(name)
        for way in WAYS if number < 10 else (WAYS[number % 4], WAYS[(number + 1) % 4]):
            plain = net(keep)
            inner = [f"{number}.down" for number in range(BLOCKS)] if name in NESTED else []
            model = lamina.shard(net(keep), units=[*map(str, range(BLOCKS + 1)), *inner], **way)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
            worst = 0.0
            for step in range(5):
                for other in range(world):
                    run(plain, make(plain, batch(other, step), step), world)
                run(model, make(model, batch(rank, step), step), 1)
                wanted = {n: p.grad for n, p in plain.named_parameters()}
                worst = max(worst, gradient_deviation(model, wanted))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            found[f"{name}, {way}"] = worst
    return found


@pytest.mark.parametrize("cases", [list(SEEN)[:5], list(SEEN)[5:10], list(SEEN)[10:16], list(SEEN)[16:]])
def test_gradients_are_those_of_one_process(cases: list[str]) -> None:
    for found in run_ranks(2, deviations, cases):
        assert max(found.values()) <= TOLERANCE, {name: worst for name, worst in found.items() if worst > TOLERANCE}


def messages() -> list[str]:
    """By way, of a backward through what nobody finds; the next step is right."""
    said = []
    for way in WAYS[:3]:
        model = lamina.shard(net("elsewhere"), units=[*map(str, range(BLOCKS + 1))], **way)
        left.clear()
        model(batch(0, 0))
        with pytest.raises(lamina.LaminaError) as raised:
            left[1].square().mean().backward()
        said.append(str(raised.value))
        model.zero_grad()
        if "recompute" in way:
            continue  # inside keep() a forward that runs again finds no weights in its modules
        with lamina.keep(model):
            left.clear()
            model(batch(0, 0))
            left[1].square().mean().backward()
        plain = net("elsewhere")
        left.clear()
        plain(batch(0, 0))
        left[1].square().mean().backward()
        assert gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()}) <= TOLERANCE
    return said


def hooked_by_hand() -> list[bool]:
    """By way: whether a backward through what such a hook keeps is refused."""
    refused = []
    for way in WAYS[:3]:
        model = lamina.shard(net(""), units=[*map(str, range(BLOCKS + 1))], **way)
        kept: list[Tensor] = []
        for step in range(3):
            if step == 2:
                model[1].down._forward_hooks[-1] = lambda _, args, out, kept=kept: kept.append(out)  # type: ignore[misc]
            model(batch(0, step))
        with pytest.raises(lamina.LaminaError, match="left in a list or another object"):
            kept[0].square().mean().backward()
        kept.clear()  # a graph that the model itself holds would hold the model for good
        refused.append(True)
    return refused


def test_what_a_hook_without_a_handle_keeps_is_refused() -> None:
    assert run_ranks(2, hooked_by_hand) == [[True] * 3] * 2


def test_weights_that_are_not_there_are_named() -> None:
    for said in run_ranks(2, messages):
        for message in said:
            assert "past the outputs" in message and "1.up.weight" in message and "lamina.keep(model)" in message


def clean_starts() -> list[float]:
    """Of the step after a backward that ended in an error, when some of its gradients were there."""
    found, rank, world = [], dist.get_rank(), dist.get_world_size()
    for way in WAYS[:3]:
        model, plain = (net("recomputed") for _ in range(2))
        lamina.shard(model, units=[*map(str, range(BLOCKS + 1))], **(way | {"slots": BLOCKS}))
        left.clear()
        model(batch(rank, 0))
        with contextlib.suppress(lamina.LaminaError):
            left[-1].square().mean().backward()
        model.zero_grad()
        run(model, [model(batch(rank, 1)).square().mean()], 1)
        for other in range(world):
            run(plain, [plain(batch(other, 1)).square().mean()], world)
        found.append(gradient_deviation(model, {n: p.grad for n, p in plain.named_parameters()}))
    return found


def test_nothing_stays_of_a_backward_that_has_failed() -> None:
    for found in run_ranks(2, clean_starts):
        assert max(found) <= TOLERANCE, found


def stale() -> str:
    """A graph of the step before, whose unit is gathered again with other weights."""
    model = lamina.shard(net("attribute"), units=[*map(str, range(BLOCKS + 1))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, 0)).sum().backward(retain_graph=True)
    old = features(model)[2]
    optimizer.step()
    model(batch(0, 1))
    with pytest.raises(lamina.StateError) as raised:
        old.sum().backward()
    return str(raised.value)


def test_graphs_of_the_step_before_are_named() -> None:
    assert all("changed between its forward and this backward" in said for said in run_ranks(2, stale))


class Failing(nn.Module):
    """Its first forward fails behind what it has left in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        left.append(torch.tanh(self.down(torch.tanh(self.up(x)))))
        self.calls += 1
        if self.calls == 1:
            raise ValueError("of the user's")
        return left[-1]


def failed_and_edited(strategy: str) -> list[str]:
    """Who refuses: the plain model, and the sharded one."""
    said = []
    for is_sharded in (False, True):
        left.clear()
        model = nn.Sequential(Failing(), nn.Linear(4, 4)).double()
        if is_sharded:
            model = lamina.shard(model, strategy, units=["0", "1"])
        x = torch.ones(2, 4, dtype=torch.float64)
        with pytest.raises(ValueError):
            model(x)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
            model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation|were changed between|is not gathered"):
            left[0].sum().backward()
        said.append("sharded" if is_sharded else "plain")
    left.clear()
    return said


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_what_a_first_forward_that_failed_has_left_is_not_run_with_other_weights(strategy: str) -> None:
    assert run_ranks(2, failed_and_edited, strategy) == [["plain", "sharded"]] * 2


def script(kind: str) -> weakref.ref[nn.Module]:
    """Holds its loss, its hooks and its model together."""
    names: dict[str, Any] = {"model": lamina.shard(net(kind), units=[*map(str, range(BLOCKS + 1))])}

    def look(*_: object) -> None:
        names.get("loss")

    names["model"][1].register_forward_hook(look)
    for index in range(2):
        names["loss"] = names["model"](batch(0, index)).sum()
        names["loss"].backward()
    return weakref.ref(names["model"])


def what_stays() -> list[str]:
    stays = []
    for kind in ("attribute", "elsewhere"):
        model = script(kind)
        left.clear()
        gc.collect()
        stays += [kind] if model() is not None else []
    return stays


def test_a_model_goes_with_what_holds_it() -> None:
    """Autograd holds hooks of lamina's, and the garbage collector does not see what autograd holds."""
    assert run_ranks(2, what_stays) == [[], []]
