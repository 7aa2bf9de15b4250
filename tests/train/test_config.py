"""Settings: flags, files, defaults, and what is said about wrong ones."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lamina
from lamina.train import cli
from lamina.train.config import Config, Optimisation, from_dict, learning_rate, read_toml, to_toml
from lamina.train.resolve import Machine, precision_of, resolve
from train.runs import changed

CPU = Machine(2, on_gpu=False)


def command(*arguments: str) -> tuple[int, str, str]:
    """`lamina train ...` in this process, up to where it would start ranks: exit code, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


@settings(deadline=None)
@given(st.text(), st.floats(1e-30, 1e30), st.integers(1, 10**9))
def test_a_file_gives_back_what_was_written(text: str, lr: float, steps: int) -> None:
    config = changed(Config(), data=text, lr=lr, steps=steps, compile=True)
    assert from_dict(tomllib.loads(to_toml(config)), "file") == config


def test_a_resolved_configuration_is_its_own_file(tmp_path: Path) -> None:
    config = resolve(Config(), CPU)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    assert read_toml(path) == config == resolve(read_toml(path), CPU)
    open_ends = [f.name for part in ("batches", "optimisation") for f in dataclasses.fields(getattr(config, part))
                 if getattr(getattr(config, part), f.name) is None]  # fmt: skip
    assert not open_ends


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle = 'x'", ["`modle`", "`model`"]),
        ("[optimisation]\nlearning_rte = 1", ["`optimisation.learning_rte`"]),
        ("[optimisation]\nlearning_rate = 1", ["Did you mean `lr`?"]),
        ("batch_size = 1", ["Did you mean `batch` in section [batches]?"]),
        ("[optimisation]\nstep = 1", ["`optimisation.step`", "Did you mean `steps`?"]),
        ("strategy = 'zero3'", ["`strategy`", "in section [sharding]"]),
        ("[batches]\nwarmup = 1", ["`batches.warmup`", "[optimisation]"]),
        ("[sharding]\nstrategy = 'zero4'", ["'zero4'", "zero3"]),
        ("[batches]\nbatch = 'many'", ["`batches.batch`", "int", "str"]),
        ("[batches]\nbatch = true", ["int", "bool"]),
        ("optimisation = 3", ["[optimisation]"]),
        ("lr 3", ["TOML"]),
    ],
)
def test_mistakes_in_a_file_are_named(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(lamina.UsageError) as caught:
        read_toml(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_flags_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[optimisation]\nsteps = 7\nlr = 1e-4\n")
    code, out, _ = command(str(path), "--lr", "0.5", "--print-config", "--nprocs", "2")
    printed = tomllib.loads(out)
    assert code == 0 and printed["optimisation"]["steps"] == 7 and printed["optimisation"]["lr"] == 0.5
    assert printed["optimisation"]["warmup"] == 1 and printed["batches"]["batch"] == 16


def test_what_is_left_to_lamina_can_be_said_too(tmp_path: Path) -> None:
    """`--halves`, `--no-halves`, neither; a flag over a file; what `lamina.shard` is given."""
    bf16 = ("--precision", "bf16", "--print-config")
    for words, halves in ((("--halves",), True), (("--no-halves",), False), ((), None), (("--halves", "False"), False)):
        code, out, _ = command(*words, *bf16)
        config = from_dict(tomllib.loads(out), "file")
        assert code == 0 and config.sharding.halves is halves
        given = precision_of(config)
        assert given == ("bf16" if halves is None else lamina.Precision(compute=torch.bfloat16, halves=halves))
    (tmp_path / "run.toml").write_text(out)
    for words, halves in ((("--halves",), True), ((), False), (("--halves", "None"), None)):
        _, out, _ = command(str(tmp_path / "run.toml"), *words, "--print-config")
        assert from_dict(tomllib.loads(out), "file").sharding.halves is halves
    assert precision_of(changed(Config(), precision="fp32", halves=False)) is None


def test_a_misspelled_flag() -> None:
    code, _, err = command("--strategi", "zero3")
    assert code == 2 and "--strategy" in err
    for theirs, ours in (("--learning-rate", "--lr"), ("--gpus=2", "--nprocs")):
        code, _, err = command(theirs, "2")
        assert code == 1 and f"here it is called {ours}" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 3}, ["batches.batch=3", "2 ranks", "--batch 4"]),
        ({"batch": 6, "accumulate": 2}, ["--batch 8"]),
        ({"width": 50}, ["width=50", "12"]),
        ({"lora": "16"}, ["r=16"]),
        ({"lora": "r=16"}, ["--model"]),
        ({"recompute": "some"}, ["recompute='some'"]),
        ({"halves": True}, ["sharding.precision=fp32", "--precision bf16"]),
        ({"steps": 0}, ["optimisation.steps=0"]),
        ({"batch": 0}, ["batches.batch=0"]),
        ({"heads": -2}, ["architecture.heads=-2"]),
        ({"lr": float("nan")}, ["optimisation.lr=nan"]),
        ({"lr": float("inf")}, ["optimisation.lr=inf"]),
        ({"clip": -1.0}, ["clip"]),
        ({"clip": float("nan")}, ["clip=nan"]),
        ({"weight_decay": -0.1}, ["weight_decay"]),
        ({"beta2": 1.0}, ["beta2"]),
        ({"warmup": -1}, ["warmup"]),
        ({"final_lr": 1.5}, ["final_lr", "at most 1"]),
        ({"sample_tokens": -1}, ["sample_tokens"]),
        ({"seed": 10**20}, ["seed"]),
    ],
)
def test_values_that_no_run_can_have(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(lamina.UsageError) as caught:
        resolve(changed(Config(), **changes), CPU)
    for word in words:
        assert word in str(caught.value)


def test_schedules() -> None:
    def at(step: int, schedule: str) -> float:
        return learning_rate(step, Optimisation(steps=110, warmup=10, lr=2.0, final_lr=0.1, schedule=schedule))  # type: ignore[arg-type]

    for schedule in ("cosine", "linear", "constant"):
        assert at(0, schedule) == pytest.approx(0.2) and at(9, schedule) == at(10, schedule) == 2.0
    assert at(60, "linear") == pytest.approx(1.1) == pytest.approx(at(60, "cosine"))
    assert at(110, "linear") == pytest.approx(0.2) == pytest.approx(at(110, "cosine"))
    assert at(30, "cosine") > at(30, "linear") > 1.0 and at(109, "constant") == 2.0
