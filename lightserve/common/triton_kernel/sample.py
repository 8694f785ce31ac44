"""Sampling by Gumbel noise: one program a row hashes (seed, position, token) to noise and keeps the argmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._vocab import BLOCK, WARPS, fold_argmax


@triton.jit
def _hash32(x):
    """lowbias32 in uint32, which wraps by itself."""
    x = tl.mul(x ^ (x >> 16), 0x7FEB352D, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def _gumbel(key, tokens):
    """Noise from 23 bits of a hash: the middles of 2^23 equal steps of (0, 1), exact in float32."""
    uniform = (_hash32(key ^ tokens.to(tl.uint32)) >> 9).to(tl.float32) * 2.0**-23 + 2.0**-24
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sample_kernel(logits_ptr, b_seed_ptr, b_position_ptr, out_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(b_seed_ptr + row).to(tl.int64)
    position = tl.load(b_position_ptr + row).to(tl.uint32)
    key = _hash32(_hash32(_hash32(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)) ^ position)

    best = float("-inf")
    best_col = 0
    for first_col in range(0, n_cols, BLOCK):
        cols = first_col + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * row_stride + cols, mask=cols < n_cols, other=float("-inf"))
        best, best_col = fold_argmax(best, best_col, logits + _gumbel(key, cols), first_col)
    tl.store(out_ptr + row, best_col)


@ops.sample.impl("triton")
def sample(logits: Tensor, b_seed: Tensor, b_position: Tensor) -> Tensor:
    check_last_contiguous("sample", logits=logits, b_seed=b_seed, b_position=b_position)
    rows, vocab = logits.shape
    out = logits.new_empty((rows,), dtype=torch.int64)
    if rows == 0:
        return out
    _sample_kernel[(rows,)](logits, b_seed, b_position, out, logits.stride(0), vocab, BLOCK, num_warps=WARPS)
    return out
