"""`launch` as its users meet it: scripts run by path, from standard input, in a notebook kernel, under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import lamina
from forked_programs import run_warm
from forked_ranks import define, launched
from lamina.errors import LaunchError, UsageError
from lamina.launch import launch
from notebooks import kernel

SOURCE = str(Path(__file__).parents[1] / "src")
DEFINITIONS = """
    import abc, dataclasses, enum, functools, os, sys, time, typing
    import torch
    import xml.etree.ElementTree
    import torch.distributed as dist
    from torch import nn
    from lamina.launch import launch

    @dataclasses.dataclass
    class Config:
        width: int
        names: list = dataclasses.field(default_factory=list)

    class Color(enum.Enum):
        RED = 1
        BLUE = 2

    class Pair(typing.NamedTuple):
        x: int
        y: int = 2

        def total(self):
            return self.x + self.y

    class Base(nn.Module, abc.ABC):
        @abc.abstractmethod
        def forward(self, x): ...

        @functools.cached_property
        def width(self):
            return self.linear.in_features

        @property
        def doubled(self):
            return 2 * self.width

        @classmethod
        def name(cls):
            return cls.__name__

    class Net(Base):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            return self.linear(x) * SCALE

    @functools.lru_cache
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def counter():
        count = 0
        def more():
            nonlocal count
            count += 1
        def read():
            return count
        return more, read

    more, read = counter()
    SCALE = 1

    def work(config, color=Color.RED):
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("hello from", dist.get_rank())
        net = Net(config.width)
        net(torch.ones(1, config.width))
        assert (net.width, net.doubled, net.name(), Base.__abstractmethods__) == (8, 16, "Net", {"forward"})
        more()
        assert read() == 1 and xml.etree.ElementTree.Element("tag").tag == "tag"
        assert Config(1).names == [] and dataclasses.asdict(config) == {"width": 8, "names": [1]}
        assert color is Color.RED and Color(2) is Color.BLUE and Pair(1).total() == 3 and fib(10) == 55
        return total.item() * SCALE, config, color, Pair(3)

    SCALE = 10
"""
USE = """
    RANKS = 2
    result = launch(work, RANKS, (Config(8, [1]),))
    assert result == (10.0 * RANKS, Config(8, [1]), Color.RED, Pair(3)), result
    print("all", "fine")
