"""When requests are sent: at once, evenly, or at random."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start to each of ``count`` requests.

    Intervals have a gamma distribution with shape ``burstiness``: 1 is a Poisson process, less is burstier, inf is
    even. They are scaled so that the last request comes after ``count / rate`` seconds: the offered rate is exact.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [i / rate for i in range(1, count + 1)]
    intervals = np.random.default_rng(seed).gamma(burstiness, 1 / burstiness, count)
    times = np.cumsum(intervals)
    return [float(t) for t in times * (count / rate / times[-1])]
