"""Layers and parameters that a model keeps where no module registers them: in plain lists, objects, closures.

In one process an optimizer that is given them trains them. Here nothing would average their gradients: refused by name,
on every rank, before the first step; what is there and does not train is left alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lamina
from cases.training import TOLERANCE, WAYS, WIDTH, Case, Way, batch_of, seeded, worst_of
from harness import expect_error, run_ranks
from parity.structures import Chain


@dataclass
class Holder:
    """An ordinary object."""

    layer: Any


class Hiding(Chain):
    """Its forward ends in `hidden`, of which nothing is registered."""

    def __init__(self, hide: Callable[[nn.Module], tuple[Any, Callable[[Any, Tensor], Tensor]]]) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        layer = nn.Linear(WIDTH, WIDTH)
        self.hidden, self.apply_hidden = hide(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.apply_hidden(self.hidden, self.blocks[0](self.first(x))))


class Behind(Hiding):
    """It comes last, when no unit's backward has begun."""

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_hidden(self.hidden, self.blocks[0](self.first(x)))


class Before(Hiding):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks[0](self.first(self.apply_hidden(self.hidden, x))))


class Alone(Behind):
    """All that is registered is frozen."""

    def __init__(self, hide: Callable[[nn.Module], Any]) -> None:
        super().__init__(hide)
        self.requires_grad_(False)


def in_list(layer: nn.Module) -> Any:
    return [layer], lambda hidden, x: hidden[0](x)


def in_tuple(layer: nn.Module) -> Any:
    return (torch.tanh, layer), lambda hidden, x: hidden[1](x)


def in_dict(layer: nn.Module) -> Any:
    return {"a": layer}, lambda hidden, x: hidden["a"](x)


def in_nested(layer: nn.Module) -> Any:
    return {"a": [(layer,)]}, lambda hidden, x: hidden["a"][0][0](x)


def in_object(layer: nn.Module) -> Any:
    return Holder(layer), lambda hidden, x: hidden.layer(x)


def in_partial(layer: nn.Module) -> Any:
    return functools.partial(layer), lambda hidden, x: hidden(x)


def in_closure(layer: nn.Module) -> Any:
    return None, lambda hidden, x: layer(x)


def as_parameters(layer: nn.Module) -> Any:
    return list(layer.parameters()), lambda hidden, x: nn.functional.linear(x, *hidden)


def recomputed(layer: nn.Module) -> Any:
    return [layer], lambda hidden, x: checkpoint(hidden[0], x, use_reentrant=False)


def recomputed_apart(layer: nn.Module) -> Any:
    """In a backward inside the backward."""
    return [layer], lambda hidden, x: checkpoint(hidden[0], x, use_reentrant=True)


PLACES = {
    in_list: "`hidden[0].weight`|`hidden[0].bias`",
    in_tuple: "`hidden[1].weight`|`hidden[1].bias`",
    in_dict: "`hidden['a'].weight`|`hidden['a'].bias`",
    in_nested: "`hidden['a'][0][0].weight`|`hidden['a'][0][0].bias`",
    in_object: "`hidden.layer.weight`|`hidden.layer.bias`",
    in_partial: "`hidden.func.weight`|`hidden.func.bias`",
    in_closure: "`apply_hidden.__closure__[0].cell_contents.weight`|`apply_hidden.__closure__[0].cell_contents.bias`",
    as_parameters: "`hidden[0]`|`hidden[1]`",
    recomputed: "`hidden[0].weight`|`hidden[0].bias`",
    recomputed_apart: "`hidden[0].weight`|`hidden[0].bias`",
}


def sharded(model: nn.Module, way: Way) -> nn.Module:
    return lamina.shard(model, way.strategy, units=["blocks.*"], transport=way.transport, slots=way.slots)


def train_all(way: Way, hide: Callable[[nn.Module], Any], kind: type[Hiding] = Hiding) -> list[str]:
    """What each of two backwards says."""
    model = sharded(seeded(functools.partial(kind, hide)), way)
    said = []
    for step in range(2):
        try:
            model(batch_of(dist.get_rank(), step)).pow(2).mean().backward()
        except lamina.ParameterChanged as error:
            said.append(str(error))
        model.zero_grad()
    with torch.no_grad():
        lamina.check(model)
        model(batch_of(0, 0))
    return said