"""
END_S = 3.0  # promised
ON_ONE = USE.replace("RANKS = 2", "RANKS = 1")


def program(*parts: str) -> str:
    return "".join(textwrap.dedent(part) for part in parts)


def start(arguments: list[str], **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.Popen(
        [sys.executable, *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=_listen_to_ctrl_c,
        **options,  # type: ignore[call-overload]
    )


def _listen_to_ctrl_c() -> None:
    """A shell has what it starts in the background ignore SIGINT, and so do the children of tests that run there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_script(folder: Path, *parts: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
    script = folder / "script.py"
    script.write_text(program(*parts))
    process = start([*before, str(script)])
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def run_text(text: str) -> tuple[int, str, str]:
    process = start(["-"], stdin=subprocess.PIPE)
    output, errors = process.communicate(text, timeout=120)
    return process.returncode, output, errors


def alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_script_without_an_import_guard(tmp_path: Path) -> None:
    code, output, errors = run_script(tmp_path, DEFINITIONS, USE)
    assert code == 0, errors
    lines = output.splitlines()
    assert sorted(lines) == ["[rank 1] hello from 1", "all fine", "hello from 0"] and lines[-1] == "all fine"


def test_a_program_read_from_standard_input() -> None:
    code, output, errors = run_warm(run_text, program(DEFINITIONS, ON_ONE))
    assert code == 0, errors
    assert "all fine" in output


def test_notebook_cells(tmp_path: Path) -> None:
    """A real Jupyter kernel: definitions in one cell, the launch in the next, output streamed to the cell."""
    with kernel(tmp_path) as notebook:
        notebook.run(program(DEFINITIONS))
        notebook.run(program(USE))
        assert not notebook.failures
        shown = "".join(notebook.shown)
        assert "hello from 0\n" in shown and "all fine" in shown
        notebook.run("def broken():\n    raise ValueError('oh no')  # the line of the cell\nlaunch(broken, 1)\n")
        (failure,) = notebook.failures
        assert failure.startswith("LaunchError: `broken` failed on rank 0 of 1: ValueError: oh no")
        assert "# the line of the cell" in failure and failure.count("Traceback") == 1


def test_output_comes_line_by_line_while_the_ranks_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    released = tmp_path / "released"
    script.write_text(
        program(
            """
            import pathlib, time
            from lamina.launch import launch

            def work(released):
                print("before")
                while not pathlib.Path(released).exists():
                    time.sleep(0.01)
                print("after")
            """,
            f"launch(work, 1, ({str(released)!r},))",
        )
    )
    run_warm(first_line_before_the_release, script, released)


def first_line_before_the_release(script: Path, released: Path) -> None:
    process = start([str(script)])
    assert process.stdout is not None
    assert process.stdout.readline() == "before\n"
    released.touch()
    output, errors = process.communicate(timeout=60)
    assert output == "after\n" and process.returncode == 0, errors


def test_one_error_for_the_rank_that_failed_first() -> None:
    """How the terminal of a script looks then is test_terminal.py's."""
    found = launched(
        """
        import torch.distributed as dist
        def work():
            dist.init_process_group("gloo")
            if dist.get_rank() == 1:
                raise ValueError("one rank only")
            dist.barrier()
        """,
        2,
    )
    assert found.failure is not None and not found.has_cause
    assert found.failure.startswith("`work` failed on rank 1 of 2: ValueError: one rank only")
    # that of the rank, nothing of the one that waited, and nothing printed by the ranks themselves
    assert found.failure.count("Traceback") == 1 and "launched.py" not in found.failure and found.printed == ""


def test_a_mistake_on_every_rank_is_said_once() -> None:
    found = launched(
        """
        from lamina.errors import UnitError
        def work():
            raise UnitError("units=['layer.*'] matches nothing; did you mean 'layers.*'?")
        """,
        2,
    )
    assert found.failure.startswith("`work` failed on all 2 ranks: lamina.errors.UnitError: units=")
    assert found.failure.count("Traceback") == 1 and not found.has_cause
    assert found.printed == ""


def test_a_rank_that_starts_late_is_waited_for_to_say_a_mistake_once() -> None:
    slow = "import os, time; time.sleep(3 * (os.environ['RANK'] == '0')); "  # longer than for ranks that have started
    found = launched("def work():\n    raise ValueError('one')", 2, before=slow)
    assert "failed on all 2 ranks: ValueError: one" in found.failure


def shards_on_all_but(idle: int) -> None:
    if int(os.environ["RANK"]) != idle:
        lamina.shard(torch.nn.Linear(2, 2))


def test_a_rank_that_returned_before_there_was_a_group_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"failed on ranks? .* of 3: .*rank 1 ended without a call that the others"):
        launch(shards_on_all_but, 3, (1,))
    assert time.monotonic() - started < 60


def test_a_died_rank_ends_the_others() -> None:
    found = launched(
        """
        import os, signal, time
        def work():
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        """,
        2,
    )
    assert "`work` died on rank 1 of 2: its process was ended by SIGKILL" in found.failure


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "launcher killed"])
def test_all_ranks_end_soon(tmp_path: Path, how: signal.Signals) -> None:
    """In one of three tries: a busy machine may hold up one."""
    script = tmp_path / "script.py"
    script.write_text(
        program(
            """
            import os, time
            import torch.distributed as dist
            from lamina.launch import launch

            def work():
                dist.init_process_group("gloo")
                print("id", os.getpid())
                if dist.get_rank() == 0:
                    dist.recv(__import__("torch").ones(1), 1)  # in C++, deaf to Ctrl-C
                time.sleep(100)

            launch(work, 2)
            """
        )
    )
    took_s = [run_warm(seconds_to_end, script, how)]
    while min(took_s) >= END_S and len(took_s) < 3:
        took_s.append(run_warm(seconds_to_end, script, how))
    assert min(took_s) < END_S, took_s


