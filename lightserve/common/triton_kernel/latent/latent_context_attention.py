"""Latent attention of prompts: one program for each tile of a request's tokens and head, over expanded keys and values.

Expanded keys and values take 2 * (192 + 128) operations a query, key and head for DeepSeek's sizes, absorbed queries
2 * (576 + 512): expanding pays from about 170 queries behind a key on, and for all keys that are new in the step. So
the new tokens are expanded by one product, and the cached prefixes of prompts by another (``_latent_prefix.py``).
Requests with one new token are absorbed (``latent_token_attention.py``). Memory is bounded: the keys and values of a
step's tokens, and a buffer for prefixes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightserve.common import ops
from lightserve.common.ops.latent_attention import LatentSizes
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous, tensors_of
from lightserve.common.triton_kernel._gpu import fits, stages_that_fit
from lightserve.common.triton_kernel.attention._attention import LOG2_E, MIN_DOT, dot_block
from lightserve.common.triton_kernel.attention._context_tiles import (
    FIRST_TOKEN,
    Q_LEN,
    READY_LEN,
    REQ_IDX,
    START_LOC,
    TILE_FIELDS,
    list_tiles,
)
from lightserve.common.triton_kernel.attention._kv_codes import load_scales
from lightserve.common.triton_kernel.attention._online_softmax import empty_softmax, load_rows
from lightserve.common.triton_kernel.latent._latent import add_to_softmax, parts_of
from lightserve.common.triton_kernel.latent._latent_prefix import PrefixPlan, expand_prefix, plan_prefix
from lightserve.common.triton_kernel.latent.latent_token_attention import attend_decodes, check

COPY_ALIGNMENT = 16  # bytes: the copy engine (TMA) wants the address and the rows aligned
BLOCK_RANK = 64  # of a latent, where the kernel itself expands it


class Tiling(NamedTuple):
    tokens: int  # a multiple of ``keys``
    keys: int
    warps: int
    stages: int


# By bytes of an element; not measured. A tile of 128 tokens, and 3 blocks of 64 keys in flight, take 168 KiB for heads
# of 192 and values of 128 in 2 bytes.
TILINGS = {2: Tiling(128, 64, 8, 3), 4: Tiling(32, 32, 4, 2)}
SMALLER = {2: Tiling(64, 32, 4, 2), 4: Tiling(16, 16, 4, 2)}  # where shared memory has no room for those


@triton.jit
def _attend_block(q, q_pe, k, k_pe, v, softmax, is_seen, scale):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.dot(q_pe, tl.trans(k_pe), acc=scores, input_precision="ieee")
    return add_to_softmax(scores, v, softmax, is_seen, scale)


@triton.jit
def _load_block(kv_desc, kv_ptr, kv_stride, row, col, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """``BLOCK_N`` whole rows of expanded keys or values of a head."""
    if kv_desc is not None:
        return kv_desc.load([row, col])
    offsets = tl.arange(0, BLOCK_N) * kv_stride
    return load_rows(kv_ptr + row.to(tl.int64) * kv_stride + col, offsets, tl.arange(0, BLOCK_D), None, DIM)


@triton.jit
def _attend_whole_blocks(
    q,
    q_pe,
    softmax,
    source,
    first_row,
    col,
    end,
    scale,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the expanded tokens before ``end``, a whole number of blocks, which every row sees.

    ``source``: descriptor of and pointer to keys and values, their row stride, pointer to the shared key part and its
    row stride. ``col``: the head's first column.
    """
    kv_desc, kv_ptr, kv_stride, pe_ptr, pe_stride = source
    BLOCK_V: tl.constexpr = softmax[0].shape[1]
    block = tl.arange(0, BLOCK_N)
    pe_cols = tl.arange(0, q_pe.shape[1])
    for start in range(0, end, BLOCK_N):
        row = first_row + start
        k = _load_block(kv_desc, kv_ptr, kv_stride, row, col, NOPE, BLOCK_N, q.shape[1])
        k_pe = load_rows(pe_ptr + row.to(tl.int64) * pe_stride, block * pe_stride, pe_cols, None, ROPE)
        v = _load_block(kv_desc, kv_ptr, kv_stride, row, col + NOPE, VALUE, BLOCK_N, BLOCK_V)
        softmax = _attend_block(q, q_pe, k, k_pe, v, softmax, None, scale)
    return softmax


