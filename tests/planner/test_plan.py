"""The ladder, its report, the command, and bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lamina
from lamina import cli
from lamina.core import expandable
from lamina.errors import UsageError
from lamina.planner import memory
from lamina.planner.choose import CLOSE, choose
from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.measure_data import Measured
from lamina.planner.plan import parse_bytes
from lamina.planner.workload import Choice
from lamina.train.config import read_toml
from lamina.train.gpt import GPT, Shape
from lamina.train.plan_cli import _what_if

GIB = 1 << 30
HALVED, WHOLE = (lamina.Precision(compute=torch.bfloat16, halves=halves) for halves in (True, False))
WORDS = 32768


def meta_gpt(width: int = 512, layers: int = 3) -> GPT:
    with torch.device("meta"):
        return GPT(Shape(width, layers, 8, 64))


@pytest.fixture(scope="module")
def measures() -> dict[str | int, Measured]:
    return {r: measure(meta_gpt(1024), 8, 512, precision="bf16", recompute=r) for r in ("none", "selective", "full")}


@pytest.fixture(autouse=True)
def nccl_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators, dearer than these small models, would turn the order of the strategies around: see ROOMY, too."""
    monkeypatch.setattr(memory, "NCCL_BYTES", 0)
    monkeypatch.setattr(memory, "SUMS_COMMUNICATOR_BYTES", 0)


ROOMY = dataclasses.replace(load_machine("h100"), communicator_bytes=0.0)


def decide(measures: dict[str | int, Measured], gpus: int, budget_bytes: int | None = None):
    return choose(measures.__getitem__, gpus, ROOMY, Choice(), budget_bytes)


def test_the_simplest_that_fits_is_taken(measures: dict[str | int, Measured]) -> None:
    assert decide(measures, 1).taken.title == "one GPU"
    roomy = decide(measures, 4)
    assert roomy.taken.title == "ddp"
    for rung in roomy.rungs:
        assert sum(rung.memory.parts().values()) == rung.memory.used_bytes
    assert [rung.title for rung in roomy.rungs] == ["one GPU", "ddp", "zero1", "zero2", "zero3"]
    assert "fewer tokens a second" in roomy.why_not(roomy.rungs[0])


def test_every_rung_is_taken_under_some_budget(measures: dict[str | int, Measured]) -> None:
    """Less and less memory climbs the ladder; what was passed over says how much it lacks."""
    rungs = decide(measures, 4).rungs
    seen = []
    for rung in sorted(rungs, key=lambda r: -r.memory.used_bytes):
        decision = decide(measures, 4, int(rung.memory.used_bytes / 0.95) + 1)
        seen.append(decision.taken.title)
        assert decision.taken.memory.used_bytes <= rung.memory.used_bytes
        for other in decision.rungs[: decision.rungs.index(decision.taken)]:
            reason = decision.why_not(other)
            assert ("more than" in reason) != other.fits and reason
    assert {"ddp", "zero3"} <= set(seen)
    least = min(rung.memory.used_bytes for rung in rungs)
    recomputed = decide(measures, 4, int((least - (64 << 20)) / 0.95))
    assert "recompute" in recomputed.taken.title
    fastest = recomputed.fastest.time.tokens_per_s
    assert recomputed.taken.time.tokens_per_s >= CLOSE * fastest


def test_nothing_fits(measures: dict[str | int, Measured]) -> None:
    with pytest.raises(
        UsageError, match=r"nothing fits a budget of 1.00 GiB: the smallest is .* What may help: .*--budget (\d+)GiB"
    ) as e:
        decide(measures, 4, GIB)
    enough = int(str(e.value).partition("--budget ")[2].partition("GiB")[0])
    assert decide(measures, 4, enough * GIB).taken.fits


