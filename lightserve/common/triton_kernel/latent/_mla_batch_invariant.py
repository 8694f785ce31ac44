"""Latent attention in which no bit of a row depends on what else the step computes.

All rows, of prompts and of decodes, are absorbed: a row has the same sums in the same order, whether its request came
in one step or in many. A tile holds the heads of a few tokens, which share their latents. Products with ``kv_b`` have
tiles of one size. Long prompts take 3.4 times the operations of expanded keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.latent_attention import LatentSizes
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._gpu import uses_asm
from lightserve.common.triton_kernel.attention._attention import LOG2_E, dot_block, head_block
from lightserve.common.triton_kernel.attention._context_tiles import (
    FIRST_TOKEN,
    Q_LEN,
    READY_LEN,
    REQ_IDX,
    START_LOC,
    TILE_FIELDS,
    list_tiles,
)
from lightserve.common.triton_kernel.attention._online_softmax import empty_softmax, load_rows
from lightserve.common.triton_kernel.latent._latent import attend_latents, parts_of
from lightserve.common.triton_kernel.latent.latent_token_attention import config_of

TILE_ROWS = 64  # tokens times heads, where they fit
PRODUCT_BLOCK = 64  # rows, outputs and summands of a product's tile


@triton.jit
def _mla_batch_invariant_kernel(
    q_ptr,
    q_pe_ptr,
    cache_ptr,
    cache_pe_ptr,
    scales_ptr,
    out_ptr,
    req_to_token_ptr,
    tiles_ptr,
    q_token_stride,
    q_head_stride,
    q_pe_token_stride,
    q_pe_head_stride,
    slot_stride,
    slot_pe_stride,
    scale_stride,
    req_stride,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    fields = tiles_ptr + tl.program_id(1) * TILE_FIELDS
    q_len = tl.load(fields + Q_LEN)
    if q_len == 0:
        return
    req_idx = tl.load(fields + REQ_IDX).to(tl.int64)
    first_token, ready_len = tl.load(fields + FIRST_TOKEN), tl.load(fields + READY_LEN)

    rows = tl.arange(0, TOKENS * BLOCK_H)
    heads = tl.program_id(0) * BLOCK_H + rows % BLOCK_H
    q_tokens = first_token + rows // BLOCK_H
    is_row = (heads < HEADS) & (q_tokens < q_len)
    q_rows = tl.load(fields + START_LOC).to(tl.int64) + q_tokens
    cols = tl.arange(0, BLOCK_R)
    q = load_rows(q_ptr, q_rows * q_token_stride + heads * q_head_stride, cols, is_row, RANK)
    pe_rows = q_rows * q_pe_token_stride + heads * q_pe_head_stride
    q_pe = load_rows(q_pe_ptr, pe_rows, tl.arange(0, BLOCK_ROPE), is_row, ROPE)

    slots_ptr = req_to_token_ptr + req_idx * req_stride
    cache = (slots_ptr, cache_ptr, cache_pe_ptr, scales_ptr, slot_stride, slot_pe_stride, scale_stride)
    end = ready_len + tl.minimum(first_token + TOKENS, q_len)
    softmax = empty_softmax(TOKENS * BLOCK_H, BLOCK_R)
    acc, _, total = attend_latents(
        q, q_pe, softmax, cache, 0, end, ready_len + q_tokens, scale, RANK, ROPE, BLOCK_N, LOOP_STAGES, USE_ASM
    )
    out_ptrs = out_ptr + (q_rows * HEADS + heads)[:, None] * RANK + cols[None, :]
    tl.store(out_ptrs, acc / total[:, None], mask=is_row[:, None] & (cols < RANK)[None, :])


@triton.jit
def _multiply_heads_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    n_in,
    n_out,
    x_row_stride,
    x_head_stride,
    weight_head_stride,
    weight_in_stride,
    weight_out_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out[t, h, o]`` is the sum over i of ``x[t, h, i] * weight[h, i, o]``."""
    head = tl.program_id(1)
    row_idx = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    outs = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    weight_ptr += head.to(tl.int64) * weight_head_stride
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, n_in, BLOCK):
        ins = first + tl.arange(0, BLOCK)
        x_mask = (row_idx < rows)[:, None] & (ins < n_in)[None, :]
        x = tl.load(
            x_ptr + row_idx[:, None] * x_row_stride + head * x_head_stride + ins[None, :], mask=x_mask, other=0.0
        )
        weight_mask = (ins < n_in)[:, None] & (outs < n_out)[None, :]
        weight = tl.load(
            weight_ptr + ins[:, None] * weight_in_stride + outs[None, :] * weight_out_stride,
            mask=weight_mask,
            other=0.0,
        )
        acc = tl.dot(x, weight, acc=acc, input_precision="ieee")
    out_ptrs = out_ptr + (row_idx[:, None] * HEADS + head) * n_out + outs[None, :]
    tl.store(out_ptrs, acc, mask=(row_idx < rows)[:, None] & (outs < n_out)[None, :])


