"""What the kernels of a linear scan load alike."""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.common.ops.state.linear_scan import L2_EPS

EPS = tl.constexpr(L2_EPS)


@triton.jit
def load_keys(ptr, rows, row_stride, cols, mask, HAS_NORM: tl.constexpr):
    """Queries or keys ``[rows, cols]`` in float32, of length 1 with ``HAS_NORM``."""
    x = tl.load(ptr + rows[:, None] * row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        x *= tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]
    return x


@triton.jit
def load_decay(ptr, rows, row_stride, cols, in_rows, in_cols, BY_CHANNEL: tl.constexpr):
    """The sums of log decays up to each row, ``[rows, cols]`` or ``[rows, 1]``, and those of all rows."""
    if BY_CHANNEL:
        mask = in_rows[:, None] & in_cols[None, :]
        by_channel = tl.load(ptr + rows[:, None] * row_stride + cols[None, :], mask=mask, other=0.0)
        decay = tl.cumsum(by_channel, axis=0)
        whole = tl.sum(by_channel, axis=0)[None, :]
    else:
        by_head = tl.load(ptr + rows * row_stride, mask=in_rows, other=0.0)
        decay = tl.cumsum(by_head, axis=0)[:, None]
        whole = tl.sum(by_head, axis=0)
    return decay, whole