def test_nothing_fits_names_the_gpus_that_suffice(measures: dict[str | int, Measured]) -> None:
    budget_bytes = int(decide(measures, 16).rungs[-1].memory.used_bytes)  # of zero3; with recomputation there is room
    with pytest.raises(UsageError, match=r"--gpus \d+, where zero3 with full recomputation fits") as e:
        decide(measures, 1, budget_bytes)
    enough = int(str(e.value).partition("--gpus ")[2].partition(",")[0])
    assert enough & (enough - 1) == 0 and decide(measures, enough, budget_bytes).taken.fits
    with pytest.raises(UsageError, match="nothing fits"):
        decide(measures, enough // 2, budget_bytes)


@pytest.mark.parametrize("named, strategy, gpus", [(False, "zero1", 8), (True, "zero3", 8), (False, "zero3", 64)])
def test_only_what_would_gain_is_named(named: bool, strategy: str, gpus: int) -> None:
    """Peers gather inside a node, and only what is split; each change brings what a plan with it says."""
    how: dict[str, Any] = {"batch": 2, "seq": 256, "strategy": strategy, "transport": "c10d"}
    found = lamina.plan(meta_gpt(2048), gpus, **how)
    assert any("transport='peer'" in text for text in found.gains) is named
    text = next(text for text in found.gains if "lamina.capture" in text)
    share = int(text.partition("%")[0]) / 100 if "%" in text else float(text.partition(" ")[0]) - 1
    captured = lamina.plan(meta_gpt(2048), gpus, capture=True, **how)
    assert captured.taken.time.tokens_per_s / found.taken.time.tokens_per_s - 1 == pytest.approx(share, abs=0.051)
    assert not any("lamina.capture" in text for text in captured.gains)


def test_sizes_that_are_no_multiples_of_8_are_named() -> None:
    """GPT-2's 50,257 words: what the rounded vocabulary would bring is what its own plan says."""

    def plan(words: int, **more: Any) -> lamina.Plan:
        layers = (nn.Linear(512, 512) for _ in range(4))
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(words, 512), *layers, nn.Linear(512, words))
        return lamina.plan(model, 2, batch=16, seq=512, strategy="zero3", capture=True, **more)

    odd, rounded = plan(50257), plan(50264)
    (text,) = (text for text in odd.gains if "multiples of 8" in text)
    assert "(50257, 512)" in text and not any("multiples of 8" in text for text in rounded.gains)
    share = rounded.taken.time.tokens_per_s / odd.taken.time.tokens_per_s - 1
    assert int(text.partition("%")[0]) / 100 == pytest.approx(share, abs=0.03)
    assert not any("multiples of 8" in text for text in plan(50257, precision=None).gains), "32 bits have one kernel"


def test_smaller_batches_instead_of_recomputation() -> None:
    model = meta_gpt(2048, 2)
    least = min(rung.memory.used_bytes for rung in lamina.plan(model, 2, batch=8, seq=2048).decision.rungs)
    budget = int(0.99 * least / 0.95)
    found = lamina.plan(model, 2, batch=8, seq=2048, budget=budget)
    assert found.taken.choice.recompute != "none"
    (text,) = (text for text in found.gains if "without recomputation" in text)
    assert "--batch 4 --accumulate 2, where " in text
    halved = lamina.plan(model, 2, batch=4, seq=2048, accumulation=2, budget=budget).decision.fastest
    assert f"where {halved.title} fits" in text and halved.choice.recompute == "none"
    share = halved.time.tokens_per_s / found.taken.time.tokens_per_s - 1
    assert text.startswith(f"{share:.0%} more tokens")


def test_more_ranks_need_less_memory(measures: dict[str | int, Measured]) -> None:
    """Masters and moments over the ranks; activations stay."""
    few, many = (dict(zip("abcde", decide(measures, gpus).rungs, strict=False))["e"].memory for gpus in (2, 8))
    assert few.state.optimizer == pytest.approx(4 * many.state.optimizer, rel=0.02)
    assert few.peak.activation_bytes == many.peak.activation_bytes


def test_a_million_micro_batches_take_seconds() -> None:
    """They are alike: what the allocator does in the fourth, it does in all."""
    begin = time.process_time()
    few, many = (
        lamina.plan(meta_gpt(64, 2), 2, batch=1, seq=8, strategy="zero1", accumulation=count).taken.memory
        for count in (8, 10**6)
    )
    assert time.process_time() - begin < 10 and few.reserved_bytes == many.reserved_bytes


