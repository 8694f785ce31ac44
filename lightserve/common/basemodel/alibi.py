"""ALiBi: a slope for every head (Press et al., 2022)."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """A geometric sequence; heads past a power of two take the odd terms of the next one."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    whole = 2 ** math.floor(math.log2(num_heads))
    return tuple(geometric(whole) + geometric(2 * whole)[::2][: num_heads - whole])


def mpt_alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """As `alibi_slopes`, but heads that are no power of two take the even terms of the next one, then the odd terms."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * (i + 1) / whole) for i in range(whole)]
    return tuple(slopes if whole == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])
