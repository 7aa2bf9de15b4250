"""`lamina.capture` where there is no GPU: steps run as they are, and arguments are judged as on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lamina
from lamina.optim import capture


def test_runs_every_call_on_a_cpu() -> None:
    model = lamina.shard(nn.Linear(3, 1))
    optimizer = lamina.optim.AdamW(model.parameters(), lr=1e-2)
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)

    @lamina.capture
    def step(data, *, scale):
        loss = model(data).pow(2).mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for number in range(6):
        data = torch.full((2, 3), float(number))
        loss = plain(data).pow(2).mean() * 2.0
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        torch.testing.assert_close(step(data, scale=2.0), loss.detach())


def test_takes_a_function() -> None:
    with pytest.raises(lamina.UsageError, match="takes a function, not a int"):
        lamina.capture(3)  # type: ignore[arg-type]


def test_a_tensor_on_the_cpu_has_no_place_in_a_graph() -> None:
    with pytest.raises(lamina.UsageError, match="tensor 1 of the arguments is on cpu"):
        capture._own_memory(1, torch.ones(2))


def test_a_rate_that_the_function_sets_is_named() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    captured = lamina.capture(lambda: None)
    captured._check_rates({optimizer: [0.1]}, {optimizer: [0.1]})
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(lamina.UsageError, match=r"group 0 of SGD \(0.1 -> 0.05\)"):
        captured._check_rates({optimizer: [0.1]}, {optimizer: [0.05]})


def test_an_optimizer_that_would_keep_its_rate_is_refused() -> None:
    captured = lamina.capture(lambda: None)
    captured._optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]
    with pytest.raises(lamina.UsageError, match="group 0 of SGD would keep its learning rate"):
        captured._check_optimizers()


@pytest.mark.parametrize(("name", "value"), [("weight_decay", 0.5), ("max_norm", 2.0)])
def test_a_constant_that_changes_afterwards_is_named(name: str, value: float) -> None:
    optimizer = lamina.optim.AdamW([nn.Parameter(torch.ones(1))], max_norm=1.0)
    captured = lamina.capture(lambda: None)
    captured._frozen = {optimizer: capture._constants(optimizer)}
    captured._check_frozen()
    if name == "max_norm":
        optimizer.max_norm = value
    else:
        optimizer.param_groups[0][name] = value
    with pytest.raises(lamina.StateError, match=f"`{name}` of group 0 of AdamW was changed .* capture it anew"):
        captured._check_frozen()
