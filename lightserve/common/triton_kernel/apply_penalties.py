"""Penalties on the tokens a request has seen: one program a block of (row, token) entries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of

BLOCK = 256  # two scattered loads a lane of 4 warps


@triton.jit
def _apply_penalties_kernel(
    logits_ptr,
    row_stride,
    b_repetition_ptr,
    b_presence_ptr,
    b_frequency_ptr,
    rows_ptr,
    token_ids_ptr,
    output_counts_ptr,
    n_entries,
    BLOCK: tl.constexpr,
):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entries < n_entries
    rows = tl.load(rows_ptr + entries, mask=mask, other=0).to(tl.int64)
    token_ids = tl.load(token_ids_ptr + entries, mask=mask, other=0)
    counts = tl.load(output_counts_ptr + entries, mask=mask, other=0).to(tl.float32)
    repetition = tl.load(b_repetition_ptr + rows, mask=mask, other=1.0)
    presence = tl.load(b_presence_ptr + rows, mask=mask, other=0.0)
    frequency = tl.load(b_frequency_ptr + rows, mask=mask, other=0.0)

    logit_ptrs = logits_ptr + rows * row_stride + token_ids
    logits = tl.load(logit_ptrs, mask=mask, other=0.0)
    logits = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits -= frequency * counts + tl.where(counts > 0, presence, 0.0)
    tl.store(logit_ptrs, logits, mask=mask)


@ops.apply_penalties.impl("triton")
def apply_penalties(logits: Tensor, penalties: ops.Penalties) -> None:
    check_last_contiguous("apply_penalties", logits=logits, **tensors_of(penalties))
    entries = penalties.rows.shape[0]
    if entries == 0:
        return
    _apply_penalties_kernel[(triton.cdiv(entries, BLOCK),)](
        logits,
        logits.stride(0),
        penalties.b_repetition,
        penalties.b_presence,
        penalties.b_frequency,
        penalties.rows,
        penalties.token_ids,
        penalties.output_counts,
        entries,
        BLOCK,
    )
