"""What the ops over a row of logits share: one program walks the row in blocks."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # 16 floats a lane of WARPS warps, four 16-byte loads in flight
WARPS = 8


@triton.jit
def fold_argmax(best, best_col, values, first_col):
    """The larger of ``best`` and the block's largest, with its column; of equals the first. A NaN never wins."""
    value, lane = tl.max(values, axis=0, return_indices=True)
    is_better = value > best
    return tl.where(is_better, value, best), tl.where(is_better, first_col + lane, best_col)
