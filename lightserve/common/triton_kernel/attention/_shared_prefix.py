"""Attention of decode rows over a prefix that several requests share: one load of its keys serves a tile of requests.

A program attends with a tile of query rows, the heads of several requests, to one split of the shared keys. It writes a
partial result for each request, which ``token_attention`` merges with those of the request's own keys. The work list of
a step is made on the device; each item is a tile and a split. The grid depends on shapes alone. A prefix has as many
splits as keep the GPU busy, so the partial results lie in the order of the items, not of the requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel import _gpu
from lightserve.common.triton_kernel._blocks import cdiv, few_sizes
from lightserve.common.triton_kernel.attention._attention import LOG2_E, head_block, score_factors
from lightserve.common.triton_kernel.attention._context_tiles import Tiling, packed_heads, tiling_of
from lightserve.common.triton_kernel.attention._kv_codes import for_codes, parts_of, scale_values, score_factor
from lightserve.common.triton_kernel.attention._online_softmax import attend_cached_blocks, empty_softmax, load_rows

# Programs of 64 rows. On an H200, 64 requests that share 2,048 tokens take 31.8 us per layer with two or four programs
# per multiprocessor, and 33 us with one. A minimum of 64 or 256 keys per split gives the same times.
PROGRAMS_PER_MULTIPROCESSOR = 2
MIN_SPLIT = 128  # keys

REQ_IDX = tl.constexpr(0)  # fields of a work item: the row of req_to_token that holds the prefix
FIRST = tl.constexpr(1)  # first request of the tile
MEMBERS = tl.constexpr(2)  # requests in the tile; 0: the item is empty
BEGIN = tl.constexpr(3)  # first key of the split
END = tl.constexpr(4)
WORK_FIELDS = tl.constexpr(8)  # int32 each, the last three unused


@dataclass(frozen=True, slots=True)
class SharedPrefixPlan:
    """What all layers of a step share: the work list, and room for partial results."""

    items: Tensor  # [max items, WORK_FIELDS] int32
    b_shared_len: Tensor  # [batch] int32: of the request's keys, those that the partial results cover
    b_partials: Tensor  # [batch, 3] int32: the request's first partial result, how far apart they are, how many
    partials: Tensor  # [max items, requests of a tile, heads, dim] float32
    log_sums: Tensor  # [max items, requests of a tile, heads] float32, base 2


@triton.jit(do_not_specialize=["requests", "max_items", "wanted", "min_split"])
def _shared_prefix_plan_kernel(
    groups_ptr,
    b_req_idx_ptr,
    items_ptr,
    b_shared_len_ptr,
    b_partials_ptr,
    requests,
    max_items,
    wanted,
    min_split,
    GROUPS: tl.constexpr,
    GROUP_FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
):
    work = 0  # keys, counted once for each tile
    for group in tl.static_range(GROUPS):
        members = tl.load(groups_ptr + group * GROUP_FIELDS + 1)
        tokens = tl.load(groups_ptr + group * GROUP_FIELDS + 2) // BLOCK_N * BLOCK_N
        work += tl.cdiv(members, TILE) * tokens
    longest = tl.maximum(tl.cdiv(work, wanted), min_split)

    items = tl.arange(0, BLOCK_ITEMS)
    reqs = tl.arange(0, BLOCK_REQS)
    item_members = tl.zeros([BLOCK_ITEMS], tl.int32)
    shared_len = tl.zeros([BLOCK_REQS], tl.int32)
    first_part, part_step, num_parts = shared_len, shared_len, shared_len
    listed = 0
    for group in tl.static_range(GROUPS):
        first = tl.load(groups_ptr + group * GROUP_FIELDS)
        members = tl.load(groups_ptr + group * GROUP_FIELDS + 1)
        # Whole blocks, so that no key needs a mask; the rest of the prefix is left to each request.
        tokens = tl.load(groups_ptr + group * GROUP_FIELDS + 2) // BLOCK_N * BLOCK_N
        parts = tl.maximum(tl.cdiv(tokens, longest), 1)
        split_len = tl.maximum(tl.cdiv(tl.cdiv(tokens, parts), BLOCK_N), 1) * BLOCK_N
        parts = tl.cdiv(tokens, split_len)

        # The tiles of a split are neighbours: its keys come from memory once, then from the cache.
        tiles = tl.cdiv(members, TILE)
        is_item = (items >= listed) & (items < listed + tiles * parts)
        split = (items - listed) // tl.maximum(tiles, 1)
        member = (items - listed - split * tiles) * TILE
        fields = items_ptr + items * WORK_FIELDS
        tl.store(fields + REQ_IDX, tl.load(b_req_idx_ptr + first, mask=members > 0, other=0), mask=is_item)
        tl.store(fields + FIRST, first + member, mask=is_item)
        item_members = tl.where(is_item, tl.minimum(members - member, TILE), item_members)
        tl.store(fields + BEGIN, split * split_len, mask=is_item)
        tl.store(fields + END, tl.minimum((split + 1) * split_len, tokens), mask=is_item)

        is_member = (reqs >= first) & (reqs < first + members)
        shared_len = tl.where(is_member, tokens, shared_len)
        first_part = tl.where(is_member, listed * TILE + reqs - first, first_part)
        part_step = tl.where(is_member, tiles * TILE, part_step)
        num_parts = tl.where(is_member, parts, num_parts)
        listed += tiles * parts
    tl.store(items_ptr + items * WORK_FIELDS + MEMBERS, item_members, mask=items < max_items)
    tl.store(b_shared_len_ptr + reqs, shared_len, mask=reqs < requests)
    tl.store(b_partials_ptr + reqs * 3, first_part, mask=reqs < requests)
    tl.store(b_partials_ptr + reqs * 3 + 1, part_step, mask=reqs < requests)
    tl.store(b_partials_ptr + reqs * 3 + 2, num_parts, mask=reqs < requests)


@triton.jit
def _shared_prefix_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    alibi_slopes_ptr,
    req_to_token_ptr,
    b_start_loc_ptr,
    b_seq_len_ptr,
    items_ptr,
    partial_ptr,
    log_sum_ptr,
    q_token_stride,
    q_head_stride,
    slot_stride,
    kv_head_stride,
    scale_stride,
    req_stride,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    first_head = tl.program_id(0) * PACKED
    item = tl.program_id(1)
    fields = items_ptr + item * WORK_FIELDS
    members = tl.load(fields + MEMBERS)
    if members == 0:
        return
    req_idx = tl.load(fields + REQ_IDX).to(tl.int64)
    first = tl.load(fields + FIRST)
    begin, end = tl.load(fields + BEGIN), tl.load(fields + END)

    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    heads = first_head + rows % PACKED
    reqs = first + rows // PACKED
    is_row = rows < members * PACKED
    q_rows = tl.load(b_start_loc_ptr + reqs, mask=is_row, other=0).to(tl.int64)
    q = load_rows(q_ptr, q_rows * q_token_stride + heads * q_head_stride, cols, is_row, DIM)
    slopes = None
    positions = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads) * LOG2_E
        positions = tl.load(b_seq_len_ptr + reqs, mask=is_row, other=0) - 1

    kv_head = first_head // (HEADS // KV_HEADS)
    k_ptr = kv_ptr + kv_head * kv_head_stride
    v_ptr, slots_ptr = k_ptr + KV_HEADS * kv_head_stride, req_to_token_ptr + req_idx * req_stride
    cache = (k_ptr, v_ptr, slots_ptr, slot_stride, scales_ptr, scale_stride, kv_head, KV_HEADS + kv_head)
    q, scale = for_codes(q, scales_ptr), score_factor(scale, cache)
    softmax = empty_softmax(BLOCK_M, BLOCK_D)
    acc, peak, total = attend_cached_blocks(
        q, softmax, cache, begin, end, positions, slopes, scale, softcap, None, DIM, BLOCK_N, USE_ASM
    )
    acc = scale_values(acc, cache)

    parts = (item.to(tl.int64) * (BLOCK_M // PACKED) + rows // PACKED) * HEADS + heads
    mask = is_row[:, None] & (cols < DIM)[None, :]
    tl.store(partial_ptr + parts[:, None] * DIM + cols[None, :], acc / total[:, None], mask=mask)
    tl.store(log_sum_ptr + parts, peak + tl.log2(total), mask=is_row)


def plan_shared_prefix(batch: ops.AttnBatch, q: Tensor, kv_heads: int, groups: Tensor) -> SharedPrefixPlan:
    """List the work of ``groups``, as in ``AttnBatch``, for queries like ``q`` ``[tokens, heads, dim]``."""
    _, heads, dim = q.shape
    packed = packed_heads(heads, kv_heads)
    tiling = _tiling(q)
    tile = tiling.rows // packed
    requests = len(batch.b_req_idx)
    wanted = cdiv(_gpu.active.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR, heads // packed)
    max_items = wanted + requests // tile + len(groups)  # a last split or tile may be shorter
    new = batch.b_req_idx.new_empty
    plan = SharedPrefixPlan(
        items=new((max_items, WORK_FIELDS.value)),
        b_shared_len=new(requests),
        b_partials=new((requests, 3)),
        partials=new((max_items, tile, heads, dim), dtype=torch.float32),
        log_sums=new((max_items, tile, heads), dtype=torch.float32),
    )
    _shared_prefix_plan_kernel[(1,)](
        groups,
        batch.b_req_idx,
        plan.items,
        plan.b_shared_len,
        plan.b_partials,
        requests,
        max_items,
        wanted,
        MIN_SPLIT,
        GROUPS=len(groups),
        GROUP_FIELDS=groups.shape[1],
        TILE=tile,
        BLOCK_N=tiling.keys,
        BLOCK_ITEMS=few_sizes(max_items),
        BLOCK_REQS=few_sizes(requests),
    )
    return plan


def launch_shared_prefix(
    q: Tensor, kv_cache: ops.KvCache, batch: ops.AttnBatch, options: ops.AttnOptions, plan: SharedPrefixPlan
) -> None:
    """Write the partial results of ``plan`` for ``q`` ``[tokens, heads, dim]``."""
    cache, scales, scale_stride = parts_of(kv_cache)
    _, heads, dim = q.shape
    kv_heads = cache.shape[1] // 2
    packed = packed_heads(heads, kv_heads)
    tiling = _tiling(q)
    scale, softcap = score_factors(options.scale, options.softcap)
    _shared_prefix_kernel[(heads // packed, len(plan.items))](
        q,
        cache,
        scales,
        options.alibi_slopes,
        batch.req_to_token,
        batch.b_start_loc,
        batch.b_seq_len,
        plan.items,
        plan.partials,
        plan.log_sums,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        scale_stride,
        batch.req_to_token.stride(0),
        scale,
        softcap,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PACKED=packed,
        DIM=dim,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.keys,
        BLOCK_D=head_block(dim),
        USE_ASM=_gpu.uses_asm(),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def _tiling(q: Tensor) -> Tiling:
    return tiling_of(q.element_size(), head_block(q.shape[2]))
