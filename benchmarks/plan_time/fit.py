"""Least squares on the logarithm of a ratio, robust against runs that went wrong, between bounds; numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CLEAR = 0.06  # errors beyond this count linearly: a run that was out of memory must not bend the rates of all others
ROUNDS = 12
ENOUGH = 1e-5  # relative gain of a round at which the fit ends


@dataclass(frozen=True)
class Constant:
    """One fitted number: where the search begins and what is physically possible."""

    name: str
    start: float
    low: float
    high: float


Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]  # constants, row numbers -> seconds


def fit(predict: Predict, seconds: np.ndarray, rows: np.ndarray, constants: Sequence[Constant]) -> np.ndarray:
    """Constants with which `predict` is nearest to `seconds` on `rows`."""
    low, high = (np.array([getattr(c, end) for c in constants]) for end in ("low", "high"))
    at = np.array([c.start for c in constants])
    damping = 1e-2

    def errors(x: np.ndarray) -> np.ndarray:
        return np.log(predict(x, rows) / seconds[rows])

    now = errors(at)
    for _ in range(ROUNDS):
        slopes = np.stack([_slope(errors, at, now, i, high) for i in range(len(at))], axis=1)
        weights = np.minimum(1.0, CLEAR / np.maximum(np.abs(now), 1e-12))
        square, pull = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * now)
        before = cost(now)
        for _ in range(8):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), pull)
            trial = np.clip(at - step, low, high)
            then = errors(trial)
            if cost(then) < before:
                at, now, damping = trial, then, max(damping / 5, 1e-6)
                break
            damping *= 5
        if before - cost(now) < ENOUGH * before:
            break
    return at


def _slope(
    errors: Callable[[np.ndarray], np.ndarray], at: np.ndarray, now: np.ndarray, index: int, high: np.ndarray
) -> np.ndarray:
    moved = at.copy()
    change = 1e-3 * max(abs(at[index]), 1e-2)
    moved[index] += change if at[index] + change <= high[index] else -change
    return (errors(moved) - now) / (moved[index] - at[index])


def cost(errors: np.ndarray) -> float:
    """Squares near zero, straight lines beyond."""
    size = np.abs(errors)
    return float(np.where(size < CLEAR, 0.5 * size**2, CLEAR * (size - 0.5 * CLEAR)).sum())
