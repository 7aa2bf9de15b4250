"""What `lamina.adopt` refuses: by name, on every rank, nothing changed; training goes on as if nobody had asked."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from harness import expect_error, run_ranks
from parity.models import VOCABULARY, WIDTH
from parity.reference import TOLERANCE, language_loss_of
from runtime.test_adopt import Beside, Job, Way, train

Said = dict[str, tuple[str, str]]  # case -> name of the error, message


def ask(said: Said, case: str, call: Callable[[], object]) -> None:
    try:
        call()
    except lamina.LaminaError as error:
        said[case] = type(error).__name__, str(error)
    else:
        said[case] = "nothing", ""


def linear(outputs: int = WIDTH, **kind: object) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, outputs, **{"dtype": torch.float64, **kind})  # type: ignore[arg-type]


def ask_for_what_is_not_new(model: nn.Module, said: Said) -> None:
    ask(said, "no model", lambda: lamina.adopt(None, None))  # type: ignore[arg-type]
    ask(said, "not sharded", lambda: lamina.adopt(linear(), linear()))
    ask(said, "no module", lambda: lamina.adopt(model, "head"))  # type: ignore[arg-type]
    ask(said, "not registered", lambda: lamina.adopt(model, linear()))
    ask(said, "nothing new", lambda: lamina.adopt(model, model))
    ask(said, "no such start", lambda: lamina.adopt(model, model, start="first"))
    model.extra = linear()
    ask(said, "new elsewhere", lambda: lamina.adopt(model, model.head))
    ask(said, "not adopted", lambda: language_loss_of(model, 0, 0, 0))


def ask_for_different_things(model: nn.Module, said: Said) -> None:
    rank = dist.get_rank()
    model.extra = linear(2 + rank)
    ask(said, "shapes", lambda: lamina.adopt(model, model.extra))
    model.extra = linear(dtype=torch.float64 if rank else torch.float32)
    ask(said, "dtypes", lambda: lamina.adopt(model, model.extra))
    model.extra = linear(device="meta" if rank else "cpu")
    ask(said, "meta", lambda: lamina.adopt(model, model.extra))
    model.extra = linear().requires_grad_(rank == 1)
    ask(said, "trainability", lambda: lamina.adopt(model, model.extra))
    model.extra = linear()
    with torch.no_grad():
        model.extra.weight[1, 2] += rank
    ask(said, "values", lambda: lamina.adopt(model, model.extra))
    del model.extra
    setattr(model, f"extra{rank}", linear())
    ask(said, "names", lambda: lamina.adopt(model, model))
    delattr(model, f"extra{rank}")
    if rank == 0:
        model.extra = linear()
    ask(said, "one rank", lambda: lamina.adopt(model, model))
    model.extra = None
    model.extra = nn.Module()
    model.extra.p = nn.Parameter(torch.empty(3, device="meta"))
    ask(said, "uninitialised", lambda: lamina.adopt(model, model))
    del model.extra


def ask_at_the_wrong_moment(model: nn.Module, said: Said, folder: Path) -> None:
    rank = dist.get_rank()
    model.extra = linear().requires_grad_(False)

    def adopt(*_: object) -> None:
        lamina.adopt(model, model)

    loss = language_loss_of(model, 0, rank, 0)
    ask(said, "graph alive", adopt)
    if rank == 0:
        del loss
    ask(said, "graph alive on one rank", adopt)
    loss = None
    with lamina.accumulate(model, last=False, defer=True):
        language_loss_of(model, 0, rank, 0).backward()
        ask(said, "accumulate", adopt)
    ask(said, "between micro-batches", adopt)
    with lamina.accumulate(model, last=True, defer=True):
        language_loss_of(model, 0, rank, 0).backward()
    model.zero_grad()
    with lamina.keep(model.blocks[1]):
        ask(said, "keep", adopt)
    with lamina.gathered(model):
        ask(said, "gathered", adopt)
    with lamina.trace(folder / "trace.json", model):
        language_loss_of(model, 0, rank, 0).backward()
        ask(said, "trace", adopt)
    model.zero_grad()
    hook = model.blocks[1].register_forward_pre_hook(adopt)
    ask(said, "inside a forward", lambda: language_loss_of(model, 0, rank, 0))
    hook.remove()
    gc.collect()
    del model.extra


def ask_for_what_has_no_unit(model: nn.Module, said: Said) -> None:
    def adopt() -> object:
        return lamina.adopt(model, model)

    block, head = model.blocks[0], model.head
    block.extra = linear()
    model.tied = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.tied.weight = head.weight
    ask(said, "tied outside", adopt)
    del model.tied
    model.head = Beside(head).double()
    ask(said, "taken out", adopt)
    model.head = head
    block.extra = lamina.shard(linear(), "ddp")
    ask(said, "sharded by itself", adopt)
    block.extra = copy.deepcopy(model.blocks[1])
    ask(said, "copied", adopt)
    del block.extra


def refused(strategy: str, folder: Path) -> tuple[Said, float]:
    plain, job = Job(None), Job(Way(strategy))
    said: Said = {}
    worst = train(plain, job, range(1))
    ask_for_what_is_not_new(job.model, said)
    ask_for_different_things(job.model, said)
    worst = max(worst, train(plain, job, range(1, 2)))
    ask_at_the_wrong_moment(job.model, said, folder)
    worst = max(worst, train(plain, job, range(2, 3)))
    ask_for_what_has_no_unit(job.model, said)
    return said, max(worst, train(plain, job, range(3, 4)))


EXPECTED = {
    "no model": ("UsageError", ["NoneType"]),
    "not sharded": ("StateError", ["lamina.shard()"]),
    "no module": ("UsageError", ["a str", "lamina.adopt(model, model.head)"]),
    "not registered": ("UsageError", ["Linear is no module of the model", "register it first"]),
    "nothing new": ("UsageError", ["none of the 25 parameters of this LanguageModel is new"]),
    "no such start": ("UsageError", ["'broadcast'"]),
    "new elsewhere": (
        "UsageError",
        ["lamina.adopt(model, model.head)", "`extra.weight` is", "lamina.adopt(model, model)"],
    ),
    "not adopted": ("ParameterChanged", ["`extra.weight`", "no unit", "Type `lamina.adopt(model, model.extra)`"]),
    "shapes": ("Disagreement", ["rank 0", "(2, 12)", "rank 1", "(3, 12)"]),
    "dtypes": ("Disagreement", ["rank 0", "fp32", "rank 1", "fp64"]),
    "meta": ("Disagreement", ["on meta", "given"]),
    "trainability": ("Disagreement", ["frozen", "trainable"]),
    "values": ("Disagreement", ["`extra.weight`", "rank 1", "lamina.adopt(..., start='broadcast')"]),
    "names": ("Disagreement", ["extra0.weight", "extra1.weight"]),
    "one rank": ("", ["on rank 1 of 2"]),
    "uninitialised": ("InitialisationError", ["`extra.p`"]),
    "graph alive": ("StateError", ["between a forward and its backward", "`root`", "loss.backward()"]),
    "graph alive on one rank": ("", ["between a forward and its backward", "on rank 1 of 2"]),
    "accumulate": ("StateError", ["micro-batches"]),
    "between micro-batches": ("StateError", ["micro-batches"]),
    "keep": ("StateError", ["lamina.keep()"]),
    "gathered": ("StateError", ["lamina.gathered()"]),
    "trace": ("", ["lamina.trace()", "on rank 0 of 2"]),
    "inside a forward": ("StateError", ["inside a forward"]),
    "tied outside": ("UnitError", ["`tied.weight`", "`head.weight`"]),
    "taken out": ("UnitError", ["`head.weight`", "self.base = old"]),
    "sharded by itself": ("StateError", ["Linear"]),
    "copied": ("StateError", ["copied out of a sharded model"]),
}


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_refusals_change_nothing(strategy: str, tmp_path: Path) -> None:
    for rank, (said, worst) in enumerate(run_ranks(2, refused, strategy, tmp_path)):
        assert said.keys() == EXPECTED.keys()
        for case, (kind, words) in EXPECTED.items():
            found, message = said[case]
            assert found == kind or (not kind and found in ("Disagreement", "StateError", "UsageError")), (
                case,
                said[case],
            )
            assert all(word in message for word in words), (rank, case, message)
        assert worst <= TOLERANCE


def leave_one_out() -> Tensor | None:
    model = Job(Way("zero3")).model
    model.extra = linear().requires_grad_(False)
    if dist.get_rank() == 0:
        lamina.adopt(model, model)
    return language_loss_of(model, 0, 0, 0)


def test_a_rank_that_does_not_call_it() -> None:
    expect_error(2, leave_one_out, error="Disagreement", contains=["rank 0: adopt", "rank 1: step 1 forward"])
