"""Products of experts with many tokens each, by torch's grouped matmul.

It multiplies bfloat16 rows that are sorted by expert. It neither gathers rows nor applies activations, so these are
kernels of their own here. This module is the only caller of ``torch._grouped_mm``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.experts import ExpertActivation
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel.experts._expert_linear import activation_constants, gated_silu, relu2

BLOCK = 1024
ALIGNED_BYTES = 16  # of rows, for the tensor memory accelerator


@triton.jit
def _gather_tokens_kernel(x_ptr, pairs_ptr, out_ptr, x_row_stride, n_cols, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = (tl.load(pairs_ptr + row) // TOP_K).to(tl.int64)
    x = tl.load(x_ptr + token * x_row_stride + cols, mask=cols < n_cols, other=0.0)
    tl.store(out_ptr + row * n_cols + cols, x, mask=cols < n_cols)


@triton.jit
def _activate_pairs_kernel(
    in_ptr,
    bias_ptr,
    ids_ptr,
    pairs_ptr,
    out_ptr,
    in_row_stride,
    width,
    IS_GATED: tl.constexpr,
    IS_RELU2: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMITS_ACTIVATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + tl.load(pairs_ptr + row)).to(tl.int64)
    if expert < 0:
        return
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    in_size = PARTS * width
    in_cols = tl.program_id(1) * (PARTS * BLOCK) + tl.arange(0, PARTS * BLOCK)
    x = tl.load(in_ptr + row * in_row_stride + in_cols, mask=in_cols < in_size, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + expert * in_size + in_cols, mask=in_cols < in_size, other=0.0).to(tl.float32)
    if IS_GATED:
        gate, up = tl.split(x.reshape(BLOCK, 2))
        x = gated_silu(gate, up, ALPHA, LIMIT, UP_OFFSET, CUBIC, LIMITS_ACTIVATED)
    if IS_RELU2:
        x = relu2(x)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * width + cols, x, mask=cols < width)


def is_usable(x: Tensor, weight: Tensor) -> bool:
    """Whether the grouped matmul takes rows like those of ``x`` and this weight, without waiting for the device."""
    is_aligned = weight.stride(1) * weight.element_size() % ALIGNED_BYTES == 0 and weight.shape[2] % 8 == 0
    has_product = ops.active_traits().has_grouped_mm and not x.is_cpu
    return x.dtype == weight.dtype == torch.bfloat16 and is_aligned and has_product


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``weight[expert] @ x`` for rows that are sorted by expert; rows behind the last end hold anything."""
    out: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return out


def gather_tokens(x: Tensor, pairs: Tensor, top_k: int) -> Tensor:
    """The row of ``x`` of each pair's token."""
    out = x.new_empty((len(pairs), x.shape[1]))
    grid = (len(pairs), cdiv(x.shape[1], BLOCK))
    _gather_tokens_kernel[grid](x, pairs, out, x.stride(0), x.shape[1], TOP_K=top_k, BLOCK=BLOCK)
    return out


def activate_pairs(x: Tensor, bias: Tensor | None, ids: Tensor, pairs: Tensor, activation: ExpertActivation) -> Tensor:
    """The activation of what ``w13`` computes in the rows of ``pairs``, after the bias of each row's expert."""
    width = x.shape[1] // activation.rows_per_unit
    out = x.new_empty((len(x), width))
    _activate_pairs_kernel[(len(x), cdiv(width, BLOCK))](
        x,
        bias,
        ids,
        pairs,
        out,
        x.stride(0),
        width,
        BLOCK=BLOCK,
        **activation_constants(activation),
    )
    return out
