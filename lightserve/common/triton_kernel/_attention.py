"""What both attentions share."""

from __future__ import annotations

import triton.language as tl

from lightserve.common.triton_kernel._blocks import next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)  # scores are in base 2: exp2 is one instruction, exp is not
MIN_DOT = 16  # tl.dot takes no smaller side


def dot_block(size: int) -> int:
    """The smallest side of a dot's operand that holds ``size``."""
    return max(MIN_DOT, next_power_of_2(size))
