"""Sampling in two kernels: the best token of each block of a row, then the best of the blocks.

Rows with a temperature get Gumbel noise. Tokens that a mask forbids are skipped, so masked logits are read once and
never written. A program loads its block at once, so that even one row is spread over the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_has_bits, check_last_contiguous
from lightserve.common.triton_kernel.sampling._hash import hash32

BLOCK = 2048  # 128,256 logits take 4 us on an H200, 256 rows of them 35 us, in blocks of 8192 37 us
WARPS = 4


@triton.jit
def _noise_key(seed, position):
    """The part of the hash that all tokens of a row share."""
    return hash32(hash32(hash32(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ position.to(tl.uint32))


@triton.jit
def _gumbel(key, tokens):
    """Noise from 23 bits of a hash: the middles of 2^23 equal steps of (0, 1), exact in float32."""
    uniform = (hash32(key ^ tokens.to(tl.uint32)) >> 9).to(tl.float32) * 2.0**-23 + 2.0**-24
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sample_block_kernel(
    logits_ptr,
    b_temperature_ptr,
    b_seed_ptr,
    b_position_ptr,
    mask_row_ptr,
    bitmask_ptr,
    best_ptr,
    best_token_ptr,
    row_stride,
    bitmask_stride,
    n_cols,
    first_token,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
    temperature = tl.load(b_temperature_ptr + row)
    if temperature > 0:
        key = _noise_key(tl.load(b_seed_ptr + row).to(tl.int64), tl.load(b_position_ptr + row))
        logits = logits / temperature + _gumbel(key, first_token + cols)

    logits = tl.where(logits == logits, logits, float("inf"))  # NaN: the row gives no token, whatever other blocks hold
    if bitmask_ptr is not None:
        mask_row = tl.load(mask_row_ptr + row).to(tl.int64)
        if mask_row >= 0:
            words = tl.load(bitmask_ptr + mask_row * bitmask_stride + cols // 32, mask=cols < n_cols, other=0)
            logits = tl.where(((words >> (cols % 32)) & 1) != 0, logits, float("-inf"))
    best, lane = tl.max(logits, axis=0, return_indices=True)
    at = row * tl.num_programs(0) + block
    tl.store(best_ptr + at, best)
    tl.store(best_token_ptr + at, first_token + block * BLOCK + lane)


@triton.jit
def _sample_row_kernel(
    best_ptr,
    best_token_ptr,
    mask_row_ptr,
    out_ptr,
    blocks,
    NONE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the token of each row, or its score and the token."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * blocks + lanes, mask=lanes < blocks, other=float("-inf"))
    tokens = tl.load(best_token_ptr + row * blocks + lanes, mask=lanes < blocks, other=0)
    largest, winner = tl.max(best, axis=0, return_indices=True)
    token = tl.sum(tl.where(lanes == winner, tokens, 0), axis=0).to(tl.int64)
    if HAS_SCORES:
        tl.store(out_ptr + row * 2, largest)
        tl.store(out_ptr + row * 2 + 1, token.to(tl.float32))
        return
    token = tl.where(tl.abs(largest) < float("inf"), token, NONE)
    if mask_row_ptr is not None:  # a masked row may have no allowed token, which is no error
        is_masked = tl.load(mask_row_ptr + row) >= 0
        token = tl.where(is_masked & (largest == float("-inf")), 0, token)
    tl.store(out_ptr + row, token)


@ops.sample.impl("triton")
def sample(
    logits: Tensor, b_temperature: Tensor, b_seed: Tensor, b_position: Tensor, masks: ops.TokenMasks | None = None
) -> Tensor:
    check_last_contiguous("sample", logits=logits, b_temperature=b_temperature, b_seed=b_seed, b_position=b_position)
    out = logits.new_empty((len(logits),), dtype=torch.int64)
    _launch(logits, b_temperature, b_seed, b_position, masks, 0, out)
    return out


@ops.sample_part.impl("triton")
def sample_part(logits: Tensor, b_temperature: Tensor, b_seed: Tensor, b_position: Tensor, first_token: int) -> Tensor:
    columns = {"b_temperature": b_temperature, "b_seed": b_seed, "b_position": b_position}
    check_last_contiguous("sample_part", logits=logits, **columns)
    out = logits.new_empty((len(logits), 2), dtype=torch.float32)
    if not logits.shape[1]:
        out[:, 0], out[:, 1] = float("-inf"), first_token
        return out
    _launch(logits, b_temperature, b_seed, b_position, None, first_token, out)
    return out


def _launch(
    logits: Tensor,
    b_temperature: Tensor,
    b_seed: Tensor,
    b_position: Tensor,
    masks: ops.TokenMasks | None,
    first_token: int,
    out: Tensor,
) -> None:
    """Write tokens to ``out`` ``[rows]``, or scores and tokens to ``out`` ``[rows, 2]``."""
    rows, vocab = logits.shape
    if masks is not None:
        check_last_contiguous("sample", b_row=masks.b_row, bitmask=masks.bitmask)
        check_has_bits("sample", masks.bitmask, vocab)
    if rows == 0:
        return
    blocks = cdiv(vocab, BLOCK)
    best = logits.new_empty((rows, blocks), dtype=torch.float32)
    best_token = logits.new_empty((rows, blocks), dtype=torch.int32)
    mask_row = None if masks is None else masks.b_row
    _sample_block_kernel[(blocks, rows)](
        logits,
        b_temperature,
        b_seed,
        b_position,
        mask_row,
        None if masks is None else masks.bitmask,
        best,
        best_token,
        logits.stride(0),
        0 if masks is None else masks.bitmask.stride(0),
        vocab,
        first_token,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    _sample_row_kernel[(rows,)](
        best,
        best_token,
        mask_row,
        out,
        blocks,
        NONE=ops.NO_TOKEN,
        HAS_SCORES=out.ndim == 2,
        BLOCK=next_power_of_2(blocks),
        num_warps=1,
    )
