"""Matmul of few rows, limited by the memory bandwidth of its weight; cuBLAS computes all others.

A program multiplies a few rows of the weight with all rows of the input, tile by tile, with several tiles in flight.
The weight is the left operand: the GPU multiplies 16 or 64 of its rows with as few as 8 rows of the input. The other
way round it would compute 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._gpu import stages_that_fit

MIN_ROWS = 8  # of the input in one multiply instruction
MIN_BLOCK_K = 16  # the shortest sum that tl.dot takes


@dataclass(frozen=True, slots=True)
class Config:
    block_n: int  # rows of the weight for each program
    block_bytes: int  # of each of these rows in a tile
    num_warps: int
    num_stages: int


NARROW = Config(block_n=16, block_bytes=1024, num_warps=1, num_stages=4)
WIDE = Config(block_n=64, block_bytes=512, num_warps=4, num_stages=4)
SMALL = Config(block_n=16, block_bytes=512, num_warps=4, num_stages=4)
ANY = 1 << 30
DOT_BLOCK = 2048  # numbers of a row that are multiplied at once


@dataclass(frozen=True, slots=True)
class Rule:
    """The configuration of products up to these sizes; None: cuBLAS."""

    config: Config | None
    max_rows: int
    max_out: int
    max_in: int = ANY

    def fits(self, rows: int, out_size: int, in_size: int) -> bool:
        return rows <= self.max_rows and out_size <= self.max_out and in_size <= self.max_in


# The first rule that fits is used, and cuBLAS if none fits. The comments give TB/s of a weight [out, in] in bfloat16 on
# an H200, by this kernel and by cuBLAS.
RULES = (
    # [2048, 4096], 1 and 8 rows: 1.62, 1.97 and 1.62, 1.99; [128, 2048] in us: 5.4, 4.6 and 5.3, 4.9
    Rule(None, max_rows=32, max_out=256),
    # [512, 2048], a router: 10 us by cuBLAS with 1 and 8 rows, which splits the sum and adds up; this one not measured
    Rule(SMALL, max_rows=8, max_out=768),
    Rule(None, max_rows=32, max_out=768),
    Rule(SMALL, max_rows=4, max_out=1024),  # [1024, 2048], 1, 2 and 4 rows in us: 5.8 and 12.7, 8.1, 11.6
    Rule(None, max_rows=32, max_out=2048),
    Rule(NARROW, max_rows=8, max_out=4096),  # [4096, 4096]: 2.95, 2.61; [4096, 14336]: 3.74, 3.56
    Rule(NARROW, max_rows=4, max_out=8192),  # [6144, 4096]: 3.24, 3.06; [4608, 3584]: 2.86, 2.80
    Rule(WIDE, max_rows=32, max_out=8192, max_in=4096),  # 16 rows, [4096, 4096]: 2.85, 2.61; [6144, 4096]: 3.24, 3.07
    Rule(NARROW, max_rows=16, max_out=8192),  # 16 rows, [4096, 14336]: 3.52, 3.53; [3584, 18944]: 3.55, 3.37
    Rule(None, max_rows=32, max_out=8192),
    Rule(None, max_rows=32, max_out=32768),  # [28672, 4096]: 3.83, 3.94; 32 rows: 3.64, 3.87
    Rule(NARROW, max_rows=8, max_out=65536),  # [37888, 3584]: 3.98, 3.62
    Rule(WIDE, max_rows=32, max_out=ANY),  # 16 rows, [37888, 3584]: 3.86, 3.54; [128256, 4096]: 4.22, 4.15
)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_size,
    in_size,
    x_row_stride,
    weight_row_stride,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    out_rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    out_cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = out_rows < rows
    is_col = out_cols < out_size
    cols = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + out_rows[:, None] * x_row_stride + cols
    weight_ptrs = weight_ptr + out_cols.to(tl.int64)[:, None] * weight_row_stride + cols

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_in = cols < (BLOCK_K if IS_EVEN else in_size - start)
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_in, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=is_col[:, None] & is_in, other=0.0)
        acc = tl.dot(weight, x.T, acc=acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + out_cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + out_rows[None, :] * out_size + out_cols[:, None], acc, mask=is_row[None, :] & is_col[:, None])


@triton.jit
def _dot_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, in_size, x_row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, in_size, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=cols < in_size, other=0.0).to(tl.float32)
        sums += x * tl.load(weight_ptr + cols, mask=cols < in_size, other=0.0).to(tl.float32)
    out = tl.sum(sums, axis=0)
    if bias_ptr is not None:
        out += tl.load(bias_ptr).to(tl.float32)
    tl.store(out_ptr + row, out)


def _dot(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product with one output, such as the gate of a shared expert: cuBLAS takes 10 us for a row of 2,048 numbers."""
    rows, in_size = x.shape
    out = x.new_empty(rows, 1)
    _dot_kernel[(rows,)](x, weight, bias, out, in_size, x.stride(0), min(next_power_of_2(in_size), DOT_BLOCK))
    return out


def first_fit(rules: tuple[Rule, ...], rows: int, out_size: int, in_size: int) -> Config | None:
    return next((rule.config for rule in rules if rule.fits(rows, out_size, in_size)), None)


def config_of(rows: int, out_size: int, in_size: int) -> Config | None:
    """The configuration of a product; None: cuBLAS computes it."""
    return first_fit(RULES, rows, out_size, in_size)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: Config,
    block_m: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[rows, in]`` by the kernel; ``block_m``: rows of a program, or all."""
    check_last_contiguous("linear", x=x, weight=weight)
    (rows, in_size), out_size = x.shape, len(weight)
    block_k = min(config.block_bytes // x.element_size(), max(next_power_of_2(in_size), MIN_BLOCK_K))
    block_m = block_m or max(next_power_of_2(rows), MIN_ROWS)
    out = x.new_empty((rows, out_size), dtype=out_dtype or x.dtype)
    if not out.numel():
        return out
    _linear_kernel[(cdiv(out_size, config.block_n), cdiv(rows, block_m))](
        x,
        weight,
        bias,
        out,
        rows,
        out_size,
        in_size,
        x.stride(0),
        weight.stride(0),
        IS_EVEN=in_size % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        num_warps=config.num_warps,
        num_stages=stages_that_fit((config.block_n + block_m) * block_k * x.element_size(), config.num_stages),
    )
    return out


@ops.linear.impl("triton")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_last_contiguous("linear", x=x, weight=weight)
    if x.dim() == 2 and x.numel() and len(weight) == 1:
        return _dot(x, weight, bias)
    config = config_of(len(x), *weight.shape) if x.dim() == 2 and x.numel() else None
    return F.linear(x, weight, bias) if config is None else multiply(x, weight, bias, config)


@ops.linear_float32.impl("triton")
def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """The products of half-precision numbers are exact in float32, so only the result needs the wider type."""
    check_last_contiguous("linear_float32", x=x, weight=weight)
    config = config_of(len(x), *weight.shape)
    if config is not None and x.numel():
        return multiply(x, weight, None, config, out_dtype=torch.float32)
    if ops.active_traits().has_wide_mm and not x.is_cpu and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
