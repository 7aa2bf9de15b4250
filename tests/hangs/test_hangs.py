"""A rank that has died, stopped, raised, ended or gone elsewhere: a named error on every rank that can speak."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import lamina
from hangs.training import build, short_limits, step, timed, train
from harness import RankFailure, expect_error, run_ranks
from lamina.core import watch

LIMIT_S = 10.0  # from the moment a rank begins to wait until it raises
PATIENCE_S = 40.0  # of the test, on a busy machine
LATER = 50  # a step at which all ranks have followed the program for long
TRANSPORTS = {1: "c10d", LATER: "peer"}  # each is tried, at the first step or later


def on_rank(rank: int, act: Callable[[nn.Module], object]) -> Callable[[nn.Module], object]:
    return lambda model: act(model) if dist.get_rank() == rank else None


# ---- ranks that are gone -------------------------------------------------------------------------------------------


def die(at: int, number: int) -> None:
    with short_limits():
        train(at, on_rank(1, lambda model: os.kill(os.getpid(), number)), transport=TRANSPORTS[at])


@pytest.mark.parametrize("at", [1, LATER])
def test_a_killed_rank_is_named(at: int) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, die, at, signal.SIGKILL, timeout=PATIENCE_S)
    errors = caught.value.errors
    assert (errors[0].type_name, errors[1].type_name) == ("Disagreement", "Died")
    assert "rank 1 has died" in errors[0].message
    assert f"step {at} forward: rank 0 " in errors[0].message and "training.py:" in errors[0].message


def be_preempted(transport: str) -> None:
    """A signal comes to rank 0 while it waits; its handler raises what a broken connection would."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("preempted")

    def wait_for_it(model: nn.Module) -> None:
        if dist.get_rank() == 1:
            time.sleep(2.5)
            raise TimeoutError("too late")
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 1.5)  # behind the first look up

    with short_limits():
        train(3, wait_for_it, transport=transport)


@pytest.mark.parametrize("transport", ["c10d", "peer"])
def test_what_a_signals_handler_raises_in_a_wait_is_no_lost_peer(transport: str) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, be_preempted, transport, timeout=PATIENCE_S)
    errors = caught.value.errors
    assert (errors[0].type_name, errors[0].message) == ("RuntimeError", "preempted")


@pytest.mark.parametrize("at", [1, LATER])
def test_a_stopped_rank_is_named(at: int) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, die, at, signal.SIGSTOP, timeout=PATIENCE_S)
    errors = caught.value.errors
    assert (errors[0].type_name, errors[1].type_name) == ("Disagreement", "Hung")
    assert "rank 1 is stopped (SIGSTOP" in errors[0].message and "kill -CONT" in errors[0].message


def end_early(how: str) -> tuple[str, str, float]:
    """What rank 0 learns while rank 1 is on its way out. Rank 1 says so as the excepthook and the exit do."""
    store = dist.PrefixStore(how, dist.distributed_c10d._get_default_store())
    with short_limits():
        if dist.get_rank() == 1:
            train(LATER, lambda model: None, after=0, transport=TRANSPORTS[LATER if how == "ended" else 1])
            running = watch.current()
            assert running is not None
            if how == "raised":
                running.leave("raised ValueError: bad batch (data.py:17)", failed=True)
            elif how == "ended":
                running.leave("has ended its program")
            store.wait(["rank 0 has learned it"])  # the process lives on, and does nothing that ranks do together
            return "", "", 0.0
        found = timed(lambda: train(LATER, lambda model: None, transport=TRANSPORTS[LATER if how == "ended" else 1]))
        store.set("rank 0 has learned it", "")
        return found


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raised", "rank 1 raised ValueError: bad batch (data.py:17). Waiting for it: step 50 forward: rank 0"),
        ("ended", "rank 1 has ended its program, last seen in step 49, after its backward"),
        ("returned", "rank 1 ended or dropped the model, last seen in step 49, after its backward"),
    ],
)
def test_a_rank_that_raised_or_ended_is_named(how: str, words: str) -> None:
    code, text, seconds = run_ranks(2, end_early, how, timeout=PATIENCE_S)[0]
    assert code == "LAM-H3" and words in text and seconds < LIMIT_S, (code, text, seconds)


# ---- ranks that are elsewhere --------------------------------------------------------------------------------------


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 8))


def gather(model: nn.Module) -> None:
    with lamina.gathered(model):
        pass