@triton.jit
def _attend_last_blocks(
    q,
    q_pe,
    softmax,
    source,
    first_row,
    col,
    begin,
    end,
    q_tokens,
    scale,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the expanded tokens ``begin`` .. ``end``. ``q_tokens``: rows see those up to their own; None: all.

    All loads have a mask: rows past the end may hold NaN.
    """
    _, kv_ptr, kv_stride, pe_ptr, pe_stride = source
    BLOCK_V: tl.constexpr = softmax[0].shape[1]
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < end
        rows = (first_row + keys).to(tl.int64)
        k = load_rows(kv_ptr + col, rows * kv_stride, tl.arange(0, q.shape[1]), is_key, NOPE)
        k_pe = load_rows(pe_ptr, rows * pe_stride, tl.arange(0, q_pe.shape[1]), is_key, ROPE)
        v = load_rows(kv_ptr + col + NOPE, rows * kv_stride, tl.arange(0, BLOCK_V), is_key, VALUE)
        is_seen = is_key[None, :] if q_tokens is None else is_key[None, :] & (keys[None, :] <= q_tokens[:, None])
        softmax = _attend_block(q, q_pe, k, k_pe, v, softmax, is_seen, scale)
    return softmax


@triton.jit
def _expand(
    cache_ptr,
    rows,
    scales,
    is_row,
    weight_ptr,
    weight_row_stride,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The latents at ``rows``, times ``scales`` if they are codes, times ``SIZE`` rows of ``kv_b``."""
    outs = tl.arange(0, BLOCK)
    acc = tl.zeros([rows.shape[0], BLOCK], tl.float32)
    for first in range(0, RANK, BLOCK_K):
        depth = first + tl.arange(0, BLOCK_K)
        is_depth = (depth < RANK)[None, :]
        weight_ptrs = weight_ptr + outs[:, None] * weight_row_stride + depth[None, :]
        weight = tl.load(weight_ptrs, mask=(outs < SIZE)[:, None] & is_depth, other=0.0)
        latents = tl.load(cache_ptr + rows[:, None] + depth[None, :], mask=is_row[:, None] & is_depth, other=0.0)
        acc = tl.dot(latents.to(weight.dtype), tl.trans(weight), acc=acc, input_precision="ieee")
    if scales is not None:
        acc *= scales[:, None]
    return acc


@triton.jit
def _attend_latents_of_head(
    q,
    q_pe,
    softmax,
    cache,
    kv_b_ptr,
    kv_b_row_stride,
    begin,
    end,
    scale,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the cached tokens ``begin`` .. ``end``, expanded block by block for one head, whose ``kv_b`` this is."""
    slots_ptr, cache_ptr, pe_ptr, scales_ptr, slot_stride, pe_stride, scale_stride = cache
    BLOCK_V: tl.constexpr = softmax[0].shape[1]
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < end
        slots = tl.load(slots_ptr + keys, mask=is_key, other=0).to(tl.int64)
        rows = slots * slot_stride
        scales = None
        if scales_ptr is not None:
            scales = load_scales(scales_ptr, scale_stride, 0, slots, is_key)
        k = _expand(cache_ptr, rows, scales, is_key, kv_b_ptr, kv_b_row_stride, NOPE, RANK, q.shape[1], BLOCK_K)
        k = k.to(q.dtype)
        k_pe = load_rows(pe_ptr, slots * pe_stride, tl.arange(0, q_pe.shape[1]), is_key, ROPE).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), acc=scores, input_precision="ieee")
        v_ptr = kv_b_ptr + NOPE * kv_b_row_stride
        v = _expand(cache_ptr, rows, scales, is_key, v_ptr, kv_b_row_stride, VALUE, RANK, BLOCK_V, BLOCK_K)
        softmax = add_to_softmax(scores, v.to(q.dtype), softmax, is_key[None, :], scale)
    return softmax


@triton.jit(do_not_specialize=["prefix_rows"])
def _latent_context_attention_kernel(
    q_ptr,
    kv_desc,
    kv_ptr,
    pe_ptr,
    prefix_desc,
    prefix_kv_ptr,
    prefix_pe_ptr,
    prefix_rows,
    first_rows_ptr,
    cache_ptr,
    cache_pe_ptr,
    scales_ptr,
    kv_b_ptr,
    out_ptr,
    req_to_token_ptr,
    tiles_ptr,
    q_token_stride,
    pe_token_stride,
    slot_stride,
    slot_pe_stride,
    scale_stride,
    kv_b_row_stride,
    req_stride,
    scale,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LATENTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    fields = tiles_ptr + (tl.program_id(0) // HEADS) * TILE_FIELDS
    q_len = tl.load(fields + Q_LEN)
    if q_len == 0:
        return
    req_idx = tl.load(fields + REQ_IDX).to(tl.int64)
    start_loc = tl.load(fields + START_LOC)
    first_token = tl.load(fields + FIRST_TOKEN)
    ready_len = tl.load(fields + READY_LEN)

    q_tokens = first_token + tl.arange(0, BLOCK_M)
    is_row = q_tokens < q_len
    q_rows = start_loc.to(tl.int64) + q_tokens
    head_ptr = q_ptr + head * (NOPE + ROPE)
    q = load_rows(head_ptr, q_rows * q_token_stride, tl.arange(0, BLOCK_NOPE), is_row, NOPE)
    q_pe = load_rows(head_ptr + NOPE, q_rows * q_token_stride, tl.arange(0, BLOCK_ROPE), is_row, ROPE)
    softmax = empty_softmax(BLOCK_M, BLOCK_V)

    WIDTH: tl.constexpr = HEADS * (NOPE + VALUE)
    col = head * (NOPE + VALUE)
    first_row = tl.load(first_rows_ptr + req_idx)
    num_expanded = tl.minimum(tl.maximum(prefix_rows - first_row, 0), ready_len)
    prefix = (prefix_desc, prefix_kv_ptr, WIDTH, prefix_pe_ptr, ROPE)
    whole = num_expanded // BLOCK_N * BLOCK_N
    softmax = _attend_whole_blocks(q, q_pe, softmax, prefix, first_row, col, whole, scale, NOPE, ROPE, VALUE, BLOCK_N)
    softmax = _attend_last_blocks(
        q, q_pe, softmax, prefix, first_row, col, whole, num_expanded, None, scale, NOPE, ROPE, VALUE, BLOCK_N
    )
    slots_ptr = req_to_token_ptr + req_idx * req_stride
    cache = (slots_ptr, cache_ptr, cache_pe_ptr, scales_ptr, slot_stride, slot_pe_stride, scale_stride)
    softmax = _attend_latents_of_head(
        q,
        q_pe,
        softmax,
        cache,
        kv_b_ptr + col.to(tl.int64) * kv_b_row_stride,
        kv_b_row_stride,
        num_expanded,
        ready_len,
        scale,
        NOPE,
        ROPE,
        VALUE,
        RANK,
        BLOCK_LATENTS,
        BLOCK_K,
    )
    new = (kv_desc, kv_ptr, WIDTH, pe_ptr, pe_token_stride)
    end = tl.minimum(first_token + BLOCK_M, q_len)
    softmax = _attend_whole_blocks(
        q, q_pe, softmax, new, start_loc, col, first_token, scale, NOPE, ROPE, VALUE, BLOCK_N
    )
    softmax = _attend_last_blocks(
        q, q_pe, softmax, new, start_loc, col, first_token, end, q_tokens, scale, NOPE, ROPE, VALUE, BLOCK_N
    )
    acc, _, total = softmax
    cols = tl.arange(0, BLOCK_V)
    out_ptrs = out_ptr + (q_rows * HEADS + head)[:, None] * VALUE + cols[None, :]
    tl.store(out_ptrs, acc / total[:, None], mask=is_row[:, None] & (cols < VALUE)[None, :])


def tiling_of(element_bytes: int, sizes: LatentSizes) -> Tiling:
    """The tiles for heads of these sizes, in as many stages as the GPU has room for."""
    key_bytes = element_bytes * (dot_block(sizes.nope) + dot_block(sizes.rope))
    kv_bytes = key_bytes + element_bytes * dot_block(sizes.value)
    tiling = TILINGS[element_bytes]
    if not fits(tiling.keys * kv_bytes, 2, tiling.tokens * key_bytes + tiling.keys * kv_bytes):
        tiling = SMALLER[element_bytes]
    resident_bytes = tiling.tokens * key_bytes + tiling.keys * kv_bytes
    return tiling._replace(stages=stages_that_fit(tiling.keys * kv_bytes, tiling.stages, resident_bytes))


class _Plan(NamedTuple):
    """What all layers of a step share that have one shape."""

    tiling: Tiling
    tiles: Tensor
    prefix: PrefixPlan
    b_query_row: Tensor  # [requests] int64: of each request, any row if it has none
    b_out_row: Tensor  # [requests] int64: of each request with one query row; else the row behind the last


def _make_plan(q: Tensor, batch: ops.AttnBatch, sizes: LatentSizes) -> _Plan:
    check_last_contiguous("latent_context_attention", **tensors_of(batch))
    min_new_tokens = 2 if batch.has_decodes else 1
    tiling = tiling_of(q.element_size(), sizes)
    is_decode = batch.b_seq_len - batch.b_ready_cache_len == 1
    return _Plan(
        tiling,
        list_tiles(batch, len(q), tiling.tokens, min_new_tokens),
        plan_prefix(batch, sizes, q.element_size(), min_new_tokens),
        batch.b_start_loc.clamp(max=len(q) - 1).long(),
        batch.b_start_loc.masked_fill(~is_decode, len(q)).long(),
    )


@ops.latent_context_attention.impl("triton")
def latent_context_attention(
    q: Tensor,
    latent: Tensor,
    latent_cache: ops.LatentCache,
    kv_b: Tensor,
    batch: ops.AttnBatch,
    options: ops.AttnOptions,
) -> Tensor:
    check_heads_side_by_side("latent_context_attention", q=q)
    check_last_contiguous("latent_context_attention", latent=latent)
    sizes = check("latent_context_attention", q, latent_cache, kv_b, options)
    out = q.new_empty(len(q) + 1, sizes.heads, sizes.value)  # nobody reads the last row
    if len(q) == 0:
        return out[:0]
    key = ("latent_context_attention", sizes, q.dtype)
    plan: _Plan | None = batch.plans.get(key)
    if plan is None:
        plan = batch.plans[key] = _make_plan(q, batch, sizes)
    if batch.has_decodes:
        decodes = q.index_select(0, plan.b_query_row)
        attended = attend_decodes(decodes, latent_cache, kv_b, batch, options.scale, sizes)
        out.index_copy_(0, plan.b_out_row, attended)
    _launch(q, latent, latent_cache, kv_b, batch, options.scale, sizes, plan, out)
    return out[: len(q)]


def _launch(
    q: Tensor,
    latent: Tensor,
    latent_cache: ops.LatentCache,
    kv_b: Tensor,
    batch: ops.AttnBatch,
    scale: float,
    sizes: LatentSizes,
    plan: _Plan,
    out: Tensor,
) -> None:
    tiling = plan.tiling
    kv = ops.linear(latent[:, : sizes.rank], kv_b.flatten(0, 1))
    cache = parts_of("latent_context_attention", latent_cache, sizes.rank)
    prefix = expand_prefix(plan.prefix, cache, kv_b, sizes)
    _latent_context_attention_kernel[(plan.tiles.shape[0] * sizes.heads,)](
        q,
        _descriptor(kv, tiling.keys, sizes),
        kv,
        latent[:, sizes.rank :],
        _descriptor(prefix.kv, tiling.keys, sizes),
        prefix.kv,
        prefix.pe,
        len(prefix.kv),
        plan.prefix.first_rows,
        cache.latents,
        cache.key_parts,
        cache.scales,
        kv_b,
        out,
        batch.req_to_token,
        plan.tiles,
        q.stride(0),
        latent.stride(0),
        cache.slot_stride,
        cache.pe_stride,
        cache.scale_stride,
        kv_b.stride(1),
        batch.req_to_token.stride(0),
        scale * LOG2_E.value,
        HEADS=sizes.heads,
        NOPE=sizes.nope,
        ROPE=sizes.rope,
        VALUE=sizes.value,
        RANK=sizes.rank,
        BLOCK_M=tiling.tokens,
        BLOCK_N=tiling.keys,
        # whole blocks take so many registers that the loops over expanded keys would spill
        BLOCK_LATENTS=max(tiling.keys // 2, MIN_DOT),
        BLOCK_K=min(BLOCK_RANK, dot_block(sizes.rank)),
        BLOCK_NOPE=dot_block(sizes.nope),
        BLOCK_ROPE=dot_block(sizes.rope),
        BLOCK_V=dot_block(sizes.value),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def _descriptor(kv: Tensor, keys: int, sizes: LatentSizes) -> TensorDescriptor | None:
    """For the copy engine (TMA), which reads ``keys`` keys or values of a head; None if they break its rules."""
    width = sizes.nope
    is_whole = width == sizes.value == dot_block(width)
    if not is_whole or kv.stride(0) * kv.element_size() % COPY_ALIGNMENT or kv.data_ptr() % COPY_ALIGNMENT:
        return None
    return TensorDescriptor(kv, list(kv.shape), [kv.stride(0), 1], [keys, width])
