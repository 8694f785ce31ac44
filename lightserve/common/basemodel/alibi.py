"""ALiBi: a slope for every head (Press et al., 2022)."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """A geometric sequence; heads past a power of two take the odd terms of the next one."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    whole = 2 ** math.floor(math.log2(num_heads))
    return tuple(geometric(whole) + geometric(2 * whole)[::2][: num_heads - whole])
