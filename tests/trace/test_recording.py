"""A trace holds what the runtime did: order, sums, waits; and leaves nothing behind."""

from __future__ import annotations

import functools
import json
import operator
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import expect_error, run_ranks
from lamina.errors import StateError, UsageError
from lamina.planner.timeline import COMPUTE, GATHER, REDUCE, Span
from lamina.runtime.assemble import RUNTIMES
from lamina.runtime.phase import Kind
from lamina.trace.command import main
from lamina.trace.recording import Recording, load_trace, title_of, without_waits

WIDTH, LAYERS, WARM, STEPS = 64, 3, 2, 2
LATE_S = 0.5


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def built(transport: str, slots: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = lamina.shard(Chain(), units=[nn.Linear], transport=transport, slots=slots)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    return [step(model, optimizer, number) for number in range(first, first + count)]


def record(transport: str, folder: Path) -> tuple[list[float], list[float], Recording, list[str], list[int]]:
    """Losses untraced and traced; on the first rank what was recorded, a step's program, gathers by unit."""
    losses = steps(*built(transport), 0, WARM + STEPS + 1)
    model, optimizer = built(transport)
    traced = steps(model, optimizer, 0, WARM)
    before = [unit.gathers for unit in lamina.report(model).units]
    with lamina.trace(folder / "trace.json", model, ranks="all") as trace:
        traced += steps(model, optimizer, WARM, STEPS)
    gathers = [unit.gathers - was for unit, was in zip(lamina.report(model).units, before, strict=True)]
    traced += steps(model, optimizer, WARM + STEPS, 1)
    engine = RUNTIMES[model].engine
    parts = (engine, engine.gatherer, engine.reducer, engine.gradients)
    left = [name for part in parts for name in TAPPED if name in vars(part)]
    assert not left, f"still tapped: {left}"
    programs = sorted(engine.programs.known.items(), key=lambda item: item[0].kind is Kind.BACKWARD)
    program = [str(s) for _, recorded in programs for s in recorded.steps]
    assert trace.recording is not None
    return losses, traced, trace.recording, program, gathers


TAPPED = ("enter", "_shut", "_fill", "finish", "publish", "begin", "start", "settle")


def first_time(labels: list[str]) -> list[str]:
    return list(dict.fromkeys(labels))


@pytest.mark.parametrize("transport", ["c10d", "peer"])
def test_a_trace_is_what_the_program_says(transport: str, tmp_path: Path) -> None:
    for rank, (losses, traced, recording, program, gathers) in enumerate(run_ranks(2, record, transport, tmp_path)):
        assert traced == losses, "a trace changes nothing"
        assert len(recording.steps) == STEPS == len(recording.summary())
        for one in recording.steps:
            lanes = {lane: [s.label for s in one.spans if s.lane == lane] for lane in (COMPUTE, GATHER, REDUCE)}
            uses = [label for label in lanes[COMPUTE] if title_of(label) is not None]
            assert first_time(uses) == [word for word in program if word.startswith(("FWD", "BWD"))]
            assert lanes[REDUCE] == [word for word in program if word.startswith("RS")]
            if transport == "c10d":  # peers gather what is not there yet; their program's gathers are hints
                assert lanes[GATHER] == [word for word in program if word.startswith("AG")]
        counted = [sum(column) for column in zip(*(row.gathers for row in recording.summary()), strict=True)]
        assert counted == gathers and sum(gathers) > 0
        check_sums(recording)
        name = "trace.json" if rank == 0 else "trace.rank1.json"
        read = load_trace(tmp_path / name)
        assert [s.label for s in read.spans] == [s.label for s in recording.spans]
        assert read.units == recording.units and len(read.steps) == STEPS
        assert (tmp_path / name).with_suffix(".png").stat().st_size > 10_000
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"} and all("pid" in event for event in events)


def check_sums(recording: Recording) -> None:
    for one, row in zip(recording.steps, recording.summary(), strict=True):
        busy = [s for s in one.spans if s.lane == COMPUTE]
        assert all(0 <= s.start_ms <= s.end_ms <= row.wall_ms + 1e-6 for s in busy)
        assert row.compute_ms > 0 and row.optimizer_ms > 0 and row.gather_ms > 0 and row.reduce_ms > 0
        apart = row.compute_ms + row.optimizer_ms + row.exposed_ms
        assert apart <= row.wall_ms + 1e-6, "nothing is counted twice"
        assert 0 <= row.hidden_share <= 1
        assert row.peak_bytes >= max(size for _, size in one.memory) > 1e6


def record_one_slot(folder: Path) -> tuple[list[str], Recording]:
    """With one slot, gradients are reduced by a reduce-scatter, which does not tell when it has ended."""
    model, optimizer = built("c10d", slots=1)
    with lamina.trace(folder / "trace.json", model, ranks="all") as trace:
        step(model, optimizer, 0)
    assert trace.recording is not None
    return [f"RS{unit.index}" for unit in RUNTIMES[model].engine.units], trace.recording


def test_a_reduction_that_tells_no_end_ends_where_it_is_waited_for(tmp_path: Path) -> None:
    for units, recording in run_ranks(2, record_one_slot, tmp_path):
        found = [span for span in recording.spans if span.lane == REDUCE]
        assert sorted(span.label for span in found) == units and all(span.duration_ms > 0 for span in found)
        check_sums(recording)


def test_the_command_shows_a_trace_and_draws_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = (Span(COMPUTE, "FWD0", 0.0, 2.0), Span(COMPUTE, "optimizer", 2.0, 3.0), Span(COMPUTE, "FWD0", 4.0, 5.0))
    Recording("cpu", 0, 1, ("head",), spans, ((0.0, 2**20),), (3.0, 6.0)).save(tmp_path / "trace.json")
    picture = tmp_path / "one.svg"
    assert main([str(tmp_path / "trace.json"), "--step", "2", "--picture", str(picture)]) == 0
    assert "step 1: 3.0 ms: compute 2.0, optimizer 1.0" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")
    assert main([str(tmp_path / "trace.json"), "--step", "3"]) == 1
    assert "steps 1 to 2" in capsys.readouterr().err
    for words, said in (
        (["--step", "one"], "--step: invalid int value: 'one'"),
        (["--step", "2", "--picture", str(tmp_path / "one.xyz")], ".png, .svg or .pdf"),
        (["--step", "2", "--picture", str(tmp_path / "no" / "one.png")], "in a folder that exists"),
    ):
        assert main([str(tmp_path / "trace.json"), *words]) == 1
        error = capsys.readouterr().err
        assert said in error and len(error.splitlines()) == 1


def late(folder: Path) -> float:
    """What the first rank waits for in a step that the second one begins late."""
    model, optimizer = built("c10d")
    steps(model, optimizer, 0, WARM)
    with lamina.trace(folder / "trace.json") as trace:
        dist.barrier()  # from here on only one of them is late
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        step(model, optimizer, WARM)
    assert (trace.recording is None) == (dist.get_rank() == 1), "by default the first rank records"
    return 0.0 if trace.recording is None else trace.recording.summary()[0].exposed_gather_ms


def test_waiting_for_a_late_rank_is_an_exposed_gather(tmp_path: Path) -> None:
    assert run_ranks(2, late, tmp_path)[0] > 0.9 * LATE_S * 1e3


def fail(folder: Path) -> None:
    model, optimizer = built("c10d")
    with pytest.raises(ZeroDivisionError), lamina.trace(folder / "trace.json", model):
        step(model, optimizer, 0)
        raise ZeroDivisionError
    assert not list(folder.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        again = pytest.raises(StateError, match="traced already")
        with lamina.trace(folder / "a.json", model), again, lamina.trace(folder / "b.json", model):
            pass
    step(model, optimizer, 1)


def test_after_an_error_nothing_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    run_ranks(2, fail, tmp_path)


def record_alone(folder: Path, precision: str | None) -> Recording:
    """One rank: a step of two passes, an evaluation, a step; the same losses as untraced."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for number in range(2):
            for index in range(2):
                with lamina.accumulate(model, last=index == 1):
                    loss = model(torch.full((8, WIDTH), 0.1 * (1 + index))).float().square().mean()
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                with torch.no_grad():
                    model(torch.ones(8, WIDTH))
        return losses

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = lamina.shard(Chain(), units=[nn.Linear], precision=precision)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    untraced = run(*fresh())
    model, optimizer = fresh()
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with lamina.trace(folder / "trace.json", model) as trace:
        assert run(model, optimizer) == untraced
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert trace.recording is not None
    return trace.recording


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_one_rank_shows_its_uses_and_no_evaluation(precision: str | None, tmp_path: Path) -> None:
    """In the masters' dtype such a model has no hooks of the runtime's."""
    (recording,) = run_ranks(1, record_alone, tmp_path, precision)
    count = LAYERS + 1
    units = range(len(recording.units) - count, len(recording.units))
    forward, backward = [f"FWD{i}" for i in units], [f"BWD{i}" for i in reversed(units)]
    assert len(recording.steps) == 2
    for one in recording.steps:
        uses = [s.label for s in one.spans if s.label in {*forward, *backward}]
        assert uses == 2 * [*forward, *backward] and "evaluation" not in {s.label for s in one.spans}
        (row,) = one.summary()
        assert row.compute_ms > 0 and row.compute_ms + row.optimizer_ms <= row.wall_ms
    assert "evaluation" in {span.label for span in recording.spans}


def trace_nothing(path: str) -> None:
    model = lamina.shard(Chain())
    with lamina.trace(path, model if path.endswith("json") else None):
        pass


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    expect_error(
        2, trace_nothing, str(tmp_path / "none" / "t.json"), error="UsageError", contains=["folder that exists"]
    )
    expect_error(2, trace_nothing, str(tmp_path / "t.txt"), error="UsageError", contains=[".json"])
    with pytest.raises(StateError, match="not sharded"), lamina.trace(tmp_path / "t.json", Chain()):
        pass
    (tmp_path / "other.json").write_text(json.dumps({"traceEvents": []}))
    for name in ("missing.json", "other.json"):
        with pytest.raises(UsageError, match="Record one with"):
            load_trace(tmp_path / name)


WRITTEN = Recording(
    "cpu", 1, 2, ("", "layers.0"), (Span(COMPUTE, "FWD1", 1.0, 2.0),), ((0.5, 1 << 20),), (3.0,), (8, 64)
).to_chrome()


@pytest.mark.parametrize(
    "place, value",
    [
        (("lamina",), 3),
        (("lamina", "format"), 99),
        (("lamina", "rank"), 2),
        (("lamina", "rank"), "one"),
        (("lamina", "world"), None),
        (("lamina", "device"), "tpu"),
        (("lamina", "units"), 7),
        (("lamina", "numels"), [3]),
        (("lamina", "step_ends_ms"), ["soon"]),
        (("lamina", "step_ends_ms"), [float("nan")]),
        (("traceEvents",), 3),
        (("traceEvents",), [3]),
        (("traceEvents", -2, "cat"), "nowhere"),
        (("traceEvents", -2, "dur"), "long"),
        (("traceEvents", -2, "ts"), float("inf")),
        (("traceEvents", -2, "args"), {}),
        (("traceEvents", -1, "args"), {"bytes": "many"}),
    ],
)
def test_a_damaged_trace_is_refused(place: tuple[Any, ...], value: object, tmp_path: Path) -> None:
    damaged = json.loads(json.dumps(WRITTEN))
    found = functools.reduce(operator.getitem, place[:-1], damaged)
    (tmp_path / "t.json").write_text(json.dumps(WRITTEN))
    assert load_trace(tmp_path / "t.json").to_chrome() == WRITTEN
    found[place[-1]] = value
    (tmp_path / "t.json").write_text(json.dumps(damaged))
    with pytest.raises(UsageError, match=r"trace .*t.json.* (Record one with|record it anew)"):
        load_trace(tmp_path / "t.json")


def test_uses_are_cut_where_compute_waits() -> None:
    def compute(label: str, start: float, end: float) -> Span:
        return Span(COMPUTE, label, start, end)

    waits = [compute("wait AG1", 2, 3), compute("wait RS0", 2.5, 4), compute("wait RS1", 8, 9)]
    cut = without_waits([*waits, compute("BWD0", 1, 6), compute("FWD1", 2.2, 2.4), compute("BWD1", 8.5, 10)])
    pieces = [(s.label, s.start_ms, s.end_ms) for s in cut if not s.label.startswith("wait")]
    assert pieces == [("BWD0", 1, 2), ("BWD0", 4, 6), ("BWD1", 9, 10)]
    assert waits == [s for s in cut if s.label.startswith("wait")]
