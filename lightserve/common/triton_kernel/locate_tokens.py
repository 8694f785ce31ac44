"""The positions and slots of a step with drafts: one program for each block of tokens, and of requests.

A program reads a slot from the table only if the request had it before. New slots come from the input, so no program
waits for what another one writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.step import COUNTED, NO_REQ, NO_SLOT
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous

BLOCK = 256


@triton.jit
def _ready_len(reqs, mask, rows_ptr, ready_len_ptr, lengths_ptr, COUNTED: tl.constexpr):
    rows = tl.load(rows_ptr + reqs, mask=mask, other=0).to(tl.int64)
    ready_len = tl.load(ready_len_ptr + reqs, mask=mask, other=0)
    counted = tl.load(lengths_ptr + rows, mask=mask & (ready_len == COUNTED), other=0)
    return rows, tl.where(ready_len == COUNTED, counted, ready_len)


@triton.jit
def _locate_tokens_kernel(
    new_slots_ptr,
    token_reqs_ptr,
    rows_ptr,
    starts_ptr,
    ready_len_ptr,
    slot_len_ptr,
    lengths_ptr,
    req_to_token_ptr,
    positions_ptr,
    slots_ptr,
    b_ready_len_ptr,
    req_stride,
    n_tokens,
    n_reqs,
    COUNTED: tl.constexpr,
    NO_SLOT: tl.constexpr,
    NO_REQ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, ready_len = _ready_len(block, block < n_reqs, rows_ptr, ready_len_ptr, lengths_ptr, COUNTED)
    tl.store(b_ready_len_ptr + block, ready_len, mask=block < n_reqs)

    mask = block < n_tokens
    new_slots = tl.load(new_slots_ptr + block, mask=mask, other=NO_SLOT)
    reqs = tl.load(token_reqs_ptr + block, mask=mask, other=NO_REQ)
    is_token = reqs != NO_REQ
    rows, ready_len = _ready_len(reqs, is_token, rows_ptr, ready_len_ptr, lengths_ptr, COUNTED)
    starts = tl.load(starts_ptr + reqs, mask=is_token, other=0)
    slot_len = tl.load(slot_len_ptr + reqs, mask=is_token, other=0)
    table_ptr = req_to_token_ptr + rows * req_stride
    offsets = block - starts
    tl.store(table_ptr + slot_len + offsets, new_slots, mask=is_token & (new_slots != NO_SLOT))

    positions = tl.where(is_token, ready_len + offsets, 0)
    has_slot = positions < slot_len
    old = tl.load(table_ptr + positions, mask=is_token & has_slot, other=0)
    new = tl.load(new_slots_ptr + starts + positions - slot_len, mask=is_token & (positions >= slot_len), other=0)
    slots = tl.where(is_token, tl.where(has_slot, old, new), new_slots)
    tl.store(positions_ptr + block, positions, mask=mask)
    tl.store(slots_ptr + block, slots, mask=mask)


@ops.locate_tokens.impl("triton")
def locate_tokens(
    new_slots: Tensor, token_reqs: Tensor, reqs: ops.StepReqs, lengths: Tensor, req_to_token: Tensor
) -> ops.LocatedTokens:
    columns = {"rows": reqs.rows, "starts": reqs.starts, "ready_len": reqs.ready_len, "slot_len": reqs.slot_len}
    tensors = {"new_slots": new_slots, "token_reqs": token_reqs, **columns, "lengths": lengths}
    check_last_contiguous("locate_tokens", **tensors, req_to_token=req_to_token)
    out = ops.LocatedTokens(torch.empty_like(new_slots), torch.empty_like(new_slots), torch.empty_like(reqs.ready_len))
    n_tokens, n_reqs = len(new_slots), len(reqs.rows)
    if n_reqs:
        _locate_tokens_kernel[(cdiv(max(n_tokens, n_reqs), BLOCK),)](
            *tensors.values(),
            req_to_token,
            out.positions,
            out.slots,
            out.b_ready_len,
            req_to_token.stride(0),
            n_tokens,
            n_reqs,
            COUNTED,
            NO_SLOT,
            NO_REQ,
            BLOCK,
        )
    return out
