"""A program that is forked shows what one in an interpreter of its own shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forked_programs import program_of, run_warm

PROGRAM = """
import atexit, multiprocessing, os, signal, sys
import threading, time

atexit.register(print, "at exit")
print(__name__, globals().get("__file__"), sys.argv, os.getcwd(), sys.path[0])
print(os.environ.get("GIVEN"), "HOME" in os.environ)
print(os.getsid(0) == os.getpid(), multiprocessing.parent_process(), multiprocessing.current_process().name)
print(sorted(map(int, os.listdir("/proc/self/fd")))[:3], [os.path.exists(f"/proc/self/fd/{n}") for n in PIPES])
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR1)])
print(sys.stdout.line_buffering, sys.stdout.write_through, sys.modules["__main__"].__dict__ is globals())
print("read:", sys.stdin.read() if sys.argv[0] != "-" else "", "forked_programs" in sys.modules)
print("to stderr", file=sys.stderr)
def annotated(x: int): ...
assert annotated.__annotations__ == {"x": int}
threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread"))).start()
END
"""
ENDS = {
    "falls off": "",
    "exits": "sys.exit(3)",
    "exits with words": "sys.exit('words')",
    "raises": "def inner():\n    raise ValueError('oh no')\ninner()",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), signal.SIGTERM)",
}


def shown_by(command: list[str], folder: str, text: str | None, new_session: bool) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    kept, other = os.pipe()
    environment = {"GIVEN": "a value", "PYTHONPATH": folder, "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [part.replace("PIPES", repr((kept, other))) for part in command],
        cwd=folder,
        env=environment,
        input=text.replace("PIPES", repr((kept, other))) if text else "input",
        pass_fds=(kept,),
        start_new_session=new_session,
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(kept)
    os.close(other)
    return done.returncode, done.stdout, done.stderr


def all_shown(cases: list[tuple[list[str], str | None, bool]], folder: str) -> list[tuple[int, str, str]]:
    return [shown_by(command, folder, text, new_session) for command, text, new_session in cases]


def test_every_way_to_start_and_to_end(tmp_path: Path) -> None:
    cases: list[tuple[list[str], str | None, bool]] = []
    for number, (end, code) in enumerate(ENDS.items()):
        text = PROGRAM.replace("END", code)
        name = f"program_{end.replace(' ', '_')}"
        (tmp_path / f"{name}.py").write_text(text.replace("PIPES", "(9, 10)"))
        cases.append(([sys.executable, f"{name}.py", "one", "two"], None, number % 2 == 0))
        cases.append(([sys.executable, "-u", "-c", text, "one"], None, number % 2 == 1))
        cases.append(([sys.executable, "-m", name, "one"], None, False))
        cases.append(([sys.executable, "-"], text, True))
    forked, true = run_warm(all_shown, cases, str(tmp_path)), all_shown(cases, str(tmp_path))
    for (command, _, _), mine, wanted in zip(cases, forked, true, strict=True):
        assert mine == wanted, command
    assert {code for code, _, _ in true} == {0, 1, 3, -2, -15}


@pytest.mark.parametrize("arguments", [["-X", "dev", "a.py"], ["-Wignore", "a.py"], ["-i"], []])
def test_what_only_an_interpreter_can_do_is_left_to_one(arguments: list[str]) -> None:
    assert program_of([sys.executable, *arguments]) is None
    assert program_of(["/bin/sh", "a.py"]) is None