@pytest.mark.parametrize("hide", PLACES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_no_module_registers_is_refused_when_it_would_train(way: Way, hide: Callable[[nn.Module], Any]) -> None:
    said = run_ranks(2, train_all, way, hide)
    assert [len(each) for each in said] == [2, 2]
    assert said[0] == said[1]
    for message in said[0]:
        assert message.startswith(tuple(PLACES[hide].split("|")))
        assert "nn.ModuleList" in message


OUTSIDE: list[nn.Module] = []  # what no attribute of a model leads to


def in_global(layer: nn.Module) -> Any:
    OUTSIDE[:] = [layer]
    return None, lambda hidden, x: OUTSIDE[0](x)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_the_model_does_not_lead_to_is_refused_in_its_second_forward(way: Way) -> None:
    for said in run_ranks(2, train_all, way, in_global):
        assert len(said) == 1 and said[0].startswith(("a parameter of shape (5, 5)", "a parameter of shape (5,)"))


def train_two(way: Way) -> list[str]:
    """A hidden layer that comes from a model that is gone to another one."""
    first = sharded(seeded(functools.partial(Hiding, in_list)), way)
    first(batch_of(dist.get_rank(), 0))
    second = seeded(functools.partial(Hiding, in_list))
    second.hidden = first.hidden
    del first
    second = sharded(second, way)
    try:
        second(batch_of(dist.get_rank(), 0)).pow(2).mean().backward()
    except lamina.ParameterChanged as error:
        return [type(error).__name__]
    return []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_layer_that_another_model_hid_before_is_refused(way: Way) -> None:
    assert run_ranks(2, train_two, way) == [["ParameterChanged"]] * 2


@pytest.mark.parametrize("kind", [Behind, Before, Alone])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_does_not_matter_where_in_the_forward_it_stands(way: Way, kind: type[Hiding]) -> None:
    assert [len(each) for each in run_ranks(2, train_all, way, in_list, kind)] == [2, 2]


# ---- what does not train is left alone -----------------------------------------------------------------------------


class Taught(Chain):
    """With a teacher that is hidden on purpose."""

    def __init__(self, use: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.use = use
        self.teacher = [nn.Linear(WIDTH, WIDTH)]
        if use == "frozen":
            self.teacher[0].requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        if self.use == "no_grad":
            with torch.no_grad():
                wanted = self.teacher[0](x)
        elif self.use == "frozen":
            wanted = self.teacher[0](x)
        else:
            wanted = self.teacher[0](x)
            wanted = wanted.detach() if self.use == "detached" else wanted
        return y, wanted[:, : y.shape[1]]


def distance(model: nn.Module, x: Tensor) -> Tensor:
    y, wanted = model(x)
    return (y - (wanted.detach() if model.use == "detached by the loss" else wanted)).pow(2).mean()


def apart(model: nn.Module, x: Tensor) -> Tensor:
    """Its output goes nowhere."""
    y, wanted = model(x)
    assert wanted.requires_grad
    return y.pow(2).mean()


class Followed(Chain):
    """With an average of its own weights, in a plain dict."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.averages = {"first": copy.deepcopy(self.first)}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.averages["first"](x)
        return super().forward(x) - wanted[:, :1]


class Forces(Chain):
    """Leaves that the forward makes, and an input that it makes one."""

    def __init__(self, made: bool) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        positions = x.detach().requires_grad_() if self.made else x.requires_grad_()
        return super().forward(positions)


class Itself(Chain):
    """A hidden layer that trains in the forward, by a loss of its own; or a copy of it, made for this forward."""

    def __init__(self, copies: bool) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.copies, self.hidden = copies, [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        layer = copy.deepcopy(self.hidden[0]) if self.copies else self.hidden[0]
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with torch.enable_grad():
            layer(x.detach()).pow(2).mean().backward()
        optimizer.step()
        return super().forward(layer(x).detach())


class Fast(Chain):
    """Computes with copies of a hidden layer that are made for one forward, after steps of their own."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.hidden = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        layer = copy.deepcopy(self.hidden[0])
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            layer(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return super().forward(layer(x))


class Judged(Chain):
    """Shows what a hidden critic says of its output, which trains by a backward of its own, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.critic = [nn.Linear(3, 1)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, self.critic[0](y)


def judged(model: nn.Module, x: Tensor) -> Tensor:
    y, said = model(x)
    assert said.requires_grad
    critic = model.critic[0]
    critic(torch.ones_like(y)).sum().backward()
    torch.optim.SGD(critic.parameters(), lr=0.1).step()
    return y.pow(2).mean()


class Prompted(Chain):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.prompts = [nn.Parameter(torch.randn(WIDTH)), torch.randn(WIDTH, requires_grad=True)]

    def forward(self, x: Tensor, given: dict[str, Any] | None = None) -> Tensor:
        assert given is not None
        return super().forward(x + given["prompts"][0] * given["prompts"][1])


def with_prompts(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, given={"prompts": model.prompts}).pow(2).mean()


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """A step of a rank's own, by an optimizer, on a leaf that the forward is given."""
    delta = torch.zeros_like(x, requires_grad=True)
    optimizer = torch.optim.SGD([delta], lr=0.1)
    model(x + delta).pow(2).mean().backward()
    model.zero_grad()
    optimizer.step()
    moved = delta.detach().requires_grad_()
    model(moved).pow(2).mean().backward()
    model.zero_grad()
    torch.optim.SGD([moved], lr=0.1).step()
    return model(x + moved.detach()).pow(2).mean()


LEFT_ALONE = {
    **{use: Case(functools.partial(Taught, use), distance) for use in ("no_grad", "frozen", "detached")},
    "detached by the loss": Case(functools.partial(Taught, "detached by the loss"), distance),
    "in no loss": Case(functools.partial(Taught, "in no loss"), apart),
    "average": Case(Followed),
    "made inside": Case(functools.partial(Forces, True)),
    "made a leaf": Case(functools.partial(Forces, False)),
    "a copy for one forward": Case(functools.partial(Itself, True)),
    "copies in the graph": Case(Fast, steps=5),
    "trains elsewhere": Case(Judged, judged),
    "prompts": Case(Prompted, with_prompts),
    "adversarial": Case(Followed, adversarial),
}


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_does_not_train_or_is_given_is_left_alone(case: str, world: int) -> None:
    for found in run_ranks(world, worst_of, LEFT_ALONE[case]):
        assert max(found.values()) < TOLERANCE, found


# ---- the cures -----------------------------------------------------------------------------------------------------


def train_shards(way: Way) -> float:
    """The largest difference from one process, of a hidden layer that is sharded by itself once it was refused."""
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = seeded(functools.partial(Hiding, in_list))
    model = sharded(seeded(functools.partial(Hiding, in_list)), way)
    with pytest.raises(lamina.ParameterChanged, match="hidden"):
        model(batch_of(rank, 0)).pow(2).mean().backward()
    model.zero_grad()
    model.hidden[0].zero_grad()
    lamina.shard(model.hidden[0], way.strategy, transport=way.transport, slots=way.slots)
    of_both = [[*each.parameters(), *each.hidden[0].parameters()] for each in (plain, model)]
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in of_both]
    for step in range(2):
        torch.stack([plain(batch_of(r, step)).pow(2).mean() for r in range(world)]).mean().backward()
        # a regulariser brings gradients to what was once a plain leaf
        (model(batch_of(rank, step)).pow(2).mean() + 0 * model.hidden[0].weight.pow(2).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted, got = ([p.full() if isinstance(p, lamina.Shard) else p.detach() for p in params] for params in of_both)
    return max((a - b).abs().max().item() for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_hidden_layer_that_is_sharded_by_itself_trains_as_in_one_process(way: Way) -> None:
    assert max(run_ranks(2, train_shards, way)) < TOLERANCE


# ---- later, and in other ways ----------------------------------------------------------------------------------


def late(way: Way, how: str) -> int:
    """The step at which a hidden layer that begins to train late is refused."""
    model = sharded(seeded(functools.partial(Growing, how)), way)
    optimizer = torch.optim.SGD([*model.parameters(), *(p for layer in model.hidden for p in layer.parameters())], 0.1)
    for step in range(12):
        if step == 6:
            model.begin()
        try:
            model(batch_of(dist.get_rank(), step)).pow(2).mean().backward()
        except lamina.ParameterChanged:
            return step
        optimizer.step()
        optimizer.zero_grad()
    return -1


class Growing(Chain):
    """A hidden layer that trains from some step on: thawed, used for the first time, or made then."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.how, self.depth = how, 0 if how == "used" else 1
        self.hidden = [] if how == "made" else [nn.Linear(WIDTH, WIDTH).requires_grad_(how != "thawed")]

    def begin(self) -> None:
        self.depth = 1
        self.hidden = self.hidden or [nn.Linear(WIDTH, WIDTH, dtype=torch.float64)]
        self.hidden[0].requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for layer in self.hidden[: self.depth]:
            y = y + layer(x).mean()
        return y


@pytest.mark.parametrize("how, step", [("thawed", 7), ("used", 7), ("made", 6)])
def test_what_trains_later_is_refused_a_step_late_at_most(how: str, step: int) -> None:
    for way in WAYS:
        assert run_ranks(2, late, way, how) == [step, step], way


def step_loose(way: Way) -> None:
    model = sharded(seeded(functools.partial(Hiding, loose)), way)
    optimizer = torch.optim.SGD([*model.parameters(), *model.hidden], lr=0.1)
    model(batch_of(dist.get_rank(), 0)).pow(2).mean().backward()
    optimizer.step()


def loose(layer: nn.Module) -> Any:
    scale = torch.ones(WIDTH, requires_grad=True)
    return [scale], lambda hidden, x: x * hidden[0]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_tensor_that_is_no_parameter_is_refused_when_an_optimizer_steps_it(way: Way) -> None:
    expect_error(2, step_loose, way, error="ParameterChanged", contains=["shape (5,)", "Hiding", "nn.Parameter"])


def train_another(way: Way) -> None:
    """Hidden layers under an optimizer of their own, in a model of which only one method is called."""
    model = seeded(functools.partial(Hiding, in_list))
    lamina.shard(model, way.strategy, transport=way.transport, slots=way.slots)
    optimizer = torch.optim.Adam(model.hidden[0].parameters())
    with lamina.accumulate(model, last=True):
        model(batch_of(dist.get_rank(), 0)).pow(2).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_another_optimizer_does_not_hide_it(way: Way) -> None:
    expect_error(2, train_another, way, error="ParameterChanged", contains=["hidden[0]"])


def train_inside(way: Way) -> None:
    model = sharded(seeded(functools.partial(Itself, False)), way)
    model(batch_of(dist.get_rank(), 0))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_hidden_layer_that_trains_in_the_forward_is_refused(way: Way) -> None:
    expect_error(2, train_inside, way, error="ParameterChanged", contains=["hidden[0]"])
