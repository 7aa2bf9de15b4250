"""Options of the commands that argparse reads: what is wrong with them is said in one line, like all that is wrong.

argparse prints its usage, thirty options long, above the word that matters, and ends the process. Here it raises.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lamina.errors import UsageError


class Options(argparse.ArgumentParser):
    """A parser whose mistakes are `UsageError`s; options cannot be shortened."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; `{self.prog} --help` names what there is")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Raises `UsageError` for what is unknown, with the nearest option, and for values of the wrong kind."""
        options, unknown = self.parse_known_args(list(words))
        if not unknown:
            return options
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"`{self.prog} --help` names what there is"
        raise UsageError(f"unknown {unknown[0]}; {hint}")


def check_writable(option: str, path: Path, example: str) -> None:
    """Before anything is computed: a file can be written there. Raises `UsageError`."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: give the name of a file in a folder that exists, such as {example}")


def write(option: str, path: Path, text: str) -> None:
    """Raises `UsageError` for what the system does not let us write."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"{option} {path}: {problem.strerror}") from None