def test_thousands_of_ranks_take_seconds() -> None:
    begin = time.process_time()
    forecast = lamina.plan(meta_gpt(layers=12), 8192, batch=4, seq=512, machine="h200")
    assert time.process_time() - begin < 10
    assert [rung.choice.world for rung in forecast.decision.rungs] == [1] + [8192] * 5
    text = str(forecast)
    assert "hsdp over 8" in text and "* " in text and forecast.taken.memory.peak.place in text
    values = json.loads(json.dumps(forecast.as_dict()))
    assert values["taken"] == forecast.taken.title and len(values["rungs"]) == 6


def test_bad_input_is_named() -> None:
    model = meta_gpt(64, 2)
    with pytest.raises(UsageError, match="gpus=0"):
        lamina.plan(model, 0, batch=1, seq=8)
    with pytest.raises(UsageError, match="seq=-1"):
        lamina.plan(model, 1, batch=1, seq=-1)
    with pytest.raises(UsageError, match="'h101'; the nearest is 'h100'"):
        lamina.plan(model, 1, batch=1, seq=8, machine="h101")
    with pytest.raises(UsageError, match="such as 40GiB"):
        lamina.plan(model, 1, batch=1, seq=8, budget="much")
    alone = dataclasses.replace(load_machine("h100"), gpus_per_node=1, network_bytes_per_s=0.0)  # doctor --ranks 1
    with pytest.raises(UsageError, match="gpus=2: h100 .* has 1 a node, .* no network .*--ranks N"):
        lamina.plan(model, 2, batch=1, seq=8, machine=alone)
    assert "used MiB" in str(lamina.plan(model, 1, batch=1, seq=8, machine=dataclasses.replace(alone, fixed_bytes=0.0)))
    with pytest.raises(UsageError, match="more tokens than any run has"):
        lamina.plan(model, 1, batch=1, seq=10**19)
    with pytest.raises(UsageError, match="a budget of 1 B:"):
        lamina.plan(model, 1, batch=1, seq=8, budget=1)
    for word in ("much", "1XiB", "GiB", "-1GiB", "nan", "inf GiB", 0, -1, "0"):
        with pytest.raises(UsageError, match="KiB, MiB, GiB, TiB; kB, MB"):
            parse_bytes(word)


