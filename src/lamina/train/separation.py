"""What a model sees beside the document it reads: other documents of the sequence, or the tokens that follow.

Packing asks a model to keep documents apart by their positions alone. Attention of most architectures does; states that
run on (Mamba, short convolutions), masks that are made without positions, and numbers of places in a table do not, and
nothing raises. Nor does an encoder that is asked for the next token and can read it. Every architecture is another
program, so it is found out by trying.

Note [Equal to the bit] Rows of one batch go through the same products, so a document that sees nothing of its
neighbour has the same logits to the bit beside another neighbour, in any precision. A model that mixes a little (a
state that fades) is found by that, where a comparison with the document alone would have to allow for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.core.control import Control
from lamina.errors import UsageError
from lamina.runtime.agreement import together
from lamina.train.objective import NextToken, evaluating

LENGTH = 8  # tokens of a document that is tried
EXACT, ROUNDED = 1e-5, 0.02  # of the largest logit: what wide and 16-bit products may differ by


@dataclass(frozen=True)
class Differences:
    """Largest differences of a document's logits."""

    behind: float  # if another document follows; the middle of its positions, since experts may change over a rounding
    before: float  # if another document stands before it in the sequence
    noise: float  # the largest that `behind` is the middle of: no model that reads forwards has any but rounding
    alone: float  # to the document in a sequence of its own
    joined: float  # of the document alone to the second half of one long document
    size: float  # of the logits
    rounding: float  # EXACT or ROUNDED


def check_separation(objective: NextToken, packed: bool, wide: bool, control: Control, device: torch.device) -> None:
    """Collective; raises the same `UsageError` on every rank for a model that reads what it must not.

    `wide`: it computes in 32 bits at least. `packed`: documents will share sequences.
    """
    seen = differences(objective, EXACT if wide else ROUNDED, device)
    name = type(objective.model).__name__
    together(control, lambda: _judge(seen, name, packed))


def _judge(seen: Differences, name: str, packed: bool) -> None:
    if not seen.behind <= seen.rounding / 4 * seen.size:
        raise UsageError(
            f"{name} reads the tokens that follow (its logits change by {seen.behind:.2g} of {seen.size:.2g} with "
            "them), so it would be told what it has to predict. If it can be used as a decoder, set is_decoder in its "
            "config.json; lamina.shard() takes any module in a script of your own"
        )
    if packed and not (seen.before <= _allowed(seen) and seen.alone <= _rounded(seen)):
        apart = max(seen.before, seen.alone)
        raise UsageError(
            f"{name} does not keep documents apart that share a sequence (its logits change by {apart:.2g} of "
            f"{seen.size:.2g}): type --packing padded"
        )


def _allowed(seen: Differences) -> float:
    """See Note [Equal to the bit]; only where rows of a batch do influence each other by rounding is there more."""
    return 1e-3 * EXACT * seen.size if seen.noise == 0.0 else min(_rounded(seen), 8 * seen.noise)


def _rounded(seen: Differences) -> float:
    """The document alone goes through products of other shapes; what is compared is whether positions begin anew."""
    if seen.rounding == EXACT:
        return 1e-3 * seen.size
    return max(0.2 * seen.joined, ROUNDED * seen.size)


def differences(objective: NextToken, rounding: float, device: torch.device) -> Differences:
    """From two forwards: of five sequences of two documents each, and of one document. Collective."""
    first, other, read = (_document(objective, start, device) for start in (1, 21, 11))
    rows = [(read, first), (read, other), (first, read), (other, read), (first, read)]
    tokens = torch.stack([torch.cat(row) for row in rows])  # [5, 2 LENGTH]
    anew = torch.arange(LENGTH, device=device).repeat(2)
    positions = torch.stack([anew] * 4 + [torch.arange(2 * LENGTH, device=device)])
    with evaluating(objective.model):
        logits = objective.logits(tokens, positions).double()  # [5, 2 LENGTH, vocabulary]
        alone = objective.logits(read.view(1, -1), anew[:LENGTH].view(1, -1))[0].double()
    front, back = logits[:, :LENGTH], logits[:, LENGTH:]
    by_position = (front[0] - front[1]).abs().amax(1)  # [LENGTH]
    return Differences(
        behind=float(by_position.median()),
        before=_most(back[2] - back[3]),
        noise=float(by_position.max()),
        alone=_most(back[2] - alone),
        joined=_most(back[4] - alone),
        size=_most(alone),
        rounding=rounding,
    )


def _document(objective: NextToken, start: int, device: torch.device) -> Tensor:
    words = getattr(getattr(objective.model, "config", None), "vocab_size", None) or start + LENGTH
    return torch.arange(start, start + LENGTH, device=device) % words


def _most(difference: Tensor) -> float:
    return float(difference.abs().max())