def save(model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lamina.save(f"{folder}/step", model)


def load(model: nn.Module) -> None:
    lamina.load("/nowhere", model)


def go_even(model: nn.Module) -> None:
    for _ in lamina.even([1]):
        pass


def hold(model: nn.Module) -> None:
    with lamina.keep(model):
        pass


ELSEWHERE = {
    "save": save,
    "load": load,
    "even": go_even,
    "keep": hold,
    "evaluation": evaluate,
    "gathered": gather,
    "full": lambda model: next(model.parameters()).full(),
    "norm": lambda model: next(model.parameters()).norm(),
    "total": lambda model: lamina.total(3),
    "half a step": lambda model: model(torch.ones(2, 8)),
}


BEFORE_ALL = ("save", "load", "keep", "evaluation")  # beside a first step, in which ranks agree on every use


def go_elsewhere(at: int, names: Sequence[str]) -> dict[str, tuple[str, str, float]]:
    with short_limits():
        found = {}
        for number, name in enumerate(names):
            act, transport = on_rank(0, ELSEWHERE[name]), ("peer", "c10d")[(number + at) % 2]
            found[name] = timed(lambda act=act, transport=transport: train(at, act, transport=transport))
        return found


@pytest.mark.parametrize(("at", "names"), [(1, BEFORE_ALL), (3, tuple(ELSEWHERE))])
def test_what_only_one_rank_does_is_named_on_both(at: int, names: Sequence[str]) -> None:
    found = run_ranks(2, go_elsewhere, at, names, timeout=90)
    for name in names:
        (code, text, seconds), (other_code, other_text, other_seconds) = (each[name] for each in found)
        assert code.startswith("LAM-") and "rank 0" in text and "rank 1" in text, (name, code, text)
        assert (other_code, other_text) == (code, text), name
        assert max(seconds, other_seconds) < LIMIT_S, (name, seconds, other_seconds)
        assert "test_hangs.py:" in text or "training.py:" in text, (name, text)


def evaluate_later() -> tuple[str, str, float]:
    """All ranks know the program of an evaluation; then rank 0 runs one alone."""
    with short_limits():
        model = build()
        for _ in range(LATER):
            step(model)
        evaluate(model)

        def alone() -> None:
            if dist.get_rank() == 0:
                evaluate(model)
            step(model)
            step(model)

        return timed(alone)


def test_an_evaluation_on_one_rank_is_named_though_all_know_its_program() -> None:
    found = run_ranks(2, evaluate_later, timeout=PATIENCE_S)
    for code, text, seconds in found:
        assert code == "LAM-H1" and "rank 0" in text and "rank 1" in text and seconds < LIMIT_S, found


def barrier_on_rank_1(at: int) -> None:
    with short_limits():
        train(at, on_rank(1, lambda model: dist.barrier()), transport=TRANSPORTS[at])


@pytest.mark.parametrize("at", [1, LATER])
def test_a_barrier_on_one_rank_is_named_on_both(at: int) -> None:
    """The one in the barrier cannot look up: its connections to other ranks are cut. Nobody's process ends."""
    verb = "gathers" if at > 1 else "agrees"
    words = ["rank 0 in step", verb, "waits in torch.distributed.barrier (test_hangs.py:"]
    expect_error(2, barrier_on_rank_1, at, error="Disagreement", contains=words, timeout=PATIENCE_S)


# ---- the door ------------------------------------------------------------------------------------------------------


def mesh_that_one_rank_cannot_mean() -> None:
    names = ("replicate", "shard") if dist.get_rank() else ("rows", "columns")
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    lamina.shard(nn.Linear(8, 8), mesh=mesh)


def test_a_mesh_that_one_rank_cannot_mean_is_an_error_on_both() -> None:
    words = ["mesh axes ('rows', 'columns')", "which of them hold data ranks?"]
    expect_error(2, mesh_that_one_rank_cannot_mean, error="UsageError", contains=words, timeout=PATIENCE_S)
    assert run_ranks(2, shard_at_the_second_try, timeout=PATIENCE_S) == [8, 8]


def shard_at_the_second_try() -> int:
    """A rank that failed and tries again at once meets the next call of the others, not the one that it failed."""
    names = ("replicate", "shard") if dist.get_rank() else ("rows", "columns")
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    with pytest.raises(lamina.UsageError):
        lamina.shard(nn.Linear(8, 8), mesh=mesh)
    with pytest.raises(AttributeError if dist.get_rank() else lamina.Disagreement, match="AttributeError|attribute"):
        lamina.shard(nn.Linear(8, 8), mesh=None if dist.get_rank() == 0 else object.__new__(DeviceMesh))
    return int(lamina.shard(nn.Linear(8, 8)).weight.shape[0])
