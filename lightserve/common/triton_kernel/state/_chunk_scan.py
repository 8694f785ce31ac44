"""A linear scan chunk by chunk, in two kernels.

The first one runs for all chunks at once. It computes how much each token of a chunk sees of the others and, with
corrections, what its tokens would add if the state before the chunk were zero, and how that changes with the state. The
second one takes the state through the chunks of a request, one program for each request, head and block of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.common.triton_kernel.state._chunks import (
    CHUNK_FIELDS,
    END,
    FIRST_TOKEN,
    REQUEST,
    load_request,
    load_snapshot,
)
from lightserve.common.triton_kernel.state._scan_tiles import load_decay, load_keys

# Both return ``q k^T`` and ``k k^T``, each product times the decay from the token of the column to that of the row.
# ``decay`` holds the sums of log decays up to each token. Past the diagonal its differences could be infinite.


@triton.jit
def _products_by_head(q, k, decay):
    factor = tl.exp(tl.minimum(decay - tl.trans(decay), 0.0))
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    return scores, tl.dot(k, tl.trans(k), input_precision="ieee") * factor


@triton.jit
def _products_by_channel(q, k, decay, CHUNK: tl.constexpr):
    """Column by column: a factor of each row and one of each column would overflow."""
    rows, cols = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    overlaps = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for token in range(CHUNK):
        log_factor = decay - tl.sum(tl.where(rows == token, decay, 0.0), axis=0)[None, :]
        key = tl.sum(tl.where(rows == token, k, 0.0), axis=0)[None, :] * tl.exp(tl.minimum(log_factor, 0.0))
        scores = tl.where(cols == token, tl.sum(q * key, axis=1)[:, None], scores)
        overlaps = tl.where(cols == token, tl.sum(k * key, axis=1)[:, None], overlaps)
    return scores, overlaps


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):
    """The inverse of identity plus ``lower``, which is zero on the diagonal and above it.

    Row by row. Products of powers of ``lower`` need fewer steps, but where keys are alike they grow past float32.
    """
    rows, cols = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(rows == cols, 1.0, 0.0)
    for row in range(1, CHUNK):
        factors = tl.sum(tl.where(rows == row, lower, 0.0), axis=0)
        change = tl.sum(factors[:, None] * inverse, axis=0)
        inverse = tl.where(rows == row, inverse - change[None, :], inverse)
    return inverse


@triton.jit
def _prepare_chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    scores_ptr,
    new_values_ptr,
    old_keys_ptr,
    chunks_ptr,
    q_stride,
    k_stride,
    v_stride,
    k_dim,
    v_dim,
    heads,
    heads_per_key,
    scale,
    HAS_NORM: tl.constexpr,
    CORRECTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    chunk_ptr, head = chunks_ptr + tl.program_id(0) * CHUNK_FIELDS, tl.program_id(1)
    request = tl.load(chunk_ptr + REQUEST)
    if request < 0:
        return
    first = tl.load(chunk_ptr + FIRST_TOKEN).to(tl.int64)
    tokens = first + tl.arange(0, CHUNK)
    in_chunk = tokens < tl.load(chunk_ptr + END)
    keys = tl.arange(0, BLOCK_K)
    in_key = keys < k_dim
    mask = in_chunk[:, None] & in_key[None, :]

    dtype = v_ptr.dtype.element_ty
    key_offset = head // heads_per_key * k_dim
    q = load_keys(q_ptr + key_offset, tokens, q_stride, keys, mask, HAS_NORM)
    k = load_keys(k_ptr + key_offset, tokens, k_stride, keys, mask, HAS_NORM)
    beta = tl.load(beta_ptr + tokens * heads + head, mask=in_chunk, other=0.0)
    decay_dim = k_dim if BY_CHANNEL else 1
    decay, _ = load_decay(
        log_decay_ptr + head * decay_dim, tokens, heads * decay_dim, keys, in_chunk, in_key, BY_CHANNEL
    )
    if BY_CHANNEL:
        scores, overlaps = _products_by_channel(q, k, decay, CHUNK)
    else:
        scores, overlaps = _products_by_head(q.to(dtype), k.to(dtype), decay)

    rows, cols = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    scores = tl.where(rows >= cols, scores * scale, 0.0)
    if not CORRECTS:
        scores *= beta[None, :]
    score_ptrs = scores_ptr + (tokens[:, None] * heads + head) * CHUNK + cols
    tl.store(score_ptrs, scores, mask=in_chunk[:, None])

    if CORRECTS:
        overlaps = tl.where(rows > cols, overlaps * beta[:, None], 0.0)
        corrections = (_inverse(overlaps, CHUNK) * beta[None, :]).to(dtype)
        values = tl.arange(0, BLOCK_V)
        value_mask = in_chunk[:, None] & (values < v_dim)[None, :]
        v_ptrs = v_ptr + tokens[:, None] * v_stride + head * v_dim + values[None, :]
        v = tl.load(v_ptrs, mask=value_mask, other=0.0)
        new_values = tl.dot(corrections, v, input_precision="ieee")
        old_keys = tl.dot(corrections, (k * tl.exp(decay)).to(dtype), input_precision="ieee")
        out_rows = tokens[:, None] * heads + head
        tl.store(new_values_ptr + out_rows * v_dim + values[None, :], new_values, mask=value_mask)
        tl.store(old_keys_ptr + out_rows * k_dim + keys[None, :], old_keys, mask=mask)


@triton.jit
def _add_skipped(out, skip_ptr, head, v_ptrs, mask):
    if skip_ptr is not None:
        v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        out += tl.load(skip_ptr + head).to(tl.float32) * v
    return out


@triton.jit
def _chunk_scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    skip_ptr,
    scores_ptr,
    new_values_ptr,
    old_keys_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    read_rows_ptr,
    write_rows_ptr,
    snapshot_rows_ptr,
    snapshot_lens_ptr,
    q_stride,
    k_stride,
    v_stride,
    state_row_stride,
    k_dim,
    v_dim,
    heads,
    heads_per_key,
    scale,
    min_tokens,
    HAS_NORM: tl.constexpr,
    CORRECTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head, request = tl.program_id(1), tl.program_id(2)
    start, end, read_row, write_row = load_request(starts_ptr, read_rows_ptr, write_rows_ptr, request)
    if end - start < min_tokens:
        return
    snapshot_row, after = load_snapshot(snapshot_rows_ptr, snapshot_lens_ptr, request, start, end)

    dtype = v_ptr.dtype.element_ty
    keys, values = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = keys < k_dim, values < v_dim
    state_mask = in_value[:, None] & in_key[None, :]
    key_offset = head // heads_per_key * k_dim
    decay_dim = k_dim if BY_CHANNEL else 1
    state_ptrs = states_ptr + head * v_dim * k_dim + values[:, None] * k_dim + keys[None, :]
    state = tl.load(state_ptrs + read_row * state_row_stride, mask=state_mask & (read_row >= 0), other=0.0).to(
        tl.float32
    )

    # what is before the snapshot, and what is behind it
    for _ in tl.static_range(1 if snapshot_rows_ptr is None else 2):
        for first in range(start, after, CHUNK):
            tokens = first + tl.arange(0, CHUNK)
            in_chunk = tokens < after
            key_mask, value_mask = in_chunk[:, None] & in_key[None, :], in_chunk[:, None] & in_value[None, :]
            token_heads = tokens[:, None] * heads + head
            decay, whole_decay = load_decay(
                log_decay_ptr + head * decay_dim, tokens, heads * decay_dim, keys, in_chunk, in_key, BY_CHANNEL
            )
            q = load_keys(q_ptr + key_offset, tokens, q_stride, keys, key_mask, HAS_NORM) * tl.exp(decay) * scale
            k = load_keys(k_ptr + key_offset, tokens, k_stride, keys, key_mask, HAS_NORM) * tl.exp(whole_decay - decay)
            before = tl.trans(state).to(dtype)
            v_ptrs = v_ptr + tokens[:, None] * v_stride + head * v_dim + values[None, :]
            if CORRECTS:
                new_values = tl.load(new_values_ptr + token_heads * v_dim + values[None, :], mask=value_mask, other=0.0)
                old_keys = tl.load(old_keys_ptr + token_heads * k_dim + keys[None, :], mask=key_mask, other=0.0)
                added = (new_values.to(tl.float32) - tl.dot(old_keys, before, input_precision="ieee")).to(dtype)
            else:
                added = tl.load(v_ptrs, mask=value_mask, other=0.0)
                k *= tl.load(beta_ptr + tokens * heads + head, mask=in_chunk, other=0.0)[:, None]

            cols = tl.arange(0, CHUNK)[None, :]
            scores = tl.load(scores_ptr + token_heads * CHUNK + cols, mask=in_chunk[:, None], other=0.0)
            out = tl.dot(q.to(dtype), before, input_precision="ieee")
            out = tl.dot(scores, added, acc=out, input_precision="ieee")
            out = _add_skipped(out, skip_ptr, head, v_ptrs, value_mask)
            tl.store(out_ptr + token_heads * v_dim + values[None, :], out, mask=value_mask)
            state = tl.dot(tl.trans(added), k.to(dtype), acc=state * tl.exp(whole_decay), input_precision="ieee")
        if (after < end) & (snapshot_row >= 0):
            tl.store(state_ptrs + snapshot_row * state_row_stride, state, mask=state_mask)
        start, after = after, end

    if write_row >= 0:
        tl.store(state_ptrs + write_row * state_row_stride, state, mask=state_mask)
