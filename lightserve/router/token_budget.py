"""How much KV memory requests will need: the peak of what they hold, and an estimate of their output lengths."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
Rates = npt.NDArray[np.float64]

ROUNDING = 1e-6  # tokens: rates are floating-point numbers
HISTORY = 2048  # output lengths that the estimate keeps
MIN_HISTORY = 32  # with fewer lengths there is no estimate
QUANTILE = 0.7  # of the outputs that were longer: 8 to 13 % more tokens/s than 0.9 in lightserve/simulate


def peak_tokens(
    held: Sequence[int] | Lengths, remaining: Sequence[int] | Lengths, tokens_a_step: Rates | None = None
) -> int:
    """The most tokens held at once, if each request holds ``held`` now and ends after ``remaining`` more.

    Every request grows by ``tokens_a_step`` (None: one) and frees all its tokens at its end. So the peak is at the end
    of a request: when the request with the k-th most remaining steps ends, k requests are left, and each has grown in
    all these steps.
    """
    if not len(held):
        return 0
    b = np.asarray(remaining, dtype=np.int64)
    steps = b if tokens_a_step is None else b / tokens_a_step
    order = np.argsort(-steps, kind="stable")
    steps, a = steps[order], np.asarray(held, dtype=np.int64)[order]
    growth = np.arange(1, len(b) + 1) if tokens_a_step is None else np.cumsum(tokens_a_step[order])
    peak = float((steps * growth + np.cumsum(a)).max())
    return math.ceil(peak - ROUNDING)


class OutputEstimate:
    """Estimates how many more tokens a request will generate from the lengths of recent outputs."""

    def __init__(self, quantile: float = QUANTILE) -> None:
        self._quantile = quantile
        self._recent: deque[int] = deque(maxlen=HISTORY)
        self._sorted: Lengths | None = None

    def observe(self, output_len: int) -> None:
        self._recent.append(output_len)
        self._sorted = None

    def remaining(self, generated: Lengths, max_new_tokens: Lengths) -> Lengths:
        """The estimate for requests that have ``generated`` tokens: 1 at least, what max_new_tokens leaves at most."""
        left = max_new_tokens - generated
        if len(self._recent) < MIN_HISTORY:
            return left
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._recent, dtype=np.int64, count=len(self._recent)))
        lengths = self._sorted
        first = np.searchsorted(lengths, generated, side="right")  # outputs from here on were longer than ``generated``
        index = first + ((len(lengths) - first) * self._quantile).astype(np.int64)
        guess = lengths[np.minimum(index, len(lengths) - 1)] - generated
        return np.where(first == len(lengths), left, np.clip(guess, 1, left))
