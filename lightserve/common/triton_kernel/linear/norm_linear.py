"""The residual, its RMSNorm and the next matmul in one kernel, for few rows.

A program multiplies a few rows of the weight with all rows of the input, as in ``linear``. The norm's scale is a factor
of the whole product of a row. So the unscaled rows are multiplied, their squares are summed in the same loop, and the
product is scaled at the end. All programs read the old residual; the first one writes the new one to other memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.linear.linear import ANY, MIN_BLOCK_K, MIN_ROWS, Config, Rule, first_fit
from lightserve.common.triton_kernel.norm.activation import activate

# As linear's NARROW with one tile less in flight: the rows take its room.
NARROW = Config(block_n=16, block_bytes=1024, num_warps=1, num_stages=3)
# us on an H200, fused and as separate ops: [6144, 4096] with 1 row 15.2, 17.8, with 2 15.7, 17.9, with 4 20.2, 18.2;
# [28672, 4096] gated with 1 row 58.2, 63.5, with 2 60.4, 60.3, with 4 71.3, 60.7. Every program adds and squares all
# rows, which takes longer than to read the weight if there are more of them.
RULES = (Rule(NARROW, max_rows=2, max_out=8192),)
GATED_RULES = (Rule(NARROW, max_rows=1, max_out=ANY),)
DTYPES = (torch.bfloat16,)  # unscaled rows exceed the range of float16


@triton.jit
def repeat_rows(x, ROWS: tl.constexpr):
    """Repeat each row ``ROWS // len(x)`` times: the GPU multiplies at least ``ROWS`` rows, but fewer are computed."""
    repeated = tl.broadcast_to(x[:, None, :], (x.shape[0], ROWS // x.shape[0], x.shape[1]))
    return repeated.reshape(ROWS, x.shape[1])


@triton.jit(do_not_specialize=["rows"])
def _norm_linear_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    new_residual_ptr,
    rows,
    out_size,
    in_size,
    eps,
    x_row_stride,
    residual_row_stride,
    weight_row_stride,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    weight_rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_weight_row = weight_rows < out_size
    if IS_GATED:  # rows of gate and up alternate
        weight_rows = weight_rows // 2 + weight_rows % 2 * (out_size // 2)
    in_rows = tl.arange(0, ROWS).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + in_rows * x_row_stride + cols
    residual_ptrs = residual_ptr + in_rows * residual_row_stride + cols
    new_residual_ptrs = new_residual_ptr + in_rows * in_size + cols
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * weight_row_stride + cols
    is_first = tl.program_id(0) == 0

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([ROWS, 1], tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_in = cols < (BLOCK_K if IS_EVEN else in_size - start)
        is_row = (in_rows < rows) & is_in
        weight = tl.load(weight_ptrs + start, mask=is_weight_row[:, None] & is_in, other=0.0)
        x = tl.load(x_ptrs + start, mask=is_row, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptrs + start, mask=is_row, other=0.0).to(tl.float32)
        norm_weight = tl.load(norm_weight_ptr + start + cols, mask=is_in, other=0.0).to(tl.float32)
        rounded = (residual + x).to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptrs + start, rounded, mask=is_row & is_first)
        summed = rounded.to(tl.float32)
        squares += tl.sum(summed * summed, axis=1, keep_dims=True)
        unscaled = (summed * norm_weight).to(weight.dtype)
        acc = tl.dot(weight, repeat_rows(unscaled, BLOCK_M).T, acc=acc, input_precision="ieee")

    acc *= repeat_rows(tl.rsqrt(squares / in_size + eps), BLOCK_M).T
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_rows, mask=is_weight_row, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        gate, up = tl.split(acc.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1))
        acc = activate(gate, "silu") * up
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    REPEATS: tl.constexpr = BLOCK_M // ROWS
    width = out_size // PARTS
    out_rows = (tl.arange(0, BLOCK_M) // REPEATS)[None, :]
    is_once = (tl.arange(0, BLOCK_M) % REPEATS == 0)[None, :]
    out_cols = (tl.program_id(0) * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS))[:, None]
    tl.store(out_ptr + out_rows * width + out_cols, acc, mask=is_once & (out_rows < rows) & (out_cols < width))


def multiply(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    config: Config,
    is_gated: bool,
) -> tuple[Tensor, Tensor]:
    """The op by the kernel, for up to ``MIN_ROWS`` rows ``[rows, in]``; ``is_gated``: followed by SiLU and product."""
    (rows, in_size), out_size = x.shape, len(weight)
    block_k = min(config.block_bytes // x.element_size(), max(next_power_of_2(in_size), MIN_BLOCK_K))
    out = x.new_empty((rows, out_size // 2 if is_gated else out_size))
    new_residual = x.new_empty((rows, in_size))
    _norm_linear_kernel[(cdiv(out_size, config.block_n),)](
        x,
        residual,
        norm_weight.contiguous(),
        weight,
        bias,
        out,
        new_residual,
        rows,
        out_size,
        in_size,
        eps,
        x.stride(0),
        residual.stride(0),
        weight.stride(0),
        IS_GATED=is_gated,
        IS_EVEN=in_size % block_k == 0,
        ROWS=next_power_of_2(rows),
        BLOCK_M=MIN_ROWS,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out, new_residual


def takes(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Whether the fused kernel can compute with them."""
    return x.dim() == 2 and x.numel() > 0 and x.dtype in DTYPES and x.dtype == residual.dtype == weight.dtype


def config_of(x: Tensor, residual: Tensor, weight: Tensor, rules: tuple[Rule, ...]) -> Config | None:
    """The configuration of the fused kernel; None: norm and product are separate ops."""
    return first_fit(rules, len(x), *weight.shape) if takes(x, residual, weight) else None


@ops.add_rms_norm_linear.impl("triton")
def add_rms_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_last_contiguous("add_rms_norm_linear", x=x, residual=residual, weight=weight)
    config = config_of(x, residual, weight, RULES)
    if config is None:
        return ops.add_rms_norm_linear.impls[ops.REFERENCE](x, residual, norm_weight, eps, weight, bias)
    return multiply(x, residual, norm_weight, eps, weight, bias, config=config, is_gated=False)


@ops.add_rms_norm_gate_up.impl("triton")
def add_rms_norm_gate_up(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if len(weight) % 2:
        raise ValueError(f"add_rms_norm_gate_up: the weight holds gate and up, and {len(weight)} rows are odd")
    check_last_contiguous("add_rms_norm_gate_up", x=x, residual=residual, weight=weight)
    config = config_of(x, residual, weight, GATED_RULES)
    if config is None:
        return ops.add_rms_norm_gate_up.impls[ops.REFERENCE](x, residual, norm_weight, eps, weight, bias)
    return multiply(x, residual, norm_weight, eps, weight, bias, config=config, is_gated=True)