@pytest.mark.parametrize(
    "text, size_bytes",
    [("40GiB", 40 * GIB), ("80 GB", 80 * 10**9), ("1KiB", 1024), ("1.5 kB", 1500), ("2tib", 2 << 40), ("7", 7)],
)
def test_budgets_are_read(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


def test_one_strategy_alone() -> None:
    forecast = lamina.plan(meta_gpt(64, 2), 4, batch=1, seq=8, strategy="zero2", recompute="full", budget=1)
    assert forecast.arguments == {"strategy": "zero2", "recompute": "full", "slots": 3}
    assert not forecast.taken.fits


def test_masters_in_halves_are_forecast_where_shard_would_take_them() -> None:
    """Two bytes an own element less, on GPUs over peers; a captured step and collectives have whole ones."""

    def taken(**more: Any) -> Any:
        how = {"batch": 1, "seq": 64, "machine": ROOMY, "strategy": "zero3", "transport": "peer"}
        return lamina.plan(meta_gpt(8192, 4), 4, **(how | more))

    free, cut, whole = taken(), taken(precision=HALVED), taken(precision=WHOLE)
    assert free.taken.memory == cut.taken.memory and free.taken.time == cut.taken.time
    saved = whole.taken.memory.state.lasting - free.taken.memory.state.lasting
    assert saved == pytest.approx(2 * whole.numel / 4, rel=0.02)
    assert free.taken.time.optimizer_ms < whole.taken.time.optimizer_ms
    assert [made.taken.choice.halved for made in (free, cut, whole)] == [True, True, False]
    others = (
        {"transport": "c10d"},
        {"capture": True},
        {"precision": "fp16"},
        {"precision": None},
        {"strategy": "zero2"},
    )
    assert not any(taken(**more).taken.choice.halved for more in others)
    assert "precision" not in free.arguments and whole.arguments["precision"] == WHOLE
    assert "masters in halves under" in str(free) and "plan another optimizer with halves=False" in str(free)
    assert "halves" not in str(whole) and "Precision(compute=torch.bfloat16, halves=True)" in str(cut)
    assert whole.as_dict()["arguments"]["precision"] == {"compute": "bf16", "halves": False}


def test_halved_masters_are_advised_where_what_peers_read_does_not_fit() -> None:
    """To those who have said no, and, as a rung of its own, on CPUs, where lamina halves nothing by itself."""
    cpu = dataclasses.replace(ROOMY, device="CPU, 8 cores")

    def plan(**more: Any) -> lamina.Plan:
        return lamina.plan(meta_gpt(8192, 4), 4, **({"batch": 1, "seq": 64, "machine": cpu} | more))

    asked = {"transport": "peer"}
    assert [rung.title for rung in plan(**asked).decision.rungs][1:] == ["ddp", "zero1", "zero2", "zero3"]
    cut = plan(strategy="zero3", precision=HALVED)
    budget = int(cut.taken.memory.used_bytes / 0.95) + 1
    made = plan(budget=budget, **asked)
    assert made.taken.title == "zero3, halved masters" and made.taken.choice.halved
    assert made.arguments["precision"] == HALVED
    for settled in ("c10d", "auto"):  # "auto": where peers are too dear, they are not asked for
        titles = [rung.title for rung in plan(transport=settled, budget=budget + 4 * GIB).decision.rungs]
        assert titles[0] == "one GPU" and not any("halved" in title for title in titles)
    assert not any("halved" in r.title for r in plan(budget=budget + 4 * GIB, precision=WHOLE, **asked).decision.rungs)
    tight = int(plan(strategy="zero3", machine=ROOMY, **asked).taken.memory.used_bytes / 0.95) + 1
    for machine, size_bytes, precision in ((cpu, budget, "bf16"), (ROOMY, tight, WHOLE)):
        alone = plan(budget=size_bytes, strategy="zero3", machine=machine, precision=precision, **asked)
        (advice,) = (text for text in alone.gains if "halves=True" in text)
        assert advice.endswith("which fits") and not alone.taken.fits
    wide = plan(budget="10GiB", strategy="zero3", precision=None, **asked)
    assert not any("halves" in text for text in wide.gains), "the upper half of an fp32 number is no fp32 weight"


def test_a_change_without_memory_for_it_is_not_named() -> None:
    """Peers publish weights; masters in halves take no more for them."""
    slow = dataclasses.replace(ROOMY, interference=1.0)

    def plan(**more: Any) -> lamina.Plan:
        return lamina.plan(
            meta_gpt(8192, 4), 4, **({"batch": 1, "seq": 256, "strategy": "zero3", "machine": slow} | more)
        )

    def of_peers(budget: int, precision: Any = "bf16") -> list[str]:
        found = plan(transport="c10d", budget=budget, precision=precision)
        return [text for text in found.gains if "transport='peer'" in text]

    peers = {"transport": "peer"}
    whole, cut = (int(plan(precision=p, **peers).taken.memory.used_bytes / 0.95) for p in (WHOLE, "bf16"))
    assert whole > cut
    assert "with masters in halves under" in of_peers(cut + 1)[0] and not of_peers(cut - 1)
    assert "halves" not in of_peers(whole + 1, WHOLE)[0] and not of_peers(whole - 1, WHOLE)


def test_a_plan_with_halves_gives_what_shard_takes() -> None:
    found = lamina.plan(meta_gpt(64, 2), 4, batch=1, seq=8, precision=HALVED)
    assert [rung.title for rung in found.decision.rungs] == ["one GPU", "zero3"]
    taken = next(rung for rung in found.decision.rungs if rung.title == "zero3")
    made = dataclasses.replace(found, decision=dataclasses.replace(found.decision, taken=taken))
    assert made.arguments["precision"] == lamina.Precision(compute=torch.bfloat16, halves=True)
    assert json.loads(json.dumps(made.as_dict()))["arguments"]["precision"] == {"compute": "bf16", "halves": True}
    assert "masters in halves" in str(made)
    for more, said in (
        ({"transport": "c10d"}, "type transport='peer'"),
        ({"strategy": "zero1"}, "strategy='zero3' or 'hsdp'"),
        ({"precision": lamina.Precision(compute=torch.float16, halves=True)}, "bfloat16"),
        ({"transport": "pear", "precision": "bf16"}, "transport='pear'"),
    ):
        with pytest.raises(UsageError, match=said):
            lamina.plan(meta_gpt(64, 2), 4, **({"batch": 1, "seq": 8, "precision": HALVED} | more))


def test_auto_is_forecast_as_shard_would_take_it() -> None:
    """Peers on GPUs of one node where they take little, on a CPU unless slots=1; collectives where it is too small."""

    def of_zero3(gpus: int, **more: Any) -> str:
        found = lamina.plan(meta_gpt(512), gpus, **({"batch": 1, "seq": 64, "strategy": "zero3"} | more))
        return found.taken.choice.transport

    cpu = dataclasses.replace(load_machine("h100"), device="CPU, 8 cores", memory_bytes=8e9)
    assert [of_zero3(gpus) for gpus in (1, 2, 4, 16)] == ["c10d", "peer", "peer", "c10d"]
    assert of_zero3(2, machine=dataclasses.replace(load_machine("h100"), memory_bytes=1e8)) == "c10d"
    assert [of_zero3(gpus, machine=cpu) for gpus in (4, 16)] == ["peer", "c10d"]
    assert of_zero3(4, machine=cpu, slots=1) == "c10d" and of_zero3(4, strategy="zero2", machine=cpu) == "c10d"
    assert of_zero3(16, strategy="hsdp", transport="peer") == "peer"
    with pytest.raises(UsageError, match=r"transport='peer' needs .*16 ranks, and h100 has 8 .*strategy='hsdp'"):
        of_zero3(16, transport="peer")
    ladder = lamina.plan(meta_gpt(512), 16, batch=1, seq=64, transport="peer").decision.rungs
    assert [r.title for r in ladder] == ["one GPU", "ddp", "zero1", "zero2", "hsdp over 8"]


def test_a_captured_step_is_a_choice_on_gpus() -> None:
    eager, captured = (
        lamina.plan(meta_gpt(64, 2), 2, batch=1, seq=8, strategy="zero3", capture=capture) for capture in (False, True)
    )
    assert captured.taken.time.host_ms == 0 < eager.taken.time.host_ms
    assert captured.taken.time.total_ms < eager.taken.time.total_ms
    assert "by lamina.capture" in str(captured) and "captured" not in str(eager)
    cpu = dataclasses.replace(load_machine("h100"), device="CPU, 2 cores", name="mine")
    with pytest.raises(UsageError, match=r"capture=True: mine \(CPU, 2 cores\) has no CUDA graphs"):
        lamina.plan(meta_gpt(64, 2), 2, batch=1, seq=8, capture=True, machine=cpu)


class Wordy(nn.Module):
    """Little but a large vocabulary; `scaled`: it reads its logits before it gives them away."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.scaled = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS, bias=False), scaled

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        return logits + torch.zeros(WORDS, device=logits.device).expand(*tokens.shape, WORDS) if self.scaled else logits


def test_a_loss_in_chunks_is_a_rung() -> None:
    """Where the logits are the peak, and the loss is the planner's own."""
    with torch.device("meta"):
        model = Wordy()
    plain = lamina.plan(model, 2, batch=8, seq=1024).decision.rungs
    whole = next(rung for rung in plain if rung.title == "zero3")
    budget = int(min(rung.memory.used_bytes for rung in plain) / 0.95) - (64 << 20)
    made = lamina.plan(model, 2, batch=8, seq=1024, budget=budget)
    assert made.taken.title.endswith(", chunked loss") and "zero3" in [rung.title for rung in made.decision.rungs]
    assert not any("recompute" in rung.title for rung in made.decision.rungs), "it comes before recomputation"
    chunked = next(rung for rung in made.decision.rungs if rung.title == "zero3, chunked loss")
    saved = whole.memory.allocated_bytes - chunked.memory.allocated_bytes
    assert saved > 8 * 1024 * WORDS * 4, "no whole logits in fp32 are left"
    head_again = chunked.time.compute_ms - whole.time.compute_ms
    assert head_again > 0, "the output layer is computed twice"
    assert "lamina.keep(head.weight)" in str(made) and "lamina.keep" not in str(lamina.plan(model, 2, batch=1, seq=8))


@pytest.mark.parametrize("own", ["loss", "output", "few tokens"])
def test_a_loss_that_is_not_ours_is_not_cut(own: str) -> None:
    with torch.device("meta"):
        model = Wordy(scaled=own == "output")
    rows = (1, 8) if own == "few tokens" else (8, 1024)
    loss = (lambda m, given: m(*given.values()).float().sum()) if own == "loss" else None
    with pytest.raises(UsageError, match="nothing fits") as e:
        lamina.plan(model, 2, batch=rows[0], seq=rows[1], budget="1MiB", loss=loss)
    assert "chunked" not in str(e.value)


def build_two_layers() -> nn.Module:
    return nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128))


