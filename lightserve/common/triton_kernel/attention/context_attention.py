"""Attention of prompts: one program for each tile of a request's tokens, with all query heads that share a kv head.

A program attends to the cached prefix, gathered slot by slot, then to the step's new tokens in ``kv`` up to its
diagonal. If there are few tiles, each has several programs, for parts of its keys; the one that finishes last merges
their partial results, always in the same order. The tiles of a step are listed once, on the device, and the grid
depends on shapes alone. So nothing waits for the host, and a CUDA graph can hold the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_heads_side_by_side
from lightserve.common.triton_kernel._gpu import uses_asm
from lightserve.common.triton_kernel.attention import token_attention
from lightserve.common.triton_kernel.attention._attention import LOG2_E, head_block, score_factors
from lightserve.common.triton_kernel.attention._context_tiles import (
    FIRST_PART,
    FIRST_TOKEN,
    Q_LEN,
    READY_LEN,
    REQ_IDX,
    SPLIT,
    SPLITS,
    START_LOC,
    TILE_FIELDS,
    SplitTiles,
    list_split_tiles,
    list_tiles,
    packed_heads,
    tiling_of,
)
from lightserve.common.triton_kernel.attention._kv_codes import for_codes, parts_of, scale_values, score_factor
from lightserve.common.triton_kernel.attention._online_softmax import (
    attend_cached_in_order,
    attend_cached_prefix,
    attend_new_tokens,
    empty_softmax,
    first_block,
    load_rows,
)

OPTIONS = ("alibi_slopes", "causal", "window", "softcap", "sinks")  # that the kernel implements
OPTIONS_IN_ORDER = ("alibi_slopes", "window", "softcap", "sinks")
COPY_ALIGNMENT = 16  # bytes: the copy engine (TMA) wants the address and the rows aligned


@triton.jit
def _last_seen(see_until_ptr, q_rows, q_tokens, is_row, first_token, ready_len, TOKENS: tl.constexpr):
    """The last of the request's new tokens that each row sees, and the end of those that any row of the tile sees."""
    last_seen, seen_end = q_tokens, first_token + TOKENS
    if see_until_ptr is not None:
        last_seen = tl.where(is_row, tl.load(see_until_ptr + q_rows, mask=is_row, other=0) - ready_len, q_tokens)
        seen_end = tl.max(tl.where(is_row, last_seen, 0), axis=0) + 1
    return last_seen, seen_end


@triton.jit
def _num_new_keys(num_keys_ptr, req_idx, q_len):
    """Of a request whose tokens are all new, if ``num_keys_ptr`` is there."""
    return q_len if num_keys_ptr is None else tl.load(num_keys_ptr + req_idx)


@triton.jit
def _positive(total, num_keys_ptr):
    """The sum of the weights of each row, or 1 where it sees no key."""
    return total if num_keys_ptr is None else tl.where(total > 0, total, 1.0)


