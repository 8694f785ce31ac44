"""What context and token attention share."""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.common.triton_kernel._blocks import next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)  # scores are in base 2: exp2 is one instruction, exp is not
LOWEST = tl.constexpr(-1e38)  # below any score, and finite: the difference of two -inf is NaN
MIN_DOT = 16  # the smallest side that tl.dot takes
MAX_HEAD_DIM = 512  # of queries, keys and values: a tile holds whole heads


@triton.jit
def cap_scores(scores, softcap):
    """``softcap`` times tanh of half of ``scores`` / log2(e); None: the scores as they are."""
    return scores if softcap is None else softcap - 2 * softcap / (tl.exp2(scores) + 1)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """The factor of the products of queries and keys, and the softcap of ``cap_scores``, for scores in base 2."""
    if softcap is None:
        return scale * LOG2_E.value, None
    return 2 * LOG2_E.value * scale / softcap, softcap * LOG2_E.value


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
