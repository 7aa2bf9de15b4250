"""The README and docs/ are true: programs run and print what they say, links lead somewhere, commands are CI's.

A block of docs/ that begins with "python run" is a program, which "python more" goes on with; two ranks run it, or with
"python run alone" one process. The blocks "text output" behind it are what rank 0 prints, up to white space.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import lamina
from forked_programs import run_warm
from harness import run_alone, run_ranks
from lamina import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


API_PAGES = [ROOT / "docs" / "api.md", ROOT / "docs" / "errors.md"]


class Snippet(NamedTuple):
    """A program of a page, and what it prints."""

    where: str
    text: str
    output: str
    alone: bool


def snippets_of(page: Path) -> list[Snippet]:
    found: list[Snippet] = []
    text = page.read_text()
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        mark, body = match[1].split(), match[2]
        if mark[:2] == ["python", "run"]:
            line = text.count("\n", 0, match.start()) + 1
            found.append(Snippet(f"{page.name}:{line}", body, "", mark[2:] == ["alone"]))
        elif mark == ["python", "more"]:
            found[-1] = found[-1]._replace(text=found[-1].text + body)
        elif mark == ["text", "output"]:
            found[-1] = found[-1]._replace(output=found[-1].output + body)
    return found


SNIPPETS = [snippet for page in PAGES[1:] for snippet in snippets_of(page)]


def run(arguments: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["python", "torchrun"])
def test_the_first_program(launcher: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[0])
    printed = run([*launcher, "program.py"], tmp_path) if launcher else run_warm(run, ["program.py"], tmp_path)
    losses = re.findall(r"loss ([\d.]+)", printed)
    assert len(losses) == (2 if launcher else 1)
    assert all(float(loss) < 0.1 for loss in losses), "an untrained model has 0.45"


@pytest.mark.parametrize("index", range(1, len(PROGRAMS)))
def test_the_other_programs(index: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[index])
    run_alone(printed, program)


def test_the_first_program_is_short() -> None:
    assert len(PROGRAMS[0].strip().splitlines()) <= 12


def test_the_commands() -> None:
    first, second = (command.strip() for command in COMMANDS)
    for command in (first, second):
        assert command.startswith("pip install torch==2.13.0 && ") and "\n" not in command
    assert first.endswith("pip install -e . && lamina train")
    assert 'lamina = "lamina.cli:main"' in (ROOT / "pyproject.toml").read_text()
    assert second.endswith("python -m pytest -n 3 --dist loadfile")
    assert "grep -m 1 '^pip install .*pytest' README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_command_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in ((["--help"], 0), (["nope"], 2)):
        monkeypatch.setattr("sys.argv", ["lamina", *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("lamina", run_name="__main__")
        assert end.value.code == code
    said = capsys.readouterr()
    assert "lamina doctor" in said.out and "no command `nope`" in said.err


PLANS = r"`lamina (plan llama-8b [^`]*)`.*?^```text\n(.*?)^```"
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def test_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "llama-8b" / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.chdir(tmp_path)
    in_readme, in_docs = (
        re.search(PLANS, page.read_text(), re.MULTILINE | re.DOTALL).groups()  # type: ignore[union-attr]
        for page in (ROOT / "README.md", ROOT / "docs" / "plan.md")
    )
    assert in_readme[0] == in_docs[0] and in_docs[1].startswith(in_readme[1])
    assert cli.main(in_docs[0].split()) == 0
    found = [in_words_and_numbers(line) for line in capsys.readouterr().out.splitlines()]
    for line in in_docs[1].splitlines():
        words, numbers = in_words_and_numbers(line)
        alike = (told for said, told in found if said == words)
        assert line == "  ..." or pytest.approx(numbers, rel=0.02) in alike, line


def in_words_and_numbers(line: str) -> tuple[str, list[float]]:
    numbers = re.compile(r"\d[\d,]*\.?\d*")
    return " ".join(numbers.sub("", line).split()), [float(n.replace(",", "")) for n in numbers.findall(line)]


def printed(program: Path) -> str:
    """In another process: run a program in a file (the source of its classes can be read), return what it prints."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.chdir(program.parent):
        runpy.run_path(str(program), run_name="__main__")
    return stream.getvalue()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.where)
def test_programs_of_the_docs(snippet: Snippet, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(snippet.text)
    output = run_alone(printed, program) if snippet.alone else run_ranks(2, printed, program)[0]
    if snippet.output:
        assert output.split() == snippet.output.split()


def test_every_public_name_has_a_section() -> None:
    text = "\n".join(page.read_text() for page in API_PAGES)
    titles = re.findall(r"^#+ ([^\n]*)", text, re.MULTILINE)
    told = {name for title in titles for name in re.findall(r"`(?:lamina\.)?(\w+)", title)}
    assert not sorted(set(lamina.__all__) - told - {"optim"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_figures_on_the_front_page_are_those_of_the_results() -> None:
    picture = runpy.run_path(str(ROOT / "benchmarks" / "gpu_step" / "picture.py"))
    shown = {
        "lamina": ("core_1b", "lamina-peer"),
        "lamina, over NCCL alone": ("core_1b", "lamina"),
        "FSDP2": ("core_1b", "fsdp2-fp32"),
        "FSDP1": ("strategies_1b", "fsdp1"),
        "DDP": ("strategies_1b", "ddp"),
        "Megatron-FSDP": ("megatron_1b", "megatron"),
    }
    plain = TEXT.replace("**", "")
    for name, (file, way) in shown.items():
        rows = picture["rows_of"](file)
        share = f"{picture['share'](rows[way], rows['bound']):.3f}"
        if file == "core_1b":
            times = rows[way]["rounds_ms"].items()
            shares = [rows["bound"]["rounds_ms"][key] / ms for key, ms in times]
            share += f" ({min(shares):.3f} to {max(shares):.3f})"
        line = f"| {name} | {rows[way]['ms']:.1f} | {share} | {rows[way]['used_gib']:.1f} |"
        assert line in plain, line
