"""One random training job, on all ranks and in one process, from a seed.

Every rank runs the plain model on what all ranks see, with masters in float64, and compares losses, norms, gradients
(whether there is one, too) and its own ranges of the parameters after each of three steps. Between and inside the steps
the job does what users do: evaluations, edits, freezing, loads, errors that are caught.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lamina
from fuzz.case import ROUNDING, ROUNDING_OF_ONE, STEPS, Case, begin_on, draw_case, ignored_of, place_on, units_of
from fuzz.caught import fail, give_up, raise_once
from fuzz.forms import coming_halves
from fuzz.hooks import add_hooks
from fuzz.late import peers_come_late
from fuzz.layers import WIDTH, has_reentrant
from fuzz.lookups import make_dense
from fuzz.models import RandomModel
from fuzz.moves import move
from fuzz.plain import Plain
from fuzz.sides import Keeper, Losses, begin_step, deviation_of_all, forget
from fuzz.stranded import outdate, strand
from fuzz.trainer import Trainer
from fuzz.twins import average, rewind, twin
from lamina.runtime import halving
from lamina.runtime.assemble import RUNTIMES
from parity.reference import difference, gradient_deviation, parameter_deviation

LATE_S = 0.01
MAX_NORM = 0.1


def case_of(seed: int, ranks: int) -> Case:
    model = RandomModel(seed)
    case = draw_case(seed, ranks, model.features)
    if case.sides and case.sides.order == "grad" and has_reentrant(model):  # torch refuses gradients of inputs
        case = replace(case, sides=replace(case.sides, order="first"))
    return case


class Job:
    """The sharded model of this rank, and the plain one."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, scheme = case, device, case.scheme
        self.draw, self.failures = random.Random(f"job {case.seed}"), random.Random(f"failures {case.seed}")
        self.reference, self.keepers = Plain(case.seed, scheme, device), dict[nn.Module, Keeper]()
        self.plain = self.reference.masters
        if case.sides:
            self.keepers[self.reference.model] = Keeper(self.reference.model, case.sides)
        for moment in ("before", "after"):
            self.hang(self.reference.model, moment)
        self.model, mine = self.build(case)
        names = [name for name, p in self.plain.named_parameters() if p.requires_grad]
        theirs = Trainer(case, {name: self.plain.get_parameter(name) for name in names}, is_reference=True)
        self.trainers = [mine, theirs]
        self.rounds = case.rounds(self.plain.features)
        self.batches = iter(lamina.even(range(case.wider.batches[self.rank]))) if case.wider.batches else None
        self.moves, self.average_of, self.snapshot = 0, None, None
        self.number: int | None = None  # of the step that is under way
        self.worst, self.where, self.rounding = 0.0, "", 0.0

    def build(self, case: Case) -> tuple[nn.Module, Trainer]:
        """The sharded model in the layout of `case`, with what trains it."""
        scheme = case.scheme
        mesh, self.rank = place_on(case.grid, dist.get_rank(), self.device)
        model = RandomModel(case.seed, scheme.born).to(self.device)
        if case.world == 1 or self.reference.input_dtype is torch.bfloat16:
            make_dense(model)
        if case.sides:
            self.keepers[model] = Keeper(model, case.sides)
        self.hang(model, "before")
        lamina.shard(
            model,
            lamina.Strategy(*case.strategy) if isinstance(case.strategy, tuple) else case.strategy,
            mesh=mesh,
            units=units_of(case, model),
            precision=scheme.given,
            transport="auto" if case.late_peers else case.transport,
            slots=case.slots,
            recompute=case.recompute,
            replicate=case.replicate,
            ignore=ignored_of(case, model),
        )
        gradients = RUNTIMES[model].engine.gradients
        if case.seed % 2 and gradients.units:  # as on GPUs
            gradients.gives_back = True
        self.hang(model, "after")
        if case.late == self.rank:
            random.Random(case.seed).choice(list(model.blocks)).register_forward_pre_hook(_wait)
        self.clips_in_step = case.clips_in_step
        trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return model, Trainer(case, trains, is_reference=False, max_norm=MAX_NORM if self.clips_in_step else None)

    def compare(self, what: str, deviation: float) -> None:
        if not deviation <= self.worst:
            self.worst, self.where = deviation, what

    def data(self, step: int, rank: int, micro: int, forward: int) -> Tensor:
        """(samples, WIDTH), of one rank."""
        key = ((step * 7 + rank) * 5 + micro) * 3 + forward
        generator = torch.Generator().manual_seed(key)
        drawn = torch.randn(1 + (key % 3), WIDTH, dtype=torch.float64, generator=generator)
        return drawn.to(self.device, self.case.scheme.born)

    def hang(self, model: nn.Module, moment: str) -> None:
        """Hooks of the user's, in the same order on both models."""
        if self.case.hooks == moment:
            add_hooks(model, self.case.seed)
        if self.case.sides and self.case.sides.hooked == moment:
            self.keepers[model].hang()

    def refresh(self, trains: bool = False) -> None:
        """The plain model's weights, for a forward that is to come. `trains`: with gradients."""
        if self.case.patience:
            names = coming_halves(self.model, trains)
            self.reference.halved = {p for name, p in self.plain.named_parameters() if name in names}
        self.reference.refresh()

    def losses(self, model: nn.Module, step: int, micro: int, rank: int) -> Losses:
        outputs, inputs, sides = [], [], list[Tensor]()
        keeper, overflow = self.keepers.get(model), self.case.wider.overflow
        overflows = overflow is not None and (self.number, rank) == (overflow[0], overflow[1] % self.case.world)
        handle = model.get_submodule(overflow[2]).register_forward_hook(_overflow) if overflows else None
        for forward in range(self.case.forwards):
            data = self.data(step, rank, micro, forward)
            if keeper is not None:
                inputs.append(data.requires_grad_(keeper.sides.order == "grad"))
                keeper.forget()
            outputs.append(self.output(model, data, rank))
            sides += keeper.take(rank) if keeper is not None else []
        if handle is not None:
            handle.remove()
        own = torch.stack([output.pow(2).mean() for output in outputs]).sum() / self.case.micro_batches
        return Losses(own, [side / self.case.micro_batches for side in sides], inputs)

    def penalty(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        """Over some of the parameters that train, weighed by this rank's data."""
        trains = [name for name, p in self.plain.named_parameters() if p.requires_grad and p.is_floating_point()]
        params, weight = dict(model.named_parameters()), self.data(step, rank, micro, 0).mean().abs() + 0.1
        chosen = [params[name] for name in trains[self.case.seed % 2 :: 3]]
        zero = torch.zeros((), dtype=torch.float64, device=self.device, requires_grad=True)
        return 0.01 * weight * sum((p.pow(2).sum() for p in chosen), zero) / self.case.micro_batches

    def output(self, model: nn.Module, data: Tensor, rank: int) -> Tensor:
        """(samples, WIDTH) in float64; the plain model gets its input in the dtype that it computes in."""
        return model(data.to(self.reference.input_dtype) if model is self.reference.model else data, rank).double()

    # ---- a step ------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        case, title, self.number = self.case, f"step {number}", number
        if number == 1:
            for trainer in self.trainers:
                trainer.take_late()
        self.refresh(trains=True)
        for model in (self.model, self.reference.model):
            begin_step(model, number)
        for keeper in self.keepers.values():
            keeper.at(number)
        for micro in range(case.micro_batches):
            if case.wider.slip is not None and case.wider.slip[:2] == (number, micro):
                with self.scope(micro, last=False):
                    self.raise_once(case.wider.slip[2])
            self.micro_batch(number, micro, f"{title}, {micro}")
        self.end_of_step(title)
        self.number = None

    def micro_batch(self, number: int, micro: int, title: str) -> None:
        case, (mine_scaled, plain_scaled) = self.case, self.trainers
        at, shares = self.batches_of_ranks(number, micro)
        ranks = [self.losses(self.reference.model, *at[rank], rank) for rank in range(case.world)]
        parts = case.sides is not None and case.sides.parts(number, ranks)
        for rank, losses in enumerate(ranks):
            inputs = losses.of_inputs(case.sides, parts)
            for loss, retains in losses.backwards(case.sides, parts):
                if shares[rank]:
                    self.reference.backward(plain_scaled.scale(loss), shares[rank], retains)
            if case.penalty:
                plain_scaled.scale(self.penalty(self.plain, number, rank, micro) / case.world).backward()
            if rank == self.rank:
                wanted, wanted_of_inputs = losses.sum.detach(), inputs
        with self.scope(micro, last=micro == case.micro_batches - 1):
            more = [self.penalty(self.model, number, self.rank, micro)] if case.penalty == "before" else []
            mine = self.losses(self.model, *at[self.rank], self.rank)
            self.compare(f"{title} loss", difference(mine.sum.detach(), wanted))
            if case.penalty == "behind":
                more.append(self.penalty(self.model, number, self.rank, micro))
            found = mine.of_inputs(case.sides, parts)
            if case.wider.overflow is None:
                self.compare(f"{title} gradients of inputs", deviation_of_all(found, wanted_of_inputs))
            for loss, retains in mine.backwards(case.sides, parts):
                mine_scaled.scale(loss if retains else sum(more, loss)).backward(retain_graph=retains)
            if case.penalty == "alone":
                mine_scaled.scale(self.penalty(self.model, number, self.rank, micro)).backward()
        if case.peeks:
            self.evaluate(torch.inference_mode if micro % 2 else torch.no_grad)

    def batches_of_ranks(self, number: int, micro: int) -> tuple[list[tuple[int, int]], list[float]]:
        """By data rank: step and micro-batch whose data it sees, and its share of the mean."""
        case, counts = self.case, self.case.wider.batches
        if self.batches is None:
            return [(number, micro)] * case.world, [1 / case.world] * case.world
        batch = number * case.micro_batches + micro
        mine = next(self.batches)
        assert mine == min(batch, counts[self.rank] - 1)
        active = [batch < count for count in counts]
        at = [divmod(min(batch, count - 1), case.micro_batches) for count in counts]
        return at, [has / sum(active) for has in active]

    def end_of_step(self, title: str) -> None:
        """From gradients to the optimizers' step. Where gradients overflow, none is made."""
        case, (mine, theirs) = self.case, self.trainers
        unscales = [mine, theirs] if case.wider.unscales else [theirs]
        if case.wider.overflow is not None:
            for trainer in unscales:
                trainer.unscale()
        if case.wider.unscales:
            overflows = any(not p.grad.isfinite().all() for p in self.plain.parameters() if p.grad is not None)
            self.compare_gradients(title, overflows)
        self.reference.sizes.clear()
        for trainer in self.trainers:
            trainer.step()
            trainer.zero_grad(set_to_none=not case.zeroes)
        self.compare(f"{title} scale", abs(mine.scaler.get_scale() - theirs.scaler.get_scale()))
        self.compare(f"{title} parameters", self.parameters())
        self.compare(f"{title} optimizer state", self.states())

    def compare_gradients(self, title: str, overflows: bool) -> None:
        """Gradients and their norm, by which they are clipped."""
        case = self.case
        if not overflows:
            deviation = gradient_deviation(self.model, {name: p.grad for name, p in self.plain.named_parameters()})
            if self.rounds:
                self.compare_rounded(title)
            else:
                self.compare(f"{title} gradients", deviation)
        if case.clip is not None:
            theirs = torch.nn.utils.clip_grad_norm_
            mine = theirs if case.clip_by == "torch" and case.clip != float("inf") else lamina.clip_grad_norm_
            filled = [p for p in self.plain.parameters() if p.numel()]  # torch has no largest element of an empty one
            wanted = theirs(filled, MAX_NORM, case.clip)
            got = wanted if self.clips_in_step else mine(self.model.parameters(), MAX_NORM, case.clip)
            if overflows:
                assert not got.isfinite() and not wanted.isfinite(), (got, wanted)
            else:
                self.compare(f"{title} norm", ((got - wanted).abs() / wanted.clamp(min=1)).item())

    def compare_rounded(self, title: str) -> None:
        """Gradients that are sums in 16 bits; the plain job goes on with those that lamina has."""
        all_found = all_allowed = 0.0
        scale = self.trainers[1].scaler.get_scale()
        plain = dict(self.plain.named_parameters())
        for name, param in self.model.named_parameters():
            if param.grad is None:
                continue
            full = param.grad.full() if isinstance(param.grad, lamina.Shard) else param.grad
            wanted, size = plain[name].grad, self.reference.sizes.get(plain[name], 0.0) / scale
            assert wanted is not None
            found = (full - wanted).norm().item()
            all_found, all_allowed = all_found + found**2, all_allowed + (size * ROUNDING) ** 2
            self._round(found, size * ROUNDING_OF_ONE, f"{title} gradient of `{name}`")
            with torch.no_grad():
                wanted.copy_(full)
        self._round(all_found**0.5, all_allowed**0.5, f"{title} gradients")

    def _round(self, found: float, allowed: float, what: str) -> None:
        """Where more roundings than allowed are seen, the difference counts."""
        self.rounding = max(self.rounding, found / max(allowed, self.case.scheme.tolerance))
        if not found <= max(allowed, self.case.scheme.tolerance):
            self.compare(f"{what}, {found / max(allowed, 1e-300):.1f} times what may be rounded", found)

    def scope(self, micro: int, last: bool) -> Any:
        case = self.case
        if case.accumulation in ("each", "defer"):
            return lamina.accumulate(self.model, last=last, defer=case.accumulation == "defer")
        return lamina.keep(self.model.blocks[0]) if case.keeps and last else torch.enable_grad()

    def parameters(self) -> float:
        return parameter_deviation(self.model, {n: p.detach() for n, p in self.plain.named_parameters()})

    def states(self) -> float:
        """Largest deviation of what the optimizers know of the parameters; both must know the same of the same."""
        worst, plain = 0.0, dict(self.plain.named_parameters())
        for name, param in self.model.named_parameters():
            mine, other = self.trainers[0].state_of(param), self.trainers[1].state_of(plain[name])
            if not other and all(not value.any() for value in mine.values()):
                continue  # fused kernels make states in a step that is left out, too
            assert mine.keys() == other.keys(), f"optimizer state of `{name}`: {list(mine)}, wanted {list(other)}"
            for key, value in other.items():
                if isinstance(value, Tensor):
                    worst = max(worst, difference(mine[key], value))
        return worst

    # ---- what happens between steps ----------------------------------------------------------------------------

    strand, outdate, move, twin, average, rewind = strand, outdate, move, twin, average, rewind
    fail, give_up, raise_once = fail, give_up, raise_once

    def act(self, what: str) -> None:
        getattr(self, what)()

    def nothing(self) -> None: ...

    def evaluate(self, mode: Callable[[], Any] = torch.no_grad) -> None:
        data = self.data(99, self.rank, 0, 0)
        self.refresh()
        with mode():
            found, wanted = (self.output(model, data, self.rank) for model in (self.model, self.reference.model))
            self.compare("evaluation", difference(found, wanted))

    def infer(self) -> None:
        self.evaluate(torch.inference_mode)

    def edit(self) -> None:
        with lamina.gathered(self.model, write=True), torch.no_grad():
            for parameter in filter(_has_fractions, self.model.parameters()):
                parameter.mul_(0.9)
        with torch.no_grad():
            for parameter in filter(_has_fractions, self.plain.parameters()):
                parameter.mul_(0.9)

    def scale(self) -> None:
        """An edit of each rank's own ranges."""
        for model in (self.model, self.plain):
            self.scale_model(model, 1.1)

    @torch.no_grad()
    def scale_model(self, model: nn.Module, factor: float) -> None:
        for parameter in filter(_has_fractions, model.parameters()):
            parameter.mul_(factor)

    def toggle(self) -> None:
        """Freeze or unfreeze what was trainable when the model was sharded."""
        chosen = {name for name in self.trainers[1].names if name != "gain" and self.draw.random() < 0.3}
        for model in (self.model, self.plain):
            for name, parameter in model.named_parameters():
                if name in chosen:
                    parameter.requires_grad_(not parameter.requires_grad)

    def load(self) -> None:
        with torch.no_grad():
            for parameter in filter(_has_fractions, self.plain.parameters()):
                parameter.add_(0.01)
        self.model.load_state_dict(self.plain.state_dict())
        self.compare("load", self.parameters())

    def replicas(self) -> None:
        lamina.check(self.model)

    def end(self) -> None:
        assert self.batches is None or next(self.batches, None) is None


def _has_fractions(parameter: Tensor) -> bool:
    return parameter.dtype is not torch.int8


def _wait(module: nn.Module, args: Any) -> None:
    time.sleep(LATE_S)


def _overflow(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * float("inf"))


@dataclass(frozen=True)
class Outcome:
    case: Case
    features: frozenset[str]
    worst: float
    where: str
    rounding: float  # largest part of what sums in 16 bits may differ by

    @property
    def tolerance(self) -> float:
        return self.case.scheme.tolerance

    @property
    def is_right(self) -> bool:
        return self.worst <= self.tolerance


def run(case: Case, device: str) -> Job:
    """All steps of a job, and what happens between them."""
    lamina.debug(case.debug)
    choices = ExitStack()
    if case.patience:
        choices.enter_context(patch.object(halving, "pays_on", lambda device: True))
        choices.enter_context(patch.object(halving, "PATIENCE", case.patience))
    if case.late_peers:
        choices.enter_context(peers_come_late(case.seed, dist.get_rank()))
    try:
        job = Job(case, device)
        for number in range(STEPS):
            for what in job.case.acts[number]:
                job.act(what)
            job.step(number)
        job.end()
        forget(job.model)
    finally:
        lamina.debug(False)
        choices.close()
    return job


def play(seed: int, device: str = "cpu") -> Outcome:
    """Run one job on this rank. Any error is a fault: nothing that these jobs do is refused."""
    case = case_of(seed, dist.get_world_size())
    if device != "cpu":  # whose products are rounded as their addresses are aligned: with 64 bits it cannot be seen
        has_coarse = "Coarse" in RandomModel(seed).features
        case = replace(case, precision="own, wide masters" if has_coarse else "own")
    job = run(case, device)
    features = job.plain.features | job.case.features | ({"sums in 16 bits"} if job.rounds else set())
    return Outcome(job.case, features, job.worst, job.where, job.rounding)


def play_all(seeds: Sequence[int], device: str = "cpu") -> list[Outcome]:
    begin_on(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        return [play(seed, device) for seed in seeds]
