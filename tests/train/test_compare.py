"""A comparison adds up, names what was made slower, and refuses what cannot be compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lamina import cli
from lamina.errors import UsageError
from lamina.planner.machine import load_machine
from lamina.planner.plan import Plan
from lamina.planner.rates import Reached
from lamina.planner.timeline import COMPUTE, Span
from lamina.trace.recording import OPTIMIZER, WAIT, Recording
from lamina.train.compare import compare, config_of_pass, forecast_spans, kind_of, machine_for
from lamina.train.config import to_toml
from lamina.train.plan_cli import forecast
from lamina.train.planned import open_planned
from train.runs import changed, small

RANKS, PASSES, LAYERS = 4, 2, 3
CONFIG = changed(
    small(Path("data.txt"), Path("out")), layers=LAYERS, accumulate=PASSES, batch=2 * RANKS * PASSES, precision="bf16"
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of a run on GPUs; its step is mostly the host's time."""
    config = config_of_pass(CONFIG, Recording("cuda", 0, RANKS, (), (), (), ()))
    assert config.batches.batch == 2
    return forecast(config, open_planned(None, config), RANKS, load_machine("h100"), "zero3")


def as_forecast(plan: Plan, slower: str = "", by_ms: float = 0.0, steps: int = 1) -> Recording:
    """A trace of steps that went as forecast, but for the uses of one label, which took longer."""
    time, spans, ends_ms, shift_ms = plan.taken.time, list[Span](), list[float](), 0.0
    for _ in range(steps):
        begin_ms, late_ms, reached_ms = shift_ms, 0.0, 0.0
        for span in sorted(forecast_spans(plan), key=lambda s: (s.start_ms, s.end_ms)):
            before_ms, late_ms = late_ms, late_ms + (by_ms if span.label.startswith(slower or "-") else 0.0)
            end_ms = span.end_ms if span.label != OPTIMIZER else span.end_ms - Reached().step_ms
            spans.append(Span(span.lane, span.label, begin_ms + span.start_ms + before_ms, begin_ms + end_ms + late_ms))
            if span.lane == COMPUTE:
                if span.start_ms > reached_ms + 1e-9:
                    waits = begin_ms + before_ms
                    spans.append(Span(COMPUTE, WAIT + "AG0", waits + reached_ms, waits + span.start_ms))
                reached_ms = span.end_ms
        shift_ms = begin_ms + time.total_ms + late_ms
        ends_ms.append(shift_ms)
    spans.sort(key=lambda span: span.start_ms)
    memory = ((0.0, 1 << 20), (1.0, plan.taken.memory.peak.total_bytes))
    return Recording("cuda", 0, RANKS, plan.units, tuple(spans), memory, tuple(ends_ms))


def test_a_step_that_went_as_forecast_has_no_differences(plan: Plan) -> None:
    made = compare(plan, as_forecast(plan))
    assert made.whole.observed_ms == pytest.approx(plan.taken.time.total_ms)
    assert made.whole.forecast_ms == pytest.approx(plan.taken.time.total_ms)
    apart = {row.what: row.difference_ms for row in made.rows if not row.what.startswith("waiting")}
    assert apart == {what: pytest.approx(0, abs=1e-6) for what in apart}
    assert "no part of it differs" in str(made)
    assert made.observed_bytes == made.forecast_bytes


def test_what_took_longer_is_said_first(plan: Plan) -> None:
    made = compare(plan, as_forecast(plan, "BWD2", 7.0))
    slow = next(row for row in made.rows if row.what == "backward of layers.*")
    assert slow.difference_ms == pytest.approx(7.0 * PASSES) and made.largest[0] == slow
    assert made.named()[0].startswith(
        f"backward of layers.*: {slow.observed_ms:.1f} ms observed, {slow.forecast_ms:.1f} forecast (+"
    )
    assert made.whole.difference_ms == pytest.approx(7.0 * PASSES)
    assert f"+{7.0 * PASSES:.1f} of +{7.0 * PASSES:.1f} ms of the whole difference" in str(made)


def test_the_step_of_median_length_is_shown(plan: Plan) -> None:
    steps = as_forecast(plan, steps=3)
    first, second, third = steps.step_ends_ms
    longer = dataclasses.replace(steps, step_ends_ms=(first, second, third + 50))
    assert compare(plan, longer).number in (1, 2)


def test_what_cannot_be_compared_is_refused(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a real run leaves is compared in test_runs.py."""

    def refused(*words: str) -> str:
        assert cli.main(["plan", *words]) == 1
        return capsys.readouterr().err

    assert "lamina train --trace" in refused("--compare", str(tmp_path))
    assert "type --compare RUN" in refused("--picture", "a.png")
    assert "leave --gpus out" in refused("--compare", str(tmp_path), "--gpus", "4")
    captured = (Span(COMPUTE, OPTIMIZER, 0.0, 1.0),)
    Recording("cuda", 0, RANKS, plan.units, captured, ((0.0, 1),), (2.0,)).save(tmp_path / "trace.json")
    assert "run.toml is missing" in refused("--compare", str(tmp_path / "trace.json"))
    (tmp_path / "run.toml").write_text(to_toml(CONFIG))
    assert "lamina.capture replays" in refused("--compare", str(tmp_path))

    seen = as_forecast(plan)
    with pytest.raises(UsageError, match="`layers.9` is in one only"):
        compare(plan, dataclasses.replace(seen, units=(*plan.units, "layers.9")))
    wider = (*plan.numels[:-1], 2 * plan.numels[-1])
    with pytest.raises(UsageError, match=f"`{plan.units[-1]}` has {wider[-1]:,} parameters in the trace and"):
        compare(plan, dataclasses.replace(seen, numels=wider))
    assert compare(plan, dataclasses.replace(seen, numels=plan.numels)).whole
    with pytest.raises(UsageError, match="settings of another run"):
        config_of_pass(CONFIG, dataclasses.replace(seen, world=3))
    for changes, said in (({"strategy": "auto"}, "sharding.strategy"), ({"length": None}, "batches.length")):
        with pytest.raises(UsageError, match=said):
            config_of_pass(changed(CONFIG, **changes), seen)
    with pytest.raises(UsageError, match="the trace is of a CPU, and h100"):
        machine_for(dataclasses.replace(seen, device="cpu"), "h100")
    monkeypatch.setattr("lamina.train.compare.OWN", tmp_path / "nothing.toml")
    with pytest.raises(UsageError, match="run `lamina doctor` there, or type --machine h100"):
        machine_for(seen, None)


def test_units_of_several_blocks_are_of_the_same_kind() -> None:
    assert {kind_of(name) for name in ("layers.3", "layers.0-3", "layers.12-15")} == {"layers.*"}
    assert kind_of("stages.1.blocks.2+head") == "stages.*.blocks.*+head"
