"""Watermarks: one program for each block of a watermarked row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.watermark import GREEN_BIAS, GREEN_SHARE, HASH_KEY
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.sampling._hash import hash32
from lightserve.common.triton_kernel.sampling._vocab import BLOCK, WARPS

GREEN_BELOW = int(GREEN_SHARE * 2**32)


@triton.jit
def _add_watermark_kernel(
    logits_ptr,
    rows_ptr,
    b_last_ptr,
    logits_row_stride,
    n_cols,
    HASH_KEY: tl.constexpr,
    GREEN_BELOW: tl.constexpr,
    GREEN_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which = tl.program_id(0)
    row = tl.load(rows_ptr + which).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(b_last_ptr + which).to(tl.int64) * HASH_KEY
    key = hash32(hash32(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))

    is_green = hash32(key ^ cols.to(tl.uint32)).to(tl.int64) < GREEN_BELOW
    is_marked = is_green & (cols < n_cols)
    logit_ptrs = logits_ptr + row * logits_row_stride + cols
    tl.store(logit_ptrs, tl.load(logit_ptrs, mask=is_marked, other=0.0) + GREEN_BIAS, mask=is_marked)


@ops.add_watermark.impl("triton")
def add_watermark(logits: Tensor, rows: Tensor, b_last: Tensor) -> None:
    check_last_contiguous("add_watermark", logits=logits, rows=rows, b_last=b_last)
    vocab = logits.shape[1]
    if len(rows) == 0:
        return
    _add_watermark_kernel[(len(rows), cdiv(vocab, BLOCK))](
        logits, rows, b_last, logits.stride(0), vocab, HASH_KEY, GREEN_BELOW, GREEN_BIAS, BLOCK, num_warps=WARPS
    )
