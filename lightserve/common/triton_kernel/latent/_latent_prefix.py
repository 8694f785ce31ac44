"""The cached prefixes of a step's prompts, expanded to keys and values in a buffer that all layers use in turn.

The prefixes lie in the buffer one behind the other, in the order of the requests. A kernel lists on the device which
cache slot each row of the buffer comes from; the kernel that expands them ends at once for rows past the last. So
nothing waits for the host, and a CUDA graph can hold both. What does not fit into the buffer is expanded by the
attention kernel itself, tile by tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.latent_attention import LatentSizes
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel.attention._attention import dot_block
from lightserve.common.triton_kernel.attention._kv_codes import load_scales
from lightserve.common.triton_kernel.attention._online_softmax import load_rows
from lightserve.common.triton_kernel.latent._latent import LatentParts

# 16,384 tokens of 16 heads in bfloat16. To expand more needs no more memory, but takes 3 times as long per token as to
# attend to it (calculated: 2 * 512 * 256 operations per head and tile of 128 queries, and 2 * 128 * 320 for attention).
BUFFER_BYTES = 128 * 2**20
LISTED_ROWS = tl.constexpr(128)  # by one program
LISTED_REQS = tl.constexpr(128)  # that a program compares at once
NO_SLOT = tl.constexpr(-1)
PROGRAMS = 264  # that expand: two for each multiprocessor of an H200


class PrefixPlan(NamedTuple):
    """Which cached tokens are expanded; all layers of a step share it."""

    slots: Tensor  # [rows] int32: the cache slot of each row of the buffer; NO_SLOT past the last
    num_tokens: Tensor  # [1] int32: of all prefixes, more than rows perhaps
    first_rows: Tensor  # [rows of req_to_token] int32: where each request's prefix begins


class ExpandedPrefix(NamedTuple):
    kv: Tensor  # [rows, heads * (nope + value)]
    pe: Tensor  # [rows, rope]


@triton.jit(do_not_specialize=["requests", "rows", "min_new_tokens"])
def _list_prefix_rows_kernel(
    slots_ptr,
    num_tokens_ptr,
    first_rows_ptr,
    req_to_token_ptr,
    b_req_idx_ptr,
    b_seq_len_ptr,
    b_ready_cache_len_ptr,
    requests,
    rows,
    min_new_tokens,
    req_stride,
):
    """List the cached tokens of requests with at least ``min_new_tokens`` new ones."""
    row_idx = tl.program_id(0) * LISTED_ROWS + tl.arange(0, LISTED_ROWS)
    owners = tl.zeros([LISTED_ROWS], tl.int32)  # the request of each row: a count of those that end before it
    starts = tl.zeros([LISTED_ROWS], tl.int32)  # the first row of that request
    listed = 0
    for first in range(0, requests, LISTED_REQS):
        others = first + tl.arange(0, LISTED_REQS)
        is_request = others < requests
        seq_lens = tl.load(b_seq_len_ptr + others, mask=is_request, other=0)
        ready_lens = tl.load(b_ready_cache_len_ptr + others, mask=is_request, other=0)
        lengths = tl.where(seq_lens - ready_lens >= min_new_tokens, ready_lens, 0)
        ends = listed + tl.cumsum(lengths, axis=0)
        is_before = is_request[None, :] & (ends[None, :] <= row_idx[:, None])
        owners += tl.sum(is_before.to(tl.int32), axis=1)
        starts = tl.maximum(starts, tl.max(tl.where(is_before, ends[None, :], 0), axis=1))
        listed += tl.sum(lengths, axis=0)
        if tl.program_id(0) == 0:
            req_idx = tl.load(b_req_idx_ptr + others, mask=is_request, other=0)
            tl.store(first_rows_ptr + req_idx, ends - lengths, mask=is_request)
    if tl.program_id(0) == 0:
        tl.store(num_tokens_ptr, listed)
    is_listed = owners < requests
    req_idx = tl.load(b_req_idx_ptr + owners, mask=is_listed, other=0).to(tl.int64)
    slots = tl.load(req_to_token_ptr + req_idx * req_stride + row_idx - starts, mask=is_listed, other=NO_SLOT)
    tl.store(slots_ptr + row_idx, slots, mask=row_idx < rows)


def plan_prefix(batch: ops.AttnBatch, sizes: LatentSizes, element_bytes: int, min_new_tokens: int) -> PrefixPlan:
    requests, (table_rows, max_len) = len(batch.b_req_idx), batch.req_to_token.shape
    row_bytes = sizes.heads * (sizes.nope + sizes.value) * element_bytes
    rows = max(min(BUFFER_BYTES // row_bytes, requests * max_len), 1)
    plan = PrefixPlan(*(batch.b_req_idx.new_empty(size) for size in (rows, 1, table_rows)))
    _list_prefix_rows_kernel[(cdiv(rows, LISTED_ROWS.value),)](
        plan.slots,
        plan.num_tokens,
        plan.first_rows,
        batch.req_to_token,
        batch.b_req_idx,
        batch.b_seq_len,
        batch.b_ready_cache_len,
        requests,
        rows,
        min_new_tokens,
        batch.req_to_token.stride(0),
    )
    return plan


@triton.jit(do_not_specialize=["rows"])
def _expand_prefix_kernel(
    cache_ptr,
    cache_pe_ptr,
    scales_ptr,
    kv_b_ptr,
    slots_ptr,
    num_tokens_ptr,
    kv_ptr,
    pe_ptr,
    rows,
    slot_stride,
    slot_pe_stride,
    scale_stride,
    kv_b_row_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """Expand the rows of the buffer to ``BLOCK_N`` of its ``WIDTH`` columns, ``BLOCK_M`` rows at a time.

    A few programs share the rows. With one program for each tile, to find that there is no prefix took 17 us.
    """
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col = cols < WIDTH
    tiles = tl.cdiv(tl.minimum(tl.load(num_tokens_ptr), rows), BLOCK_M)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        row_idx = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        slots = tl.load(slots_ptr + row_idx, mask=row_idx < rows, other=NO_SLOT)
        is_row = slots != NO_SLOT
        slots = slots.to(tl.int64)
        latents = slots * slot_stride
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, RANK, BLOCK_K):
            depth = first + tl.arange(0, BLOCK_K)
            is_depth = (depth < RANK)[None, :]
            a = tl.load(cache_ptr + latents[:, None] + depth[None, :], mask=is_row[:, None] & is_depth, other=0.0)
            b_ptrs = kv_b_ptr + cols[:, None] * kv_b_row_stride + depth[None, :]
            b = tl.load(b_ptrs, mask=is_col[:, None] & is_depth, other=0.0)
            acc = tl.dot(a.to(b.dtype), tl.trans(b), acc=acc, input_precision="ieee")
        if scales_ptr is not None:
            acc *= load_scales(scales_ptr, scale_stride, 0, slots, is_row)[:, None]
        tl.store(kv_ptr + row_idx[:, None] * WIDTH + cols[None, :], acc, mask=is_row[:, None] & is_col[None, :])
        if tl.program_id(0) == 0:
            pe_cols = tl.arange(0, BLOCK_ROPE)
            pe = load_rows(cache_pe_ptr, slots * slot_pe_stride, pe_cols, is_row, ROPE)
            pe_ptrs = pe_ptr + row_idx[:, None] * ROPE + pe_cols[None, :]
            tl.store(pe_ptrs, pe, mask=is_row[:, None] & (pe_cols < ROPE)[None, :])


def expand_prefix(plan: PrefixPlan, cache: LatentParts, kv_b: Tensor, sizes: LatentSizes) -> ExpandedPrefix:
    """The rows of ``plan`` as keys and values; rows past the last are not written."""
    rows, width = len(plan.slots), sizes.heads * (sizes.nope + sizes.value)
    expanded = ExpandedPrefix(kv_b.new_empty(rows, width), kv_b.new_empty(rows, sizes.rope))
    # not measured; the tiles of cuBLAS for such a product, as far as shared memory allows
    is_wide = kv_b.dtype == torch.float32
    block_m, block_n, block_k = (64, 64, 32) if is_wide else (128, 128, 64)
    col_tiles = cdiv(width, block_n)
    row_programs = min(max(PROGRAMS // col_tiles, 1), cdiv(rows, block_m))
    _expand_prefix_kernel[(col_tiles, row_programs)](
        cache.latents,
        cache.key_parts,
        cache.scales,
        kv_b,
        plan.slots,
        plan.num_tokens,
        expanded.kv,
        expanded.pe,
        rows,
        cache.slot_stride,
        cache.pe_stride,
        cache.scale_stride,
        kv_b.stride(1),
        RANK=sizes.rank,
        ROPE=sizes.rope,
        WIDTH=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_ROPE=dot_block(sizes.rope),
        num_warps=4 if is_wide else 8,
        num_stages=stages_that_fit((block_m + block_n) * block_k * kv_b.element_size(), 3),
    )
    return expanded
