"""Does every architecture of the installed transformers train sharded as it trains alone?

    torchrun --nproc-per-node 2 benchmarks/libraries/architectures.py [NAME ...]      # ten minutes; one line a model

Every model for next, masked or translated tokens that can be built in a tiny size, with weights that make logits
differ, called as it comes: with caches of keys and values. Three clipped steps of SGD on every rank's part of a batch
are compared with the same steps on all parts in one process, in float64: the largest difference of a parameter, over
peers, over collectives with everything recomputed, and with what is cheap recomputed. WRONG: it is no rounding.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import lamina
from lamina.errors import LaminaError

sys.path.append(str(Path(__file__).parents[1] / "train"))
from packing import build

STEPS, ROWS, LENGTH, ROUNDING = 3, 2, 12, 1e-9
WAYS: Sequence[dict[str, Any]] = (
    {"transport": "auto"},
    {"transport": "c10d", "recompute": "full"},
    {"transport": "auto", "recompute": "selective"},
)
KINDS = {
    "next": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "translated": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}


def loss_of(model: nn.Module, kind: str, tokens: Tensor) -> Tensor:
    given = {"decoder_input_ids": tokens} if kind == "translated" else {}
    output = model(input_ids=tokens, **given)
    logits = getattr(output, "logits", output[0])
    labels = tokens.roll(-1, 1) % logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def train(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(STEPS):
        loss(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def parts(step: int) -> Sequence[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(5, 40, (ROWS * dist.get_world_size(), LENGTH), generator=draw).split(ROWS)


def alone(name: str, model: str, kind: str) -> nn.Module:
    """Trained in one process, on the batches of all ranks."""
    made = build(name, model).double()
    train(made, lambda step: torch.stack([loss_of(made, kind, part) for part in parts(step)]).mean())
    if any(parameter.isnan().any() for parameter in made.parameters()):
        raise ValueError("no numbers in one process")
    return made


def difference(wanted: nn.Module, name: str, model: str, kind: str, way: dict[str, Any]) -> float:
    """Collective."""
    split = lamina.shard(build(name, model).double(), **way)
    train(split, lambda step: loss_of(split, kind, parts(step)[dist.get_rank()]))
    with lamina.gathered(split):
        pairs = zip(wanted.parameters(), split.parameters(), strict=True)
        worst = torch.stack([(one - other).abs().max() for one, other in pairs if one.numel()]).max().detach()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def models() -> Iterator[tuple[str, str, str]]:
    for kind, named in KINDS.items():
        for name, classes in named.items():
            if not sys.argv[1:] or name in sys.argv[1:]:
                yield kind, name, classes if isinstance(classes, str) else classes[0]


def line(kind: str, name: str, model: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            wanted = alone(name, model, kind)
        except Exception as problem:  # most need sizes of their own
            return f"not tried: {said_by(problem)}"
        try:
            found = [difference(wanted, name, model, kind, way) for way in WAYS]
        except LaminaError as error:
            return f"refused: {error}"
        except Exception as problem:
            return f"FAILED: {said_by(problem)}"
    return "".join(f"{worst:9.1g}" for worst in found) + ("" if max(found) < ROUNDING else "  WRONG")


def said_by(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:70]}"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind, name, model in models():
        said = line(kind, name, model)
        if dist.get_rank() == 0:
            print(f"{kind:<11}{name:<28} {said[:160]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
