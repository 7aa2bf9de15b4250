"""Who writes which elements: every element once, whatever the factors; nobody asks anybody. Pure."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.checkpoint.contents import Held, spread
from lamina.core.layout import ParamSpec, lay_out
from lamina.core.mesh import DataMesh, Group
from lamina.core.strategy import Factors


def mesh_of(factors: Factors, rank: int) -> DataMesh:
    one = Group(None, 1, 0)
    ranks = tuple(range(factors.world))
    return DataMesh(
        factors, rank, ranks, torch.device("cpu"), (one,) * 3, (one,) * 3, one, one, one, None, None, None, None
    )


@st.composite
def factors(draw: st.DrawFn) -> Factors:
    steps = [draw(st.integers(1, 3)) for _ in range(4)]
    return Factors(*(math.prod(steps[: i + 1]) for i in range(4)))


SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@settings(max_examples=80, deadline=None)
@given(factors(), st.lists(SHAPES, min_size=1, max_size=5))
def test_every_element_is_written_once(chosen: Factors, shapes: list[tuple[int, ...]]) -> None:
    specs = [ParamSpec(f"p{i}", shape, torch.float32, torch.float32, True) for i, shape in enumerate(shapes)]
    (segment,) = lay_out("unit", specs, chosen.optimizer).segments
    for number, spec in enumerate(segment.params):
        values = torch.arange(spec.numel)
        seen, told = torch.zeros(spec.numel, dtype=torch.int64), set()
        for rank in range(chosen.world):
            held = Held(spec, torch.nn.Parameter(), mesh_of(chosen, rank), segment, number, None)  # type: ignore[arg-type]
            start, stop = held.written
            own_start, own_stop = held.owned
            assert own_start <= start <= stop <= own_stop or start == stop, "only what the rank has"
            seen[start:stop] += 1
            assert torch.equal(held.part(values[own_start:own_stop]), values[start:stop])  # of the rank's elements
            assert torch.equal(held.part(values), values[start:stop])  # or of all of them
            told.add(held.pieces)
            assert [(p.start, p.stop) for p in held.pieces if p.file == rank] == (
                [(start, stop)] if start < stop else []
            )
        assert (seen == 1).all() and len(told) == 1, "all ranks know the same pieces"
        assert [at for p in told.pop() for at in range(p.start, p.stop)] == list(range(spec.numel))


@given(st.lists(st.integers(0, 100)), st.integers(1, 5))
def test_whole_tensors_are_spread(sizes: list[int], world: int) -> None:
    load = [0] * world
    for size, rank in zip(sizes, spread(sizes, world), strict=True):
        load[rank] += size
    assert max(load) - min(load) <= max(sizes, default=0)