def seconds_to_end(script: Path, how: signal.Signals) -> float:
    """From the signal to the launcher until it and its ranks are gone."""
    process = start([str(script)])
    assert process.stdout is not None
    ranks = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    assert all(alive(rank) for rank in ranks)
    process.send_signal(how)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=60)
    while any(alive(rank) for rank in ranks) and time.monotonic() - begin < 60:
        time.sleep(0.02)
    assert not any(alive(rank) for rank in ranks)
    if how == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt") and errors.count("Traceback") == 1
    return time.monotonic() - begin


def test_under_torchrun_the_function_is_just_called(tmp_path: Path) -> None:
    code, output, errors = run_warm(
        run_script,
        tmp_path,
        """
        import os
        from lamina.launch import launch
        result = launch(lambda rank: rank, args=(os.environ["RANK"],))
        print(f"result {result}\\n", end="")  # in one piece: what ranks print is not to be mixed
        """,
        before=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )
    assert code == 0, errors
    assert sorted(output.split()) == ["0", "1", "result", "result"]


def test_the_default_number_of_processes_is_told() -> None:
    found = launched("import os\ndef work():\n    return os.environ['WORLD_SIZE']", None)
    assert found.result == "2"
    assert "lamina.launch: `work` on 2 CPU processes (no GPU was found)" in found.printed


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"nprocs=3, but this machine has 2 GPUs"):
        launch(print, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5,), "fn must be a function, got int"),
        ((print, 0), "positive number of processes or None, got 0"),
        ((print, 2, "text"), r"args must be a tuple.*got str"),
    ],
)
def test_arguments_that_mean_nothing(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launch(*arguments)  # type: ignore[arg-type]


def test_another_number_than_the_ranks_that_are_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="nprocs=4, but this process is one of 2 ranks that run"):
        launch(print, 4)


def test_what_cannot_be_sent_is_named() -> None:
    work = define("import os\nlog = open(os.devnull)\ndef work():\n    return log.name")
    with pytest.raises(LaunchError, match="`work` cannot be sent to other processes because of the global `log`"):
        launch(work, 2)


def test_a_result_that_cannot_come_back_is_named() -> None:
    """And a rank that has returned, and is on its way out, is ended without a word."""
    slow_end = "; import time; time.sleep(30)"
    rank_0_last = "def work():\n    import os, time\n    time.sleep(0.5 * (os.environ['RANK'] == '0'))\n"
    found = launched(rank_0_last + "    return (i for i in range(3))", 2, after=slow_end)
    assert "the result of rank 0, a generator, cannot be sent back" in found.failure
    assert found.printed == ""


UNREAD = """
    import os, sys, time
    from lamina import launch

    def talk(folder):
        rank = os.environ["RANK"]
        try:
            open(f"{folder}/begun {rank}", "w").close()
            while True:
                time.sleep(0.01)
                if all(os.path.exists(f"{folder}/begun {each}") for each in (0, 1)):
                    print("more")
        finally:
            print("the end")
            open(f"{folder}/saved {rank}", "w").close()

    try:
        launch(talk, 2, (sys.argv[1],))
    except OSError:
        sys.exit(3)
"""


def test_ranks_whose_output_cannot_be_written_end_in_order(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(program(UNREAD))
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, str(script), str(tmp_path)],
            stdout=full,
            env={**os.environ, "PYTHONPATH": SOURCE},
            preexec_fn=_listen_to_ctrl_c,
            timeout=60,
        )
    assert ended.returncode == 3
    assert (tmp_path / "saved 0").exists() and (tmp_path / "saved 1").exists()
