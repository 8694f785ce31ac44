"""What context and token attention share."""

from __future__ import annotations

import triton.language as tl

from lightserve.common.triton_kernel._blocks import next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)  # scores are in base 2: exp2 is one instruction, exp is not
MIN_DOT = 16  # the smallest side that tl.dot takes
MAX_HEAD_DIM = 512  # of queries, keys and values: a tile holds whole heads


def head_block(dim: int) -> int:
    """The side of a tile that holds a head of ``dim``."""
    if dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {dim} is over the limit {MAX_HEAD_DIM} of the Triton attention kernels; use the device cpu"
        )
    return dot_block(dim)


def dot_block(size: int) -> int:
    """The smallest side of an operand of ``tl.dot`` that holds ``size``."""
    return max(MIN_DOT, next_power_of_2(size))
