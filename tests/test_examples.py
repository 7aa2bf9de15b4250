"""The examples run, and do what the pages about them say; the pages' snippets run in test_readme.py."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lamina
from harness import run_ranks
from notebooks import kernel

ROOT = Path(__file__).parents[1]
EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"
STEPS = 4


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # the source of its classes is looked for there
    spec.loader.exec_module(module)
    return module


def as_launched(fn: Callable[[], Any]) -> Any:
    """On a rank of the harness: with the launcher's variables, which scripts read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        return fn()
    finally:
        for name in variables:
            del os.environ[name]


# -- first steps


def run_first_steps() -> str:
    stream = io.StringIO()
    program = str(EXAMPLES / "first_steps.py")
    with contextlib.redirect_stdout(stream), mock.patch.object(sys, "argv", [program, "--steps", "3"]):
        as_launched(lambda: runpy.run_path(program, run_name="__main__"))
    return stream.getvalue()


def test_the_first_steps() -> None:
    """A few of them; all take a minute. How `launch` starts a script's ranks is test_launch.py's."""
    output, nothing = run_ranks(2, run_first_steps)
    assert re.search(r"loss .*bigram", output, re.DOTALL) and not nothing


# -- a loop of one's own, beside FSDP2


def diff_of_page() -> list[str]:
    (block,) = re.findall(r"^```diff\n(.*?)^```", (DOCS / "from-fsdp2.md").read_text(), re.MULTILINE | re.DOTALL)
    return block.splitlines()


def undone(text: str, diff: list[str]) -> str:
    """`text` without the lines that `diff` adds, and with those that it takes away before or behind them."""
    lines, at = text.splitlines(), 0
    taken: list[str] = []
    for line in diff:
        if line.startswith("-"):
            taken.append(line[1:])
        else:
            at = lines.index(line[1:], at)
            lines[at : at + 1] = taken
            at, taken = at + len(taken), []
    assert not taken
    return "\n".join(lines) + "\n"


def run_loops(folder: Path) -> tuple[list[float], list[float], float]:
    """Losses with FSDP2 and with lamina, and how far FSDP2's checkpoint is from lamina's weights and moments."""
    torch.set_default_dtype(torch.float64)  # Adam's first steps turn a gradient's rounding into steps of their own
    theirs = as_launched(lambda: module_of(folder / "fsdp2_loop.py").train(STEPS, str(folder / "theirs")))
    ours = module_of(EXAMPLES / "own_loop.py")
    losses = as_launched(lambda: ours.train(STEPS, str(folder / "ours")))
    found = []
    for name in ("theirs", "ours"):
        torch.manual_seed(0)
        model = lamina.shard(ours.Model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        lamina.load(str(folder / name), model, optimizer)
        moments = [state["exp_avg"].local for state in optimizer.state.values()]
        found.append([*(p.detach().local for p in model.parameters()), *moments])
    apart = max((a - b).abs().max().item() for a, b in zip(*found, strict=True) if a.numel())
    return theirs, losses, apart


def test_the_loop_differs_from_fsdp2s_in_a_few_lines_and_in_no_loss(tmp_path: Path) -> None:
    diff = diff_of_page()
    assert sum(line.startswith("-") for line in diff) <= 6 and sum(line.startswith("+") for line in diff) <= 6
    script = undone((EXAMPLES / "own_loop.py").read_text(), diff)
    assert "fully_shard(module)" in script and "import lamina" not in script
    # the harness has made the process group already
    script = script.replace("    torch.distributed.init_process_group()\n", "")
    (tmp_path / "fsdp2_loop.py").write_text(script)
    for theirs, ours, apart in run_ranks(2, run_loops, tmp_path, timeout=120):
        assert theirs[0] > theirs[-1]
        assert ours == pytest.approx(theirs, abs=1e-10)
        assert apart < 1e-8


# -- transformers' Trainer


def train(folder: Path, *more: str) -> tuple[list[float], list[float], list[str]]:
    """All steps; then the second half of them again, from a checkpoint; and what of the first is in its folder."""
    example = module_of(EXAMPLES / "hf_trainer.py")
    common = ["--output", str(folder), "--steps", str(STEPS), "--save-every", "2", *more]
    whole = as_launched(lambda: example.train(example.parse(common)))
    names = sorted(path.name for path in (folder / "checkpoint-2").iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / f"checkpoint-{STEPS}").rename(folder / "aside")
    dist.barrier()
    return whole, as_launched(lambda: example.train(example.parse([*common, "--resume"]))), names


def test_the_trainer_trains_a_sharded_model_as_it_does_one_process(tmp_path: Path) -> None:
    example = module_of(EXAMPLES / "hf_trainer.py")
    from transformers import LlamaForCausalLM, Trainer

    example.ShardedTrainer = lambda *args, sharding, **kwargs: Trainer(*args, **kwargs)
    options = ["--output", str(tmp_path / "one"), "--steps", str(STEPS), "--batch", "4", "--accumulate", "2"]
    alone = example.train(example.parse(options))
    for whole, resumed, names in run_ranks(
        2, train, tmp_path / "two", "--batch", "2", "--accumulate", "2", timeout=180
    ):
        assert whole == pytest.approx(alone, abs=2e-4) and len(whole) == STEPS  # it logs four digits
        assert resumed == whole, "the two steps before come from the checkpoint's log"
        assert "model.safetensors" in names and "lamina" in names and "optimizer.pt" not in names
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "two" / "checkpoint-2")
    last = LlamaForCausalLM.from_pretrained(tmp_path / "two")  # beside the checkpoints, over that of the first run
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "two" / "aside")
    assert not torch.equal(exported.lm_head.weight, reference.lm_head.weight), "two more steps"
    torch.testing.assert_close(last.lm_head.weight, reference.lm_head.weight)


def test_the_mixin_is_short_and_asks_nothing_private_of_lamina() -> None:
    text = (EXAMPLES / "hf_trainer.py").read_text()
    (mixin,) = re.findall(r"^(class LaminaTrainer:\n.*?)\n\n\n", text, re.MULTILINE | re.DOTALL)
    assert len(mixin.splitlines()) <= 40
    assert not re.search(r"lamina\._|lamina\.(runtime|core)", text)


# -- the notebook


def test_the_notebook_runs_on_two_ranks(tmp_path: Path) -> None:
    """In a Jupyter kernel, as a reader runs it."""
    cells = json.loads((EXAMPLES / "first_steps.ipynb").read_text())["cells"]
    with kernel(tmp_path) as notebook:
        for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
            notebook.run(source)
            assert not notebook.failures, source
    text = "".join(notebook.shown)
    assert "on 2 CPU processes" in text and "rank 0 of 2" in text and "rank 0 of 1" in text
    first, last = map(float, re.findall(r"loss ([\d.]+) at the start, ([\d.]+)", text)[0])
    assert last < first - 0.1
