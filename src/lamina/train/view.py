"""What a run shows: text, tables and one line that lives; on a terminal, in a log, or through the launcher.

Ranks that `lamina.launch` starts write into a pipe, so they cannot draw. Rank 0 sends what is to be shown as one line
of JSON behind a mark (`Relay`), and the launching process draws it (`RelayReader` in the place of its standard output).
Under torchrun rank 0 draws itself.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from lamina.runtime.report import readable_bytes

MARK = "\x1e"


@dataclass(frozen=True)
class Progress:
    """The live line."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    memory_bytes: int  # of the rank that has most
    left_s: float

    @property
    def text(self) -> str:
        return (
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}   loss {self.loss:6.3f}   "
            f"{self.tokens_per_s:>9,.0f} tokens/s   "
            f"{readable_bytes(self.memory_bytes):>9}   {readable_time(self.left_s)} left"
        )


def readable_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class View(Protocol):
    def say(self, text: str) -> None: ...

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """The first row holds the headings; all columns but the first are right-aligned."""

    def progress(self, state: Progress) -> None: ...

    def close(self) -> None: ...


class Silent:
    """Of ranks other than 0, and where there is no standard output."""

    def say(self, text: str) -> None:
        pass

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        pass

    def progress(self, state: Progress) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    """Lines, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        self.say(title)
        for row in rows:
            cells = [row[0].ljust(widths[0])] + [
                cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
            ]
            self.say("  " + "  ".join(cells).rstrip())

    def progress(self, state: Progress) -> None:
        self.say(state.text)

    def close(self) -> None:
        pass


class Terminal:
    """The live line at the bottom, with a bar; everything else above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self.console = Console(file=stream, highlight=False)
        columns = BarColumn(bar_width=16), TextColumn("{task.description}")
        # standard output stays what it is: the launching process reads from it what its ranks send (RelayReader)
        self.bar = Bar(*columns, console=self.console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self.task: Any = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)  # commands are copied from here: no line is cut in two

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for i, heading in enumerate(rows[0]):
            table.add_column(heading, justify="right" if i else "left")
        for row in rows[1:]:
            table.add_row(*row)
        self.console.print(table)

    def progress(self, state: Progress) -> None:
        if self.task is None:
            self.bar.start()
            self.task = self.bar.add_task("", total=state.steps)
        self.bar.update(self.task, completed=state.step, description=state.text)

    def close(self) -> None:
        if self.task is not None:
            self.bar.stop()
            self.task = None


class Relay:
    """To the launching process."""

    def _send(self, kind: str, **content: Any) -> None:
        sys.stdout.write(f"{MARK}{json.dumps({'kind': kind, **content})}\n")
        sys.stdout.flush()

    def say(self, text: str) -> None:
        self._send("say", text=text)

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        self._send("table", title=title, rows=[list(row) for row in rows])

    def progress(self, state: Progress) -> None:
        self._send("progress", state=asdict(state))

    def close(self) -> None:
        self._send("close")


class RelayReader(io.TextIOBase):
    """Standard output of the launching process: draws what `Relay` sent and passes on the rest."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.said = ""  # last
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)

    def _take(self, line: str) -> None:
        if not line.startswith(MARK):
            self.view.say(line)
            return
        message = json.loads(line[len(MARK) :])
        kind = message.pop("kind")
        if kind == "progress":
            self.view.progress(Progress(**message["state"]))
        else:
            self.said = message.get("text", self.said)
            getattr(self.view, kind)(**message)


def open_view(stream: TextIO | None) -> View:
    """`stream`: None in a process that was started with its standard output closed."""
    if stream is None:
        return Silent()
    return Terminal(stream) if stream.isatty() else Plain(stream)
