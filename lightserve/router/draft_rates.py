"""How often the first, the second, the third draft of a step is accepted, beside what is expected of its request.

What a request accepted lately says how well its text is drafted. But a head knows less of later tokens, so its third
draft is accepted less often than its first. All requests together tell by how much.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import Int64Array

Rates = npt.NDArray[np.float64]

MEMORY = 0.98  # what a step counts for after another one
PRIOR = 0.05  # drafts that were accepted as expected: those that nobody tries any more are tried again some day


class DraftRates:
    def __init__(self) -> None:
        self._expected: Rates = np.zeros(0)  # by the number of the draft in its step
        self._accepted: Rates = np.zeros(0)

    def observe(self, acceptance: Rates, reached: Int64Array, accepted: Int64Array) -> None:
        """Of each request: its acceptance before this step, and how many of the step's drafts were reached."""
        numbers = np.arange(int(reached.max(initial=0)))[:, None]
        self._grow(len(numbers))
        self._expected *= MEMORY
        self._accepted *= MEMORY
        self._expected[: len(numbers)] += ((numbers < reached) * acceptance).sum(-1)
        self._accepted[: len(numbers)] += (numbers < accepted).sum(-1)

    def factors(self, count: int) -> Rates:
        """By how much the acceptance of a request is higher or lower for its first ``count`` drafts."""
        self._grow(count)
        factors: Rates = (self._accepted[:count] + PRIOR) / (self._expected[:count] + PRIOR)
        return factors

    def _grow(self, count: int) -> None:
        missing = count - len(self._expected)
        if missing > 0:
            self._expected, self._accepted = (np.pad(sums, (0, missing)) for sums in (self._expected, self._accepted))
