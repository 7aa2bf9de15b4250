"""Pictures hold every step on its lane, and are the committed files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from harness import run_alone
from lamina.core.arena import Demand, pack
from lamina.core.program import Op, Program
from lamina.planner.timeline import Span, simulate
from lamina.trace.draw import EXPOSED_COLOUR, draw_packing, draw_program, draw_recording, draw_spans, exposed_gaps
from lamina.trace.recording import Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs"
THREE = Program.parse("AG0 FWD0 AG1 FWD1 AG2 FWD2 BWD2 RS2 BWD1 RS1 BWD0 RS0")


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def make_pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lamina_docs_make_pictures", DOCS / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_step_is_a_bar_with_its_name() -> None:
    figure = draw_program(THREE)
    assert texts(figure) == THREE.text().split()
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["compute", "gather (AG)", "reduce (RS)"]


def test_bars_stand_on_their_lanes_at_their_times() -> None:
    durations_ms = {Op.GATHER: 1.0, Op.FORWARD: 2.0, Op.BACKWARD: 4.0, Op.REDUCE: 3.0}
    bars = [c.get_paths()[0].get_extents() for c in draw_program(THREE, durations_ms).axes[0].collections]
    assert len(bars) == len(THREE.steps) + len(exposed_gaps(simulate(THREE, durations_ms)))
    first_gather, first_forward = bars[0], bars[1]
    assert (first_gather.x0, first_gather.x1) == (0, 1) and first_gather.y0 < 1 < first_gather.y1
    assert (first_forward.x0, first_forward.x1) == (1, 3) and first_forward.y0 < 0 < first_forward.y1


def red_bars(figure: Figure) -> list[tuple[float, float]]:
    """Begin and end of every bar in the colour of waits."""
    from matplotlib.colors import to_hex

    extents = []
    for bar in figure.axes[0].collections:
        if to_hex(bar.get_facecolor()[0]) == EXPOSED_COLOUR:
            box = bar.get_paths()[0].get_extents()
            extents.append((box.x0, box.x1))
    return extents


def test_what_is_exposed_is_red() -> None:
    """By hand: compute waits for the first gather, for what is left of the second, and for nothing else."""
    durations_ms = {Op.GATHER: 3.0, Op.FORWARD: 2.0, Op.BACKWARD: 4.0, Op.REDUCE: 1.0}
    two = Program.parse("AG0 AG1 FWD0 FWD1 BWD1 RS1 BWD0 RS0")
    assert red_bars(draw_program(two, durations_ms)) == [(0, 3), (5, 6)]
    assert red_bars(draw_program(Program.parse("AG0 AG1 FWD0"), durations_ms)) == [(0, 3)]
    assert red_bars(draw_program(two, {**durations_ms, Op.GATHER: 0.0})) == []


def test_a_recorded_step_is_drawn_with_its_own_waits_and_memory() -> None:
    spans = (
        Span("gather", "AG0", 0.0, 2.0),
        Span("compute", "wait AG0", 0.5, 2.0),
        Span("compute", "FWD0", 2.0, 3.0),
        Span("compute", "optimizer", 4.0, 5.0),
    )
    step = Recording("cpu", 0, 2, ("",), spans, ((0.5, 2**20), (3.0, 2**21)), (5.0,))
    figure = draw_recording(step)
    assert red_bars(figure) == [(0.5, 2.0)]
    assert texts(figure) == ["AG root", "FWD root", "optimizer"]
    assert list(figure.axes[1].lines[0].get_ydata()) == [1, 2]
    assert "exposed 1.5 of gathers 2.0" in figure.axes[0].get_title(loc="left")


def test_units_may_have_names() -> None:
    assert texts(draw_program(Program.parse("AG0 FWD0"), names=["head"])) == ["AG head", "FWD head"]


def test_measured_spans_of_other_lanes_and_labels_are_drawn_too() -> None:
    spans = [
        Span("compute", "FWD0", 0.0, 2.0),
        Span("outer", "all-reduce", 1.0, 3.0),
        Span("compute", "loss", 2.0, 3.0),
    ]
    figure = draw_spans(spans, title="measured")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["compute", "outer"]
    assert texts(figure) == ["FWD0", "all-reduce", "loss"]
    assert draw_spans([]).axes


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_bars_of_an_arena_never_overlap(slots: int) -> None:
    demands = [Demand("", 300, True), *(Demand(f"u{i}", 1000 + 700 * (i % 3), False) for i in range(6))]
    figure = draw_packing(pack(demands, slots))
    boxes = [c.get_paths()[0].get_extents() for c in figure.axes[0].collections]
    assert len(boxes) == len(demands)
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            beside = one.x1 <= other.x0 or other.x1 <= one.x0
            assert beside or one.y1 <= other.y0 + 1e-9 or other.y1 <= one.y0 + 1e-9
    assert texts(figure) == [" root (resident)", *(f"u{i}" for i in range(6))]
    assert draw_packing(pack([], slots)).axes


def test_every_committed_picture_is_drawn_from_the_plan() -> None:
    """Not the bytes, which differ between versions of matplotlib: the names that stand in the picture."""
    drawn = make_pictures().pictures()
    assert sorted(drawn) == sorted(path.stem for path in (DOCS / "pictures").glob("*.svg"))
    for name, figure in drawn.items():
        svg = (DOCS / "pictures" / f"{name}.svg").read_text()
        title = figure.axes[0].get_title(loc="left")
        for text in (*texts(figure), title):
            assert f"<!-- {text.replace('  ', ' ')} -->".replace("<!--  ", "<!-- ") in svg.replace("  ", " ")


def test_the_module_does_not_import_matplotlib() -> None:
    """In a process that has all of lamina, but has not seen this file."""
    code = "[__import__('lamina.trace.draw'), 'matplotlib' in __import__('sys').modules][1]"
    assert run_alone(eval, code) is False
