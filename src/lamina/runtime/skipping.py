"""Moves a generator past a draw whose values nobody needs yet.

`deferred` must leave the random stream where the eager constructor would, and nothing in torch says how many numbers
an operation takes. Drawing into scratch memory tells, at the price of the draw.

Here the number is guessed by a law, and the guess is proved in this process before it is used: the first draw of each
kind (operation, type, geometry, bounds) is made, and only if the law leads from the state before it to the state
after it, byte for byte, are later draws of that kind skipped (`mersenne.advance`). What the law does not lead to is
drawn every time. A replay compares the states again (`init_program`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lamina.runtime import mersenne

aten = torch.ops.aten

LEAST_OUTPUTS = 1 << 19  # fewer are drawn in less time than a jump takes

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class Kind:
    """What is known of the draws of one kind."""

    first: tuple[torch.Tensor, torch.Tensor] | None  # states before and after, until the law is held against them
    outputs: int | None = None  # 32-bit numbers that each draw takes; None where no law leads there


_kinds: dict[tuple[Any, ...], Kind] = {}
_trusted = True


def outputs_by_law(func: Callable[..., Any], target: torch.Tensor) -> tuple[int, ...]:
    """How many 32-bit numbers of the CPU's generator a draw into `target` may take, the likeliest first."""
    if func not in (aten.normal_.default, aten.uniform_.default) or target.dtype not in TYPES:
        return ()
    numel, width = target.numel(), 2 if target.dtype is torch.float64 else 1
    if func is aten.uniform_.default:
        return (numel * width,)
    if numel < 16 or not target.is_contiguous():
        return ()  # made in pairs, of which one may be kept for the next draw
    # Made in rows of 16. Of a last row that is not full, all 16 are drawn again at the end, or more than are kept are
    # drawn at once: that differs between types, and between versions of torch.
    short = -numel % 16
    return (numel * width,) if not short else ((numel + 16) * width, numel + short)


def draw(
    generator: torch.Generator,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    real: Callable[[], None],
) -> bytes | None:
    """Take the random numbers of `func(*args, **kwargs)` from `generator`, by a jump or by calling `real`.

    `args[0]` is the target; its geometry and type count, not where it is. Returns the digest of the generator's state
    after a jump, to be compared at replay, and None after a real draw.
    """
    guesses = outputs_by_law(func, args[0]) if _trusted and generator.device.type == "cpu" else ()
    if not guesses or guesses[0] < LEAST_OUTPUTS or not mersenne.is_plain(generator.get_state()):
        real()
        return None
    target, before = args[0], generator.get_state()
    key = (func, target.dtype, tuple(target.size()), tuple(target.stride()), *bounds_of(args, kwargs))
    kind = _kinds.get(key)
    outputs = None if kind is None else _proved(kind, guesses)
    if outputs is not None:
        after = mersenne.advance(before, outputs)
        generator.set_state(after)
        return mersenne.digest(after)
    real()
    if kind is None:
        _kinds[key] = Kind((before, generator.get_state()))
    return None


def bounds_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a draw is given beside its target and generator."""
    return (*args[1:], *((key, value) for key, value in sorted(kwargs.items()) if key != "generator"))


def _proved(kind: Kind, guesses: tuple[int, ...]) -> int | None:
    """Held against the first draw when the second comes: a size that is drawn once costs no polynomial."""
    if kind.first is not None:
        before, after = kind.first
        kind.outputs = next((n for n in guesses if torch.equal(mersenne.advance(before, n), after)), None)
        kind.first = None
    return kind.outputs


def distrust() -> None:
    """Draw everything from now on: a replay ended elsewhere than the jump."""
    global _trusted
    _trusted = False
