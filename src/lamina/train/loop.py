"""The training loop: steps, evaluations, checkpoints, and a clean end at any of them.

What a step does is a function of the configuration and its number: which sequences it reads, the learning rate, the
random numbers of dropout. So a run that was stopped, killed or moved to other ranks goes on as if nothing had been,
and a checkpoint holds, besides weights and moments, the number of the step and the curve so far.

Numbers are brought to the host, and compared over the ranks, every few steps only (`log_every`); in between the host
runs ahead of the device. Files are rank 0's; if it cannot write, every rank stops with that error (stopping.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.checkpoint.api import load, save
from lamina.errors import UsageError
from lamina.runtime.scopes import accumulate, sum_over_ranks
from lamina.trace.session import Trace, trace
from lamina.train.agreed import on_rank_0
from lamina.train.config import learning_rate
from lamina.train.data import deal
from lamina.train.folder import Metrics, RunFolder, draw_curve
from lamina.train.job import Job
from lamina.train.loggers import Log
from lamina.train.memory import used_memory_bytes
from lamina.train.objective import evaluating
from lamina.train.stopping import Stopping
from lamina.train.throughput import flops_per_token, peak_flops
from lamina.train.view import Progress, View

TRACE_AFTER, TRACE_STEPS = 3, 3  # the first steps agree on their order; what follows is alike


@dataclass
class Curve:
    """The same on every rank; travels in every checkpoint."""

    loss: list[float] = field(default_factory=list)  # by step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # behind so many steps

    @property
    def best(self) -> tuple[int, float] | None:
        return min(self.held_out, key=lambda point: point[1], default=None)

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"step": i + 1, "loss": loss} for i, loss in enumerate(self.loss)]
        found += [{"step": step, "held_out_loss": loss} for step, loss in self.held_out]
        return sorted(found, key=lambda row: row["step"])


@dataclass
class Ran:
    """One step whose numbers are still on the device."""

    step: int  # how many have been done with it
    loss_sum: Tensor
    tokens: int  # of all ranks
    norm: Tensor
    lr: float


class Training:
    """One run on this rank."""

    def __init__(self, job: Job, folder: RunFolder, view: View, log: Log) -> None:
        self.job, self.folder, self.view, self.log = job, folder, view, log
        self.rank, self.world = job.control.rank, job.control.world
        self.curve = Curve()
        self.step = 0  # done
        self.stopping = Stopping(job.control)
        self.metrics = Metrics(folder.path / "metrics.jsonl")
        self._ran: list[Ran] = []
        self._began = self._marked = time.perf_counter()
        self._first_step = 0
        self._saved: list[int] = []
        self._diverged = False  # the same on every rank
        compute = torch.bfloat16 if job.config.sharding.precision == "bf16" else torch.float32
        self._peak_flops = peak_flops(job.device, compute)
        self._flops_per_token = flops_per_token(job.model)

    # -- the run

    def run(self) -> bool:
        """Train to the end; False if it was asked to stop before. Collective."""
        config = self.job.config
        steps, watching = config.optimisation.steps or 0, config.watching
        every, save_every = watching.evaluate_every or steps, watching.save_every or steps
        with self.stopping.listening(), contextlib.ExitStack() as tracing:
            if not self.curve.held_out:
                self.evaluate()
            self._began = self._marked = time.perf_counter()
            self._first_step = self.step
            first_traced = min(self.step + TRACE_AFTER, steps - 1)
            while self.step < steps:
                if watching.trace and self.step == first_traced:
                    traced = tracing.enter_context(trace(self.folder.path / "trace.json", self.job.model))
                self._ran.append(self._one_step())
                last = self.step == steps
                if watching.trace and self.step == min(first_traced + TRACE_STEPS, steps):
                    self._on_first(functools.partial(self._end_trace, tracing, traced))
                if self.step % watching.log_every == 0 or last:
                    self._report()
                if self.step % every == 0 or last:
                    self.evaluate()
                if self.step % save_every == 0 or last:
                    self.save()
                if not last and self.stopping.agreed():
                    self.save()
                    self.stopping.settle()
                    return False
            self.stopping.settle()
        return True

    def _one_step(self) -> Ran:
        job, opt, batches = self.job, self.job.config.optimisation, self.job.config.batches
        number = (opt.seed * 1_000_003 + self.step) * 65_537 + self.rank
        torch.manual_seed(number % 2**63)  # dropout: other on every rank
        lr = learning_rate(self.step, opt)
        for group in job.optimizer.param_groups:
            group["lr"] = lr
        rows = job.order.of_step(self.step)
        tokens = job.rows.count(rows)
        loss_sum = torch.zeros((), dtype=torch.float64, device=job.device)
        for number, part in enumerate(deal(rows, batches.accumulate, self.world, self.rank)):
            with accumulate(job.model, last=number == batches.accumulate - 1):
                loss_sum += job.objective.backward(job.rows.take(part, job.device), tokens)
        job.optimizer.step()
        job.optimizer.zero_grad()
        norm = job.optimizer.grad_norm
        assert norm is not None
        self.step += 1
        return Ran(self.step, loss_sum, tokens, norm, lr)

    def _end_trace(self, tracing: contextlib.ExitStack, traced: Trace) -> None:
        tracing.close()
        self.view.say(f"trace: {self.folder.path / 'trace.png'}\n{traced}")

    def evaluate(self) -> float:
        """The loss on held-out text, the mean over its tokens. Collective."""
        job, batches = self.job, self.job.config.batches
        self._report()
        rows = job.evaluation_rows
        share = max(1, (batches.batch or 1) // (self.world * batches.accumulate))
        mine = rows[self.rank :: self.world]
        sums = torch.zeros(2, dtype=torch.float64, device=job.device)  # of the loss; tokens
        with evaluating(job.model):
            for first in range(0, -(-len(rows) // self.world), share):
                part = mine[first : first + share]
                batch = job.held_out.take(part or rows[:1], job.device)  # a rank without rows takes part all the same
                loss = job.objective.loss_sum(batch)
                if part:
                    sums += torch.stack((loss.double(), torch.full_like(loss, batch.count, dtype=torch.float64)))
        loss_sum, tokens = sum_over_ranks(sums, "sums a held-out loss").tolist()
        loss = loss_sum / max(1.0, tokens)
        self.curve.held_out.append((self.step, loss))
        self._on_first(lambda: self._write({"step": self.step, "held_out_loss": loss}))
        self.view.say(f"step {self.step}: held-out loss {loss:.3f}")
        self._marked = time.perf_counter()  # an evaluation is no part of tokens/s
        return loss

    # -- numbers

    def _report(self) -> None:
        """Bring the numbers of the last steps to the host, the same on every rank. Collective."""
        ran, self._ran = self._ran, []
        if not ran:
            return
        steps = self.job.config.optimisation.steps or 0
        sums = sum_over_ranks(torch.stack([r.loss_sum for r in ran]), "sums losses").tolist()
        losses = [value / max(1, r.tokens) for value, r in zip(sums, ran, strict=True)]
        norms = torch.stack([r.norm.double() for r in ran]).tolist()
        now = time.perf_counter()
        here = [used_memory_bytes(self.job.device), int((now - self._marked) * 1e6)]
        memory_bytes, took_us = (max(column) for column in zip(*self.job.control.exchange(here), strict=True))
        self._marked = now
        tokens_per_s = sum(r.tokens for r in ran) / max(1e-6, took_us * 1e-6)
        mfu = tokens_per_s * self._flops_per_token / (self.world * self._peak_flops)
        self.curve.loss += losses
        shared = {"tokens_per_s": tokens_per_s, "mfu": mfu, "memory_bytes": memory_bytes}
        rows = [
            {"step": r.step, "loss": loss, "lr": r.lr, "grad_norm": norm, **shared}
            for r, loss, norm in zip(ran, losses, norms, strict=True)
        ]
        self._on_first(lambda: self._write(*rows))
        self._look_for_divergence(ran, losses, norms)
        per_step_s = (now - self._began) / (self.step - self._first_step)
        self.view.progress(
            Progress(self.step, steps, losses[-1], tokens_per_s, memory_bytes, per_step_s * (steps - self.step))
        )

    def _look_for_divergence(self, ran: list[Ran], losses: list[float], norms: list[float]) -> None:
        """What is no finite number ends the run, and is not saved: a checkpoint of it would take a good one's place."""
        for r, loss, norm in zip(ran, losses, norms, strict=True):
            if self._diverged or (math.isfinite(loss) and math.isfinite(norm)):
                continue
            self._diverged = True
            what = "the norm of the gradients" if math.isfinite(loss) else "the loss"
            kept = f"--resume {shlex.quote(str(self.folder.path))} with " if self._saved else ""
            self.stopping.failure = f"{what} is no finite number in step {r.step}: type {kept}a smaller --lr"

    def _write(self, *rows: dict[str, Any]) -> None:
        self.metrics.add(rows)
        for row in rows:
            self.log(row)

    def _on_first(self, act: Callable[[], None]) -> None:
        """What only rank 0 does; if it fails there, every rank learns it behind this step."""
        if self.rank:
            return
        try:
            act()
        except OSError as problem:
            self.stopping.failure = f"{problem.filename or self.folder.path}: {problem.strerror or problem}"

    # -- checkpoints

    def save(self) -> None:
        """A checkpoint behind this step; only it and the best one stay. Collective."""
        self._report()
        if self.step in self._saved or self._diverged:
            return
        extra = {
            "step": self.step,
            "sequences": len(self.job.rows),
            "loss": self.curve.loss,
            "held_out": [list(point) for point in self.curve.held_out],
        }
        save(str(self.folder.checkpoint(self.step)), self.job.model, self.job.optimizer, extra=extra)
        self._saved.append(self.step)
        best = min(
            (p for p in self.curve.held_out if p[0] in self._saved), key=lambda p: p[1], default=(self.step, 0.0)
        )
        self._saved = sorted({best[0], self.step})
        self._on_first(lambda: self.folder.keep_checkpoints(*self._saved))
        self._marked = time.perf_counter()

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. Collective; `UsageError` if the data are others than they were."""
        extra = load(str(checkpoint), self.job.model, self.job.optimizer)
        if extra["sequences"] != len(self.job.rows):
            raise UsageError(
                f"--resume {self.folder.path}: the data were {extra['sequences']} sequences and are "
                f"{len(self.job.rows)} now, so the order of reading cannot go on: give the text as it was, or begin a "
                "new run"
            )
        self.step = int(extra["step"])
        self.curve = Curve(list(extra["loss"]), [(int(step), loss) for step, loss in extra["held_out"]])
        kept = [int(p.name.removeprefix("step-")) for p in self.folder.checkpoints.glob("step-*")]
        self._saved = sorted(step for step in kept if step <= self.step)
        self._on_first(lambda: self.metrics.resume(self.step, self.curve.rows()))

    def draw(self) -> None:
        """curve.png. Collective."""
        path, rows = self.folder.path / "curve.png", self.curve.rows()
        on_rank_0(self.job.control, lambda: draw_curve(path, rows, self.job.bigram))
