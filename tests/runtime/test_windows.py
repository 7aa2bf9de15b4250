"""A unit's places in its modules are exchanged all together, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamina.errors import ParameterChanged
from lamina.runtime.windows import Entry, Window


def places() -> tuple[nn.ModuleList, list[Entry], list[nn.Parameter]]:
    """Three modules, the last tied to the first."""
    modules = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    modules[2].weight = modules[0].weight
    entries = [Entry(m._parameters, "weight", n % 2, f"{n}.weight") for n, m in enumerate(modules)]
    return modules, entries, [modules[0].weight, modules[1].weight]


def test_opens_and_shuts_everywhere() -> None:
    modules, entries, params = places()
    window = Window(entries, params)
    shown = [nn.Parameter(torch.ones(2, 2)) for _ in params]
    window.open(window.values(shown))
    assert [m.weight is shown[n % 2] for n, m in enumerate(modules)] == [True] * 3
    window.shut()
    assert [m.weight is params[n % 2] for n, m in enumerate(modules)] == [True] * 3
    window.check()


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("was_deleted", [False, True])
def test_one_that_was_written_is_named_and_the_others_stay(place: int, was_deleted: bool) -> None:
    modules, entries, params = places()
    window = Window(entries, params)
    values = window.values([nn.Parameter(torch.ones(2, 2)) for _ in params])
    if was_deleted:
        del modules[place].weight
    else:
        modules[place].weight = nn.Parameter(torch.zeros(2, 2))
    found = dict(enumerate(m._parameters.get("weight") for m in modules))
    for act in (lambda: window.open(values), window.check):
        with pytest.raises(ParameterChanged, match=f"`{place}.weight` was {'deleted' if was_deleted else 'replaced'}"):
            act()
        assert dict(enumerate(m._parameters.get("weight") for m in modules)) == found