def build_nothing() -> nn.Module:
    raise RuntimeError("there are no weights")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--seq", "0"], "--seq 0: a positive number"),
        (["--batch", "-1"], "--batch -1: a positive number"),
        (["--accumulate", "0"], "--accumulate 0: a positive number"),
        (["--bugdet", "4"], "unknown --bugdet; did you mean --budget?"),
        (["--gpus", "two"], "--gpus: invalid int value: 'two'; `lamina plan --help`"),
        (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
        (["--gpus"], "--gpus: expected one argument"),
        (["--save", "/"], "--save /: give the name of a file in a folder that exists"),
        (["--save", "/no/such/folder/run.toml"], "in a folder that exists"),
    ],
)
def test_command_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 1
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_what_if_takes_both() -> None:
    assert _what_if("gpus=64, machine=h200", 8, "h100") == [(64, "h200")]
    assert _what_if("machine=h200", 8, "h100") == [(8, "h200")] and _what_if("", 8, "h100") == []
    for text in ("gpus=0", "gpus=two", "cards=3", "machine=", "gpus=64,gpus=8", f"gpus={10**30}"):
        with pytest.raises(UsageError, match="gpus="):
            _what_if(text, 8, "h100")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, what if, and a file that `lamina train` takes and that plans to the same end."""
    saved = tmp_path / "run.toml"
    words = ["plan", "--gpus", "2", "--batch", "2", "--seq", "64", "--what-if", "gpus=64", "--save", str(saved)]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "small GPT" in shown and "what if gpus=64" in shown
    config = read_toml(saved)
    assert (config.batches.batch, config.batches.length, config.sharding.strategy) == (4, 64, "ddp")
    assert cli.main(["plan", "--gpus", "2", "--config", str(saved), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["batch"], values["seq"], values["arguments"]["strategy"]) == (2, 64, "ddp")
    assert cli.main(["plan", "--gpus", "3", "--config", str(saved)]) == 1
    assert "cannot be dealt to 3 GPUs" in capsys.readouterr().err
    assert cli.main(["train", str(saved), "--dry-run", "--device", "cpu"]) == 0
    assert "memory of ddp: peak at" in capsys.readouterr().out


def test_command_says_how_masters_are_to_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag over a file, neither; and what `--save` writes asks for no more than was asked for."""
    saved = tmp_path / "run.toml"
    words = ["--gpus", "4", "--batch", "1", "--transport", "peer", "--save", str(saved)]

    def are_halved(*words: str) -> bool:
        assert cli.main(["plan", *words, "--json"]) == 0
        (parts,) = (r["parts_bytes"] for r in json.loads(capsys.readouterr().out)["rungs"] if r["title"] == "zero3")
        return "masters" in parts

    for more, halves in ((["--halves"], True), ([], None), (["--no-halves"], False)):
        assert are_halved(*words, *more) is (halves is not False)
        assert read_toml(saved).sharding.halves is halves
    from_file = ["--gpus", "4", "--config", str(saved)]
    assert not are_halved(*from_file) and are_halved(*from_file, "--halves")
    assert cli.main(["plan", "--compare", str(tmp_path), "--no-halves"]) == 1
    assert "leave --halves out" in capsys.readouterr().err


