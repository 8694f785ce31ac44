"""A linear scan token by token: one program for each request, head and block of values. For requests of few tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.common.triton_kernel.state._chunks import load_request, load_snapshot
from lightserve.common.triton_kernel.state._scan_tiles import EPS


@triton.jit
def _recurrent_scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    skip_ptr,
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
    max_tokens,
    HAS_NORM: tl.constexpr,
    CORRECTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    start, end, read_row, write_row = load_request(starts_ptr, read_rows_ptr, write_rows_ptr, request)
    if end - start > max_tokens:
        return
    snapshot_row, after = load_snapshot(snapshot_rows_ptr, snapshot_lens_ptr, request, start, end)

    keys, values = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = keys < k_dim, values < v_dim
    mask = in_value[:, None] & in_key[None, :]
    key_offsets = head // heads_per_key * k_dim + keys
    state_ptrs = states_ptr + head * v_dim * k_dim + values[:, None] * k_dim + keys[None, :]
    state = tl.load(state_ptrs + read_row * state_row_stride, mask=mask & (read_row >= 0), other=0.0).to(tl.float32)

    for token in range(start, end):
        q = tl.load(q_ptr + token * q_stride + key_offsets, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_stride + key_offsets, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride + head * v_dim + values, mask=in_value, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * heads + head)
        if HAS_NORM:
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPS)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
        if BY_CHANNEL:
            log_decay = tl.load(log_decay_ptr + (token * heads + head) * k_dim + keys, mask=in_key, other=0.0)
            state *= tl.exp(log_decay)[None, :]
        else:
            state *= tl.exp(tl.load(log_decay_ptr + token * heads + head))
        added = beta * (v - tl.sum(state * k[None, :], axis=1)) if CORRECTS else beta * v
        state += added[:, None] * k[None, :]
        out = tl.sum(state * q[None, :], axis=1) * scale
        if skip_ptr is not None:
            out += tl.load(skip_ptr + head).to(tl.float32) * v
        tl.store(out_ptr + (token * heads + head) * v_dim + values, out, mask=in_value)
        if (snapshot_row >= 0) & (token + 1 == after):
            tl.store(state_ptrs + snapshot_row * state_row_stride, state, mask=mask)

    if (write_row >= 0) & (end > start):
        tl.store(state_ptrs + write_row * state_row_stride, state, mask=mask)