def _multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """``[tokens, heads, in]`` times ``[heads, in, out]``, head by head."""
    (rows, heads, n_in), n_out = x.shape, weight.shape[2]
    out = x.new_empty(rows, heads, n_out)
    _multiply_heads_kernel[(cdiv(rows, PRODUCT_BLOCK), heads, cdiv(n_out, PRODUCT_BLOCK))](
        x,
        weight,
        out,
        rows,
        n_in,
        n_out,
        x.stride(0),
        x.stride(1),
        *weight.stride(),
        HEADS=heads,
        BLOCK=PRODUCT_BLOCK,
    )
    return out


def attend_in_order(
    q: Tensor, latent_cache: ops.LatentCache, kv_b: Tensor, batch: ops.AttnBatch, scale: float, sizes: LatentSizes
) -> Tensor:
    if len(q) == 0:
        return q.new_empty(0, sizes.heads, sizes.value)
    absorbed = _multiply_heads(q[..., : sizes.nope], kv_b[:, : sizes.nope])
    attended = _attend(absorbed, q[..., sizes.nope :], latent_cache, batch, scale, sizes)
    return _multiply_heads(attended, kv_b[:, sizes.nope :].transpose(1, 2))


def _attend(
    q: Tensor, q_pe: Tensor, latent_cache: ops.LatentCache, batch: ops.AttnBatch, scale: float, sizes: LatentSizes
) -> Tensor:
    cache = parts_of("latent attention", latent_cache, sizes.rank)
    config = config_of(q.dtype, sizes._replace(heads=TILE_ROWS))
    block_h = min(dot_block(sizes.heads), config.block_h)
    tokens = config.block_h // block_h
    key = ("mla_batch_invariant", tokens)
    tiles = batch.plans.get(key)
    if tiles is None:
        tiles = batch.plans[key] = list_tiles(batch, len(q), tokens, 1)
    out = q.new_empty(q.shape)
    _mla_batch_invariant_kernel[(cdiv(sizes.heads, block_h), tiles.shape[0])](
        q,
        q_pe,
        cache.latents,
        cache.key_parts,
        cache.scales,
        out,
        batch.req_to_token,
        tiles,
        q.stride(0),
        q.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        cache.slot_stride,
        cache.pe_stride,
        cache.scale_stride,
        batch.req_to_token.stride(0),
        scale * LOG2_E.value,
        HEADS=sizes.heads,
        RANK=sizes.rank,
        ROPE=sizes.rope,
        TOKENS=tokens,
        BLOCK_H=block_h,
        BLOCK_N=config.block_n,
        BLOCK_R=head_block(sizes.rank),
        BLOCK_ROPE=dot_block(sizes.rope),
        LOOP_STAGES=cache.loop_stages(config.num_stages),
        USE_ASM=uses_asm(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
