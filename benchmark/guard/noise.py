"""What a change is, beside how much a figure differs between runs of the same code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, variance

FLOOR_PERCENT = 1.0  # less is no change, however still the machine was
# Student's t, two-sided 95 %, by degrees of freedom: runs of both sides less two.
T_95 = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228}
T_95_MANY = 2.2


@dataclass(frozen=True, slots=True)
class Judged:
    """A figure of both sides, with as many values each as there were rounds."""

    before: Sequence[float]
    after: Sequence[float]
    more_is_better: bool

    @property
    def percent(self) -> float:
        return (median(self.after) / median(self.before) - 1) * 100

    @property
    def noise_percent(self) -> float | None:
        """The least change that noise does not explain. None: one run each says nothing about noise."""
        runs = len(self.before)
        if runs < 2:
            return None
        spread = math.sqrt((variance(self.before) + variance(self.after)) / runs)
        t = T_95.get(2 * runs - 2, T_95_MANY)
        return max(FLOOR_PERCENT, t * spread / median(self.before) * 100)

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or nothing."""
        noise = self.noise_percent
        if noise is None or abs(self.percent) <= noise:
            return ""
        return "better" if (self.percent > 0) == self.more_is_better else "worse"
