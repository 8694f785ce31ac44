"""Penalties on tokens that a request has seen: one program for each block of a row; unseen tokens are not touched."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of
from lightserve.common.triton_kernel.sampling._vocab import BLOCK, WARPS


@triton.jit
def _apply_penalties_kernel(
    logits_ptr,
    rows_ptr,
    b_repetition_ptr,
    b_presence_ptr,
    b_frequency_ptr,
    b_seen_row_ptr,
    seen_ptr,
    logits_row_stride,
    seen_row_stride,
    n_cols,
    BLOCK: tl.constexpr,
):
    which = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + which).to(tl.int64)
    seen_row = tl.load(b_seen_row_ptr + which).to(tl.int64)
    repetition = tl.load(b_repetition_ptr + which)
    presence = tl.load(b_presence_ptr + which)
    frequency = tl.load(b_frequency_ptr + which)

    seen = tl.load(seen_ptr + seen_row * seen_row_stride + cols, mask=cols < n_cols, other=0)
    is_seen = seen > 0
    counts = seen >> 1
    logit_ptrs = logits_ptr + row * logits_row_stride + cols
    logits = tl.load(logit_ptrs, mask=is_seen, other=0.0)
    logits = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits -= frequency * counts.to(tl.float32) + tl.where(counts > 0, presence, 0.0)
    tl.store(logit_ptrs, logits, mask=is_seen)


@ops.apply_penalties.impl("triton")
def apply_penalties(logits: Tensor, penalties: ops.Penalties) -> None:
    check_last_contiguous("apply_penalties", logits=logits, **tensors_of(penalties))
    penalised, vocab = penalties.rows.shape[0], logits.shape[1]
    if penalised == 0:
        return
    _apply_penalties_kernel[(penalised, cdiv(vocab, BLOCK))](
        logits,
        penalties.rows,
        penalties.b_repetition,
        penalties.b_presence,
        penalties.b_frequency,
        penalties.b_seen_row,
        penalties.seen,
        logits.stride(0),
        penalties.seen.stride(0),
        vocab,
        BLOCK,
        num_warps=WARPS,
    )
