"""How long a step with prompts takes, learned from those that ended."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MEMORY = 0.98  # what an observation counts for after another one
MIN_STEPS = 8  # observed before there is an estimate
MAX_SURPRISE = 2.0  # a step that took longer than so many times the estimate counts as if it took no longer
UNITS = np.array([1e3, 1e6])  # of tokens and pairs, so that both are about 1
RIDGE = 1e-6  # prompts without context say nothing about pairs: they then count as free


class StepCost:
    """So much for every token, and so much for every pair of a prompt token and a token that it attends to.

    Steps that only decode are no part of this: their time is that of reading the weights.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._products = np.zeros((2, 2))  # of the observed tokens and pairs
        self._with_seconds = np.zeros(2)  # the same, times seconds
        self._cost: npt.NDArray[np.float64] | None = None  # seconds for a unit of tokens and of pairs

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        work = np.array([tokens, pairs]) / UNITS
        if self._cost is not None:
            seconds = min(seconds, MAX_SURPRISE * float(work @ self._cost))
        self._products = MEMORY * self._products + np.outer(work, work)
        self._with_seconds = MEMORY * self._with_seconds + work * seconds
        self._num_steps += 1
        if self._num_steps >= MIN_STEPS:
            self._cost = _solve(self._products, self._with_seconds)

    @property
    def is_known(self) -> bool:
        return self._cost is not None

    def tokens_within(self, seconds: float, context: float) -> int | None:
        """So many tokens take so long after ``context`` tokens each; None: too few steps have ended."""
        if self._cost is None:
            return None
        token_s, pair_s = (self._cost / UNITS).tolist()
        return int(seconds / (token_s + pair_s * context))


def _solve(products: npt.NDArray[np.float64], with_seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares. Neither tokens nor pairs cost less than nothing."""
    tokens_s, pairs_s = np.linalg.solve(products + np.eye(2) * RIDGE, with_seconds).tolist()
    if pairs_s < 0:
        return np.array([with_seconds[0] / products[0, 0], 0.0])
    if tokens_s <= 0:
        return np.array([1e-9, with_seconds[1] / products[1, 1]])
    return np.array([tokens_s, pairs_s])
