"""A linear scan: requests of few tokens by a recurrence, the others in chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.state.linear_scan import LinearScan
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel.attention._attention import dot_block
from lightserve.common.triton_kernel.state._chunk_scan import _chunk_scan_kernel, _prepare_chunk_kernel
from lightserve.common.triton_kernel.state._chunks import ChunkSpec, check_batch, chunks_of
from lightserve.common.triton_kernel.state._recurrent_scan import _recurrent_scan_kernel

FEW_TOKENS = 4  # of a request, which the recurrence computes: a chunk would be nearly empty; not measured
# Tokens of a chunk by bytes of an element. With 64 wgmma gets operands from registers, and fails on Hopper.
CHUNK_TOKENS = {2: 32, 4: 16}
BLOCK_V = 32  # values of a program; not measured
STATE_DTYPES = (torch.float32, torch.bfloat16)  # as they are stored; steps compute in float32


class Sizes(NamedTuple):
    tokens: int
    heads: int
    heads_per_key: int
    k_dim: int
    v_dim: int


def run(op: str, scan: LinearScan, states: Tensor, batch: ops.StateBatch) -> Tensor:
    _check(op, scan, states, batch)
    out = scan.v.new_empty(scan.v.shape)
    if out.numel() == 0:
        return out
    tokens, heads, v_dim = scan.v.shape
    sizes = Sizes(tokens, heads, heads // scan.k.shape[1], scan.k.shape[2], v_dim)
    if batch.max_tokens > FEW_TOKENS:
        _scan_chunks(scan, states, batch, sizes, out)
    _scan_tokens(scan, states, batch, sizes, out)
    return out


def _check(op: str, scan: LinearScan, states: Tensor, batch: ops.StateBatch) -> None:
    check_last_contiguous(op, states=states)
    check_heads_side_by_side(op, q=scan.q, k=scan.k, v=scan.v)
    check_batch(op, batch)
    if not (scan.log_decay.is_contiguous() and scan.beta.is_contiguous() and states[0].is_contiguous()):
        raise ValueError(f"{op}: decays, betas and the rows of the states must be contiguous; call contiguous() first")
    if states.dtype not in STATE_DTYPES:
        raise ValueError(f"{op}: the states must be float32 or bfloat16, found {states.dtype}")


def _scan_tokens(scan: LinearScan, states: Tensor, batch: ops.StateBatch, sizes: Sizes, out: Tensor) -> None:
    block_v = min(next_power_of_2(sizes.v_dim), BLOCK_V)
    _recurrent_scan_kernel[(len(batch.b_read_row), sizes.heads, cdiv(sizes.v_dim, block_v))](
        scan.q,
        scan.k,
        scan.v,
        scan.log_decay,
        scan.beta,
        scan.skip,
        states,
        out,
        batch.b1_start,
        batch.b_read_row,
        batch.b_write_row,
        *(batch.snapshots or (None, None)),
        scan.q.stride(0),
        scan.k.stride(0),
        scan.v.stride(0),
        states.stride(0),
        sizes.k_dim,
        sizes.v_dim,
        sizes.heads,
        sizes.heads_per_key,
        scan.scale,
        FEW_TOKENS,
        HAS_NORM=scan.has_norm,
        CORRECTS=scan.corrects,
        BY_CHANNEL=scan.decays_by_channel,
        BLOCK_K=next_power_of_2(sizes.k_dim),
        BLOCK_V=block_v,
    )


def _scan_chunks(scan: LinearScan, states: Tensor, batch: ops.StateBatch, sizes: Sizes, out: Tensor) -> None:
    chunk = CHUNK_TOKENS[scan.v.element_size()]
    chunks = chunks_of(batch, sizes.tokens, ChunkSpec(chunk, FEW_TOKENS + 1, ends_at_snapshots=True))
    scores = scan.v.new_empty(sizes.tokens, sizes.heads, chunk)
    new_values = torch.empty_like(out) if scan.corrects else None
    old_keys = scan.v.new_empty(sizes.tokens, sizes.heads, sizes.k_dim) if scan.corrects else None
    inputs = (scan.q, scan.k, scan.v, scan.log_decay, scan.beta)
    strides = (scan.q.stride(0), scan.k.stride(0), scan.v.stride(0))
    dims = (sizes.k_dim, sizes.v_dim, sizes.heads, sizes.heads_per_key, scan.scale)
    constants = {
        "HAS_NORM": scan.has_norm,
        "CORRECTS": scan.corrects,
        "BY_CHANNEL": scan.decays_by_channel,
        "CHUNK": chunk,
        "BLOCK_K": dot_block(sizes.k_dim),
    }
    _prepare_chunk_kernel[(len(chunks), sizes.heads)](
        *inputs,
        scores,
        new_values,
        old_keys,
        chunks,
        *strides,
        *dims,
        **constants,
        BLOCK_V=dot_block(sizes.v_dim),
    )
    block_v = min(dot_block(sizes.v_dim), BLOCK_V)
    _chunk_scan_kernel[(cdiv(sizes.v_dim, block_v), sizes.heads, len(batch.b_read_row))](
        *inputs,
        scan.skip,
        scores,
        new_values,
        old_keys,
        states,
        out,
        batch.b1_start,
        batch.b_read_row,
        batch.b_write_row,
        *(batch.snapshots or (None, None)),
        *strides,
        states.stride(0),
        *dims,
        FEW_TOKENS + 1,
        **constants,
        BLOCK_V=block_v,
        num_stages=_stages(scan, chunk, constants["BLOCK_K"], block_v),
    )


def _stages(scan: LinearScan, chunk: int, block_k: int, block_v: int) -> int:
    """Of the loop over chunks. It loads queries, keys, keys of corrections, two tiles of values, scores and decays."""
    tile_bytes = chunk * (3 * block_k + 2 * block_v + chunk) * scan.v.element_size()
    if scan.decays_by_channel:
        tile_bytes += chunk * block_k * 4
    return stages_that_fit(tile_bytes, 3, 2 * block_k * block_v * 4)
