"""What both attentions share."""

from __future__ import annotations

from lightserve.common.triton_kernel._blocks import next_power_of_2

MIN_DOT = 16  # tl.dot takes no smaller side


def dot_block(size: int) -> int:
    """The smallest side of a dot's operand that holds ``size``."""
    return max(MIN_DOT, next_power_of_2(size))
