"""Tokens forbidden by a bitmask: one program for each block of a masked row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_has_bits, check_last_contiguous
from lightserve.common.triton_kernel.sampling._vocab import BLOCK, WARPS


@triton.jit
def _mask_logits_kernel(
    logits_ptr, rows_ptr, bitmask_ptr, logits_row_stride, bitmask_row_stride, n_cols, BLOCK: tl.constexpr
):
    which = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + which).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)

    words = tl.load(bitmask_ptr + which * bitmask_row_stride + cols // 32, mask=cols < n_cols, other=0)
    is_forbidden = ((words >> (cols % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_row_stride + cols, float("-inf"), mask=is_forbidden & (cols < n_cols))


@ops.mask_logits.impl("triton")
def mask_logits(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    check_last_contiguous("mask_logits", logits=logits, rows=rows, bitmask=bitmask)
    vocab = logits.shape[1]
    check_has_bits("mask_logits", bitmask, vocab)
    if len(rows) == 0:
        return
    _mask_logits_kernel[(len(rows), cdiv(vocab, BLOCK))](
        logits, rows, bitmask, logits.stride(0), bitmask.stride(0), vocab, BLOCK, num_warps=WARPS
    )
