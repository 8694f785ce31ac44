"""The slots and ids of a step's tokens: one program for each block of tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.step import LAST_SAMPLED
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous

BLOCK = 256


@triton.jit
def _place_tokens_kernel(
    rows_ptr,
    positions_ptr,
    slots_ptr,
    ids_ptr,
    req_to_token_ptr,
    last_ids_ptr,
    out_ptr,
    req_stride,
    n_tokens,
    NOT_KNOWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < n_tokens
    rows = tl.load(rows_ptr + tokens, mask=mask, other=0).to(tl.int64)
    positions = tl.load(positions_ptr + tokens, mask=mask, other=0)
    slots = tl.load(slots_ptr + tokens, mask=mask, other=0)
    ids = tl.load(ids_ptr + tokens, mask=mask, other=0).to(tl.int64)
    sampled = tl.load(last_ids_ptr + rows, mask=mask & (ids == NOT_KNOWN), other=0)
    tl.store(req_to_token_ptr + rows * req_stride + positions, slots, mask=mask)
    tl.store(out_ptr + tokens, tl.where(ids == NOT_KNOWN, tl.maximum(sampled, 0), ids), mask=mask)


@ops.place_tokens.impl("triton")
def place_tokens(tokens: ops.StepTokens, req_to_token: Tensor, last_ids: Tensor) -> Tensor:
    columns = {"rows": tokens.rows, "positions": tokens.positions, "slots": tokens.slots, "ids": tokens.ids}
    check_last_contiguous("place_tokens", req_to_token=req_to_token, last_ids=last_ids, **columns)
    count = tokens.ids.shape[0]
    out = last_ids.new_empty(count)
    if count:
        _place_tokens_kernel[(cdiv(count, BLOCK),)](
            *columns.values(), req_to_token, last_ids, out, req_to_token.stride(0), count, LAST_SAMPLED, BLOCK
        )
    return out