def test_command_takes_functions_and_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_that_lie_here.py").write_text("from torch.nn import Linear\nbuild = lambda: Linear(8, 8)\n")
    with monkeypatch.context() as patch:  # a command's path does not hold the folder that it is typed in
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", [word for word in sys.path if word])
        assert cli.main(["plan", "models_that_lie_here:build", "--batch", "1", "--seq", "8"]) == 0
    assert cli.main(["plan", f"{__name__}:build_two_layers", "--batch", "1", "--seq", "8"]) == 0
    assert "Sequential" not in capsys.readouterr().err
    pytest.importorskip("transformers")
    (tmp_path / "wrong.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "big"}))
    assert cli.main(["plan", str(tmp_path / "wrong.json")]) == 1
    assert "transformers does not build a model of it" in capsys.readouterr().err
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 16384, "num_key_value_heads": 2, **sizes}
    run = tmp_path / "run"  # of `lamina train`, which leaves its model inside
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(run), "--gpus", "2", "--batch", "1", "--seq", "16", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["parameters"] == 2 * 16384 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 64) + 32
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 32}))
    assert cli.main(["plan", str(tmp_path)]) == 1
    assert "type t5 is no causal language model" in capsys.readouterr().err
    for word in ("nowhere", "nowhere:build", f"{__name__}:GIB", f"{__name__}:build_nothing"):
        assert cli.main(["plan", word]) == 1
        assert f"lamina plan: {word}" in capsys.readouterr().err


