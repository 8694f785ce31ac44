"""Embedding of a slice of the vocabulary: one program for each block of a row; zeros for tokens of other ranks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous

BLOCK = 1024  # 8 elements in each lane of 4 warps: one 16-byte load of float16


@triton.jit
def _vocab_embedding_kernel(
    ids_ptr, table_ptr, out_ptr, ids_stride, table_row_stride, first_id, n_rows, n_cols, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols

    local_id = tl.load(ids_ptr + token * ids_stride).to(tl.int64) - first_id
    is_mine = (local_id >= 0) & (local_id < n_rows)
    row = tl.load(table_ptr + local_id * table_row_stride + cols, mask=mask & is_mine, other=0.0)
    tl.store(out_ptr + token * n_cols + cols, row, mask=mask)


@ops.vocab_embedding.impl("triton")
def vocab_embedding(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    check_last_contiguous("vocab_embedding", table=table)
    n_rows, width = table.shape
    out = table.new_empty((ids.shape[0], width))
    if out.numel() == 0:
        return out
    grid = (ids.shape[0], cdiv(width, BLOCK))
    _vocab_embedding_kernel[grid](ids, table, out, ids.stride(0), table.stride(0), first_id, n_rows, width, BLOCK)
    return out
