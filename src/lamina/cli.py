"""The command `lamina`: one word chooses the part, which is imported only then."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

USAGE = """lamina: fully sharded training for PyTorch

    lamina train        train a small GPT, or fine-tune a model: `lamina train --help`
    lamina sample       let a trained model write
    lamina checkpoint   inspect, verify, convert, export checkpoints
    lamina plan         memory and time of a run, and the simplest way to run it, before there is a GPU
    lamina doctor       measure this machine, warn of what is wrong with it
    lamina trace        sums and pictures of what `lamina train --trace` has recorded
"""
PARTS = {  # word -> module with main(argv) -> exit code
    "train": "lamina.train.cli",
    "sample": "lamina.train.sample_cli",
    "checkpoint": "lamina.checkpoint.commands",
    "plan": "lamina.train.plan_cli",
    "doctor": "lamina.planner.doctor",
    "trace": "lamina.trace.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    word, rest = words[0], words[1:]
    if word not in PARTS:
        near = difflib.get_close_matches(word, PARTS, n=1)
        return _refused(f"no command `{word}`; {f'did you mean `lamina {near[0]}`?' if near else 'type lamina --help'}")
    try:
        part = importlib.import_module(PARTS[word])
    except ModuleNotFoundError as missing:
        if missing.name == PARTS[word]:
            return _refused(f"`lamina {word}` is not built yet")
        return _refused(f"`lamina {word}` needs {missing.name}: pip install {missing.name}")
    return _read_to_the_end(part.main, rest)


def _read_to_the_end(part: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Its exit code; that of a program ended by SIGPIPE where nobody reads on, as behind `| head`."""
    try:
        code = part(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python flushes once more when it ends
        os.close(nowhere)
        return 128 + signal.SIGPIPE
    return code


def _refused(message: str) -> int:
    print(f"lamina: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
