"""The short convolution: one program for each chunk of a request and block of channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.state._chunks import (
    CHUNK_FIELDS,
    FIRST_TOKEN,
    REQUEST,
    ChunkSpec,
    check_batch,
    chunks_of,
    load_request,
    load_snapshot,
)

MAX_TOKENS = 16  # of a chunk, and of what a token sees: only the first chunk of a request reads its state; not measured
ELEMENTS = 2048  # of a tile: 16 in each lane of 4 warps; not measured


@triton.jit
def _load_inputs(
    x_ptrs, x_row_stride, state_ptrs, state_tap_stride, tokens, start, has_state, mask, WIDTH: tl.constexpr
):
    """The inputs ``[tokens, channels]``. Those before ``start``, the request's first token, are from its state."""
    is_new = tokens >= start
    new = tl.load(x_ptrs + tokens[:, None] * x_row_stride, mask=is_new[:, None] & mask, other=0.0)
    taps = tokens - start + WIDTH - 1
    is_old = (tokens < start) & has_state
    old = tl.load(state_ptrs + taps[:, None] * state_tap_stride, mask=is_old[:, None] & mask, other=0.0)
    return tl.where(is_new[:, None], new, old.to(new.dtype))


@triton.jit
def _causal_conv1d_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    out_ptr,
    chunks_ptr,
    starts_ptr,
    read_rows_ptr,
    write_rows_ptr,
    snapshot_rows_ptr,
    snapshot_lens_ptr,
    x_row_stride,
    state_row_stride,
    state_tap_stride,
    channels,
    HAS_SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    chunk_ptr = chunks_ptr + tl.program_id(0) * CHUNK_FIELDS
    request = tl.load(chunk_ptr + REQUEST)
    if request < 0:
        return
    first = tl.load(chunk_ptr + FIRST_TOKEN).to(tl.int64)
    start, end, read_row, write_row = load_request(starts_ptr, read_rows_ptr, write_rows_ptr, request)

    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = cols < channels
    tokens = first + tl.arange(0, BLOCK_T)
    mask = (tokens < end)[:, None] & in_row[None, :]
    x_ptrs = x_ptr + cols[None, :]
    read_ptrs = states_ptr + read_row * state_row_stride + cols[None, :]

    sums = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + cols * WIDTH + tap, mask=in_row, other=0.0).to(tl.float32)
        x = _load_inputs(
            x_ptrs,
            x_row_stride,
            read_ptrs,
            state_tap_stride,
            tokens - (WIDTH - 1 - tap),
            start,
            read_row >= 0,
            mask,
            WIDTH,
        )
        sums += x.to(tl.float32) * weight[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if HAS_SILU:
        sums *= tl.sigmoid(sums)
    tl.store(out_ptr + tokens[:, None] * channels + cols[None, :], sums, mask=mask)

    if first == start:  # the only program of the request that reads its state
        taps = tl.arange(0, TAPS)[:, None]
        in_state = (taps < WIDTH - 1) & in_row[None, :]
        tap_ptrs = states_ptr + taps * state_tap_stride + cols[None, :]
        last = tl.arange(0, TAPS) - (WIDTH - 1)
        snapshot_row, after = load_snapshot(snapshot_rows_ptr, snapshot_lens_ptr, request, start, end)
        if snapshot_row >= 0:
            before = after + last
            inputs = _load_inputs(
                x_ptrs, x_row_stride, read_ptrs, state_tap_stride, before, start, read_row >= 0, in_state, WIDTH
            )
            tl.store(tap_ptrs + snapshot_row * state_row_stride, inputs, mask=in_state)
        if write_row >= 0:
            before = end + last
            inputs = _load_inputs(
                x_ptrs, x_row_stride, read_ptrs, state_tap_stride, before, start, read_row >= 0, in_state, WIDTH
            )
            tl.debug_barrier()  # other threads have read the state, if it is in the same row
            tl.store(tap_ptrs + write_row * state_row_stride, inputs, mask=in_state)


@ops.causal_conv1d.impl("triton")
def causal_conv1d(x: Tensor, params: ops.ConvParams, states: Tensor, batch: ops.StateBatch) -> Tensor:
    check_last_contiguous("causal_conv1d", x=x, states=states)
    check_batch("causal_conv1d", batch)
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    if params.width > MAX_TOKENS:
        raise ValueError(f"causal_conv1d: the width {params.width} is over the limit {MAX_TOKENS} of the Triton kernel")
    tokens, channels = x.shape
    block_t = min(next_power_of_2(batch.max_tokens), MAX_TOKENS)
    block_c = min(next_power_of_2(channels), max(ELEMENTS // block_t, 128), 512)
    chunks = chunks_of(batch, tokens, ChunkSpec(block_t))
    _causal_conv1d_kernel[(len(chunks), cdiv(channels, block_c))](
        x,
        params.weight.contiguous(),
        params.bias,
        states,
        out,
        chunks,
        batch.b1_start,
        batch.b_read_row,
        batch.b_write_row,
        *(batch.snapshots or (None, None)),
        x.stride(0),
        states.stride(0),
        states.stride(1),
        channels,
        HAS_SILU=params.has_silu,
        WIDTH=params.width,
        TAPS=next_power_of_2(params.width - 1),
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )
    return out
