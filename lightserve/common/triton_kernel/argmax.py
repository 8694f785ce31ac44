"""Argmax over the vocabulary: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._vocab import BLOCK, WARPS, fold_argmax


@triton.jit
def _argmax_kernel(logits_ptr, out_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = float("-inf")
    best_col = 0
    for first_col in range(0, n_cols, BLOCK):
        cols = first_col + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * row_stride + cols, mask=cols < n_cols, other=float("-inf"))
        best, best_col = fold_argmax(best, best_col, logits.to(tl.float32), first_col)
    tl.store(out_ptr + row, best_col)


@ops.argmax.impl("triton")
def argmax(logits: Tensor) -> Tensor:
    check_last_contiguous("argmax", logits=logits)
    rows, vocab = logits.shape
    out = logits.new_empty((rows,), dtype=torch.int64)
    if rows == 0:
        return out
    _argmax_kernel[(rows,)](logits, out, logits.stride(0), vocab, BLOCK, num_warps=WARPS)
    return out
