"""ALiBi: a slope for every head (Press et al., 2022)."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """A geometric sequence down to ``2 ** -bias_max``; heads past a power of two take the odd terms of the next one."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-bias_max * (i + 1) / n) for i in range(n)]

    whole = 2 ** math.floor(math.log2(num_heads))
    return tuple(geometric(whole) + geometric(2 * whole)[::2][: num_heads - whole])