def test_a_rung_that_fits_is_never_hidden_by_recomputation(measures: dict[str | int, Measured]) -> None:
    """Recomputation is asked for only where nothing fits without it."""
    asked: list[str | int] = []

    def ask(recompute: str | int) -> Measured:
        asked.append(recompute)
        return measures[recompute]

    machine = dataclasses.replace(load_machine("h100"), gpus_per_node=8)
    choose(ask, 16, machine, Choice())
    assert asked == ["none"]


def test_the_allocators_setting_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in expandable.NAMES:
        monkeypatch.delenv(name, raising=False)

    def planned(machine: str = "h100") -> lamina.planner.plan.Plan:
        return lamina.plan(meta_gpt(2048, 6), 2, batch=8, seq=1024, strategy="zero3", machine=machine)

    kept = planned()
    saved = kept.expandable_saves
    assert saved > 0.01 * kept.taken.memory.used_bytes
    assert "less with PYTORCH_ALLOC_CONF=expandable_segments:True, set before CUDA is used" in str(kept)
    with expandable.by_default():
        grown = planned()
    assert kept.taken.memory.used_bytes - grown.taken.memory.used_bytes == saved
    assert grown.taken.memory.allocated_bytes == kept.taken.memory.allocated_bytes and grown.expandable_saves == 0
    assert "with torch's expandable segments" in str(grown) and "less with" not in str(grown)
    assert grown.as_dict()["expandable_segments"] is True and kept.as_dict()["expandable_segments"] is False


def test_the_command_plans_with_the_setting_that_lamina_train_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", f"{__name__}:meta_gpt", "--json"]
    for name in expandable.NAMES:
        monkeypatch.delenv(name, raising=False)
    assert cli.main(words) == 0 and json.loads(capsys.readouterr().out)["expandable_segments"] is True
    assert expandable.asked_for() is None
    monkeypatch.setenv(expandable.VARIABLE, "expandable_segments:False")
    assert cli.main(words) == 0 and json.loads(capsys.readouterr().out)["expandable_segments"] is False


def test_a_table_that_nobody_reads_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert cli.main(["plan", f"{__name__}:meta_gpt"]) == 141
    assert "Traceback" not in capfd.readouterr().err


def test_a_captured_step_is_planned_with_whole_masters() -> None:
    asked: dict[str, Any] = {"batch": 8, "seq": 512, "strategy": "zero3", "machine": "h100", "transport": "peer"}
    captured, eager = (lamina.plan(meta_gpt(1024), 2, capture=capture, **asked) for capture in (True, False))
    assert eager.taken.choice.halved and not captured.taken.choice.halved
    assert captured.taken.memory.state.masters > eager.taken.memory.state.masters