@triton.jit
def _keys_of(
    fields,
    first_token,
    seen_end,
    k_len,
    ready_len,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where the cached tokens begin and end that a program attends to, and where the new ones do, in whole blocks.

    No row of this tile sees a new token from ``seen_end`` on, if ``CAUSAL``.
    """
    begin, new_begin = first_block(ready_len + first_token, WINDOW, BLOCK_N), first_block(first_token, WINDOW, BLOCK_N)
    ready_end = ready_len
    end = tl.minimum(seen_end, k_len) if CAUSAL else k_len
    if IS_SPLIT:
        begin = tl.minimum(begin, tl.cdiv(ready_len, BLOCK_N) * BLOCK_N)
        cached = tl.cdiv(ready_len - begin, BLOCK_N)
        blocks = cached + tl.cdiv(end - new_begin, BLOCK_N)
        split, splits = tl.load(fields + SPLIT), tl.load(fields + SPLITS)
        first, last = blocks * split // splits, blocks * (split + 1) // splits
        ready_end = tl.minimum(begin + last * BLOCK_N, ready_len)
        end = tl.minimum(new_begin + tl.maximum(last - cached, 0) * BLOCK_N, end)
        begin += first * BLOCK_N
        new_begin += tl.maximum(first - cached, 0) * BLOCK_N
    return begin, ready_end, new_begin, end


@triton.jit
def _merge_splits(softmax, partials, fields, is_row, group, GROUPS: tl.constexpr):
    """The softmax of the whole tile, and the rows that this program writes: none if it is not the last of the tile.

    ``softmax``: of this program's split; ``partials``: pointers to those of all splits, and to how many have finished.
    The loads bypass the L1 cache, which does not see what other programs have written.
    """
    sums_ptr, peaks_ptr, totals_ptr, done_counts_ptr = partials
    acc, peak, total = softmax
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    splits = tl.load(fields + SPLITS)
    if splits > 1:
        first = tl.load(fields + FIRST_PART).to(tl.int64)
        own_rows = ((first + tl.load(fields + SPLIT)) * GROUPS + group) * ROWS + rows
        tl.store(sums_ptr + own_rows[:, None] * COLS + cols[None, :], acc)
        tl.store(peaks_ptr + own_rows, peak)
        tl.store(totals_ptr + own_rows, total)
        tl.debug_barrier()  # all threads have stored before the program is counted as done
        done_ptr = done_counts_ptr + first * GROUPS + group
        is_last = tl.atomic_add(done_ptr, 1, sem="acq_rel") == splits - 1
        is_row = is_row & is_last
        if is_last:
            tl.store(done_ptr, 0)  # for the next layer
            acc, peak, total = empty_softmax(ROWS, COLS)
            for split in range(splits):
                split_rows = ((first + split) * GROUPS + group) * ROWS + rows
                part_peak = tl.load(peaks_ptr + split_rows, cache_modifier=".cg")
                part_total = tl.load(totals_ptr + split_rows, cache_modifier=".cg")
                part_acc = tl.load(sums_ptr + split_rows[:, None] * COLS + cols[None, :], cache_modifier=".cg")
                new_peak = tl.maximum(peak, part_peak)
                decay, weight = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
                acc = acc * decay[:, None] + part_acc * weight[:, None]
                total = total * decay + part_total * weight
                peak = new_peak
    return acc, peak, total, is_row


@triton.jit
def _context_attention_kernel(
    q_ptr,
    kv_desc,
    kv_ptr,
    cache_ptr,
    scales_ptr,
    out_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    see_until_ptr,
    num_keys_ptr,
    req_to_token_ptr,
    tiles_ptr,
    sums_ptr,
    peaks_ptr,
    totals_ptr,
    done_counts_ptr,
    q_token_stride,
    kv_token_stride,
    slot_stride,
    scale_stride,
    req_stride,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    FIXED_ORDER: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    GROUPS: tl.constexpr = HEADS // PACKED
    group = tl.program_id(0) % GROUPS
    first_head = group * PACKED
    fields = tiles_ptr + (tl.program_id(0) // GROUPS) * TILE_FIELDS
    q_len = tl.load(fields + Q_LEN)
    if q_len == 0:
        return
    req_idx, start_loc = tl.load(fields + REQ_IDX).to(tl.int64), tl.load(fields + START_LOC)
    first_token, ready_len = tl.load(fields + FIRST_TOKEN), tl.load(fields + READY_LEN)

    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = first_head + rows % PACKED
    q_tokens = first_token + rows // PACKED
    is_row = (q_tokens < q_len) & (rows < TOKENS * PACKED)
    q_rows = start_loc.to(tl.int64) + q_tokens
    q = load_rows(q_ptr, q_rows * q_token_stride + heads * DIM, cols, is_row, DIM)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads) * LOG2_E

    softmax = empty_softmax(BLOCK_M, BLOCK_D)
    kv_head = first_head // (HEADS // KV_HEADS)
    k_head, v_head = kv_head * DIM, (KV_HEADS + kv_head) * DIM
    slots_ptr = req_to_token_ptr + req_idx * req_stride
    q_positions, k_len = ready_len + q_tokens, _num_new_keys(num_keys_ptr, req_idx, q_len)
    last_seen, seen_end = _last_seen(see_until_ptr, q_rows, q_tokens, is_row, first_token, ready_len, TOKENS)
    begin, ready_end, new_begin, end = _keys_of(
        fields, first_token, seen_end, k_len, ready_len, CAUSAL, WINDOW, not FIXED_ORDER, BLOCK_N
    )
    cache = (
        cache_ptr + k_head,
        cache_ptr + v_head,
        slots_ptr,
        slot_stride,
        scales_ptr,
        scale_stride,
        kv_head,
        KV_HEADS + kv_head,
    )
    cached_q, cached_scale = for_codes(q, scales_ptr), score_factor(scale, cache)
    if FIXED_ORDER:
        softmax = attend_cached_in_order(
            cached_q,
            softmax,
            cache,
            begin,
            ready_len + end,
            q_positions,
            ready_len + last_seen,
            slopes,
            cached_scale,
            softcap,
            WINDOW,
            DIM,
            BLOCK_N,
            USE_ASM,
        )
    else:
        softmax = attend_cached_prefix(
            cached_q,
            softmax,
            cache,
            begin,
            ready_end,
            q_positions,
            slopes,
            cached_scale,
            softcap,
            WINDOW,
            DIM,
            BLOCK_N,
            USE_ASM,
        )
    acc, peak, total = softmax
    acc = scale_values(acc, cache)  # before the new tokens, whose values have no scale
    if not FIXED_ORDER:
        acc, peak, total = attend_new_tokens(
            q,
            (acc, peak, total),
            kv_desc,
            kv_ptr,
            kv_token_stride,
            start_loc,
            k_head,
            v_head,
            first_token,
            k_len,
            new_begin,
            end,
            q_tokens,
            last_seen,
            slopes,
            scale,
            softcap,
            CAUSAL,
            WINDOW,
            DIM,
            BLOCK_N,
        )
        partials = (sums_ptr, peaks_ptr, totals_ptr, done_counts_ptr)
        acc, peak, total, is_row = _merge_splits((acc, peak, total), partials, fields, is_row, group, GROUPS)
    if sinks_ptr is not None:
        total += tl.exp2(tl.load(sinks_ptr + heads) * LOG2_E - peak)
    out_ptrs = out_ptr + (q_rows * HEADS + heads)[:, None] * DIM + cols[None, :]
    tl.store(out_ptrs, acc / _positive(total, num_keys_ptr)[:, None], mask=is_row[:, None] & (cols < DIM)[None, :])


@ops.context_attention.impl("triton")
def context_attention(
    q: Tensor, kv: Tensor, kv_cache: ops.KvCache, batch: ops.AttnBatch, options: ops.AttnOptions
) -> Tensor:
    _check(q, kv, kv_cache)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if batch.has_decodes:
        token_attention.launch(q, kv_cache, batch, options, out)
    _launch(q, kv, kv_cache, batch, options, out)
    return out


def attend_in_order(q: Tensor, kv_cache: ops.KvCache, batch: ops.AttnBatch, options: ops.AttnOptions) -> Tensor:
    """Attention of prompts and decodes; no bit of a row depends on what else the step computes."""
    _check(q, None, kv_cache)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(q, None, kv_cache, batch, options, out)
    return out


def _launch(
    q: Tensor,
    kv: Tensor | None,
    kv_cache: ops.KvCache,
    batch: ops.AttnBatch,
    options: ops.AttnOptions,
    out: Tensor,
) -> None:
    """Without ``kv`` all keys are read from the cache, in a fixed order."""
    if not len(q):
        return
    cache, scales, scale_stride = parts_of(kv_cache)
    heads, kv_heads, dim = q.shape[1], cache.shape[1] // 2, q.shape[2]
    block_d = head_block(dim)
    packed = packed_heads(heads, kv_heads)
    rows_per_request = packed * len(q) // len(batch.b_req_idx) if kv is not None else 0
    tiling = tiling_of(q.element_size(), block_d, rows_per_request)
    tokens, groups = tiling.rows // packed, heads // packed
    min_new_tokens = 2 if batch.has_decodes and kv is not None else 1
    key = ("context_attention", tokens, groups, block_d, min_new_tokens, kv is None, options.key)
    plan: SplitTiles | None = batch.plans.get(key)  # layers of other head shapes have others
    if plan is None:
        options.check_supported("triton", *(OPTIONS if kv is not None else OPTIONS_IN_ORDER))
        if kv is None:
            plan = SplitTiles(list_tiles(batch, len(q), tokens, min_new_tokens))
        else:
            window = options.window if options.causal else None
            plan = list_split_tiles(batch, len(q), tiling, packed, groups, block_d, min_new_tokens, window)
        batch.plans[key] = plan
    scale, softcap = score_factors(options.scale, options.softcap)
    _context_attention_kernel[(plan.tiles.shape[0] * groups,)](
        q,
        None if kv is None else _descriptor(kv, tiling.keys, block_d),
        kv,
        cache,
        scales,
        out,
        options.alibi_slopes,
        options.sinks,
        batch.see_until if options.causal else None,
        None if options.causal else _num_keys_by_row(batch),
        batch.req_to_token,
        plan.tiles,
        plan.sums,
        plan.peaks,
        plan.totals,
        plan.done_counts,
        q.stride(0),
        0 if kv is None else kv.stride(0),
        cache.stride(0),
        scale_stride,
        batch.req_to_token.stride(0),
        scale,
        softcap,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PACKED=packed,
        TOKENS=tokens,
        DIM=dim,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.keys,
        BLOCK_D=block_d,
        CAUSAL=options.causal,
        WINDOW=options.window,
        FIXED_ORDER=kv is None,
        USE_ASM=uses_asm(),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def _num_keys_by_row(batch: ops.AttnBatch) -> Tensor | None:
    """By row of ``req_to_token``, which tiles know."""
    if batch.b_num_keys is None:
        return None
    by_row: Tensor | None = batch.plans.get("num_keys")
    if by_row is None:  # once a step
        by_row = batch.b_num_keys.new_zeros(len(batch.req_to_token))
        batch.plans["num_keys"] = by_row.index_copy_(0, batch.b_req_idx.long(), batch.b_num_keys)
    return by_row


def _descriptor(kv: Tensor, keys: int, block_d: int) -> TensorDescriptor | None:
    """For the copy engine (TMA), which reads ``keys`` rows of a head at a time; None if ``kv`` breaks its rules."""
    rows, heads, dim = kv.shape
    stride = kv.stride(0)
    if dim != block_d or stride * kv.element_size() % COPY_ALIGNMENT or kv.data_ptr() % COPY_ALIGNMENT:
        return None
    return TensorDescriptor(kv, [rows, heads * dim], [stride, 1], [keys, dim])


def _check(q: Tensor, kv: Tensor | None, kv_cache: ops.KvCache) -> None:
    cache = parts_of(kv_cache).numbers
    kv = cache if kv is None else kv
    check_heads_side_by_side("context_attention", q=q, kv=kv, kv_cache=cache)
    if kv.shape[1:] != cache.shape[1:] or q.shape[2] != kv.shape[2] or 2 * q.shape[1] % kv.shape[1]:
        raise ValueError(
            f"context_attention: heads of q {tuple(q.shape[1:])}, of kv {tuple(kv.shape[1:])} and of the cache "
            f"{tuple(cache.shape[1:])} do not match"
        )
