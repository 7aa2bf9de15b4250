"""`lamina trace FILE`: the sums of a recorded trace, and a picture of any of its steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lamina.core.options import Options
from lamina.errors import UsageError
from lamina.trace.draw import draw_recording, save_picture
from lamina.trace.recording import load_trace


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    what = "Show what `lamina train --trace` or lamina.trace() has recorded."
    parser = Options("lamina trace", what)
    parser.add_argument("file", help="trace.json")
    parser.add_argument("--step", type=int, help="draw this one of its steps")
    parser.add_argument("--picture", help="into this .svg, .png or .pdf (default: beside the file)")
    try:
        options = parser.read(argv)
        show(options.file, options.step, options.picture)
    except UsageError as error:
        print(f"lamina trace: {error}", file=sys.stderr)
        return 1
    return 0


def show(file: str, number: int | None, picture: str | None) -> None:
    """Print the sums; draw step `number`, from 1, if one is asked for."""
    recording = load_trace(file)
    print(recording)
    if number is None:
        return
    steps = recording.steps
    if not 1 <= number <= len(steps):
        raise UsageError(f"--step {number}: {file} holds steps 1 to {len(steps)}")
    picture = picture or str(Path(file).with_suffix(".png"))
    save_picture(draw_recording(steps[number - 1]), picture)
    print(f"step {number}: {picture}")
