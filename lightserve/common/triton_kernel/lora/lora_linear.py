"""A linear with adapters: what they shrink is computed beside the product, so that only their expand is a step more.

Few rows: the matrices A are more rows of the weight for the kernels of ``linear`` and ``norm_linear``. The first
programs multiply A of an adapter with the input, the others the weight, in one launch. More rows: cuBLAS computes the
product, and shrink runs beside it on another stream.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel.linear import linear as plain, norm_linear
from lightserve.common.triton_kernel.linear.linear import MIN_BLOCK_K, MIN_ROWS, Config, first_fit
from lightserve.common.triton_kernel.linear.norm_linear import repeat_rows
from lightserve.common.triton_kernel.lora.add_lora import check_lora, expand, new_hidden, shrink, splits_of

# Norm and product of one row are one kernel for any size: gate and up are not multiplied in it, as adapters add to them
# first. Estimated from the times in norm_linear.py, not measured.
NORM_RULES = (*norm_linear.RULES, *norm_linear.GATED_RULES)
# With more rows the product fills the GPU, and there is nothing to gain beside it. Not measured.
MAX_ROWS_BESIDE = 512
# Shrink has time beside the product, and each program of expand reads all splits: a wide output has many. 64 rows of
# Llama-3-8B on an H200 take 0.14 ms a step less than with 16 splits.
MAX_SPLITS_BESIDE, MAX_SPLITS_OF_WIDE, WIDE = 8, 4, 16_384  # columns of the output


class Norm(NamedTuple):
    """The norm before a linear."""

    residual: Tensor
    weight: Tensor
    eps: float


@triton.jit
def _product(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,  # None: x is multiplied as it is
    new_residual_ptr,
    writes_residual,
    weight_ptrs,
    is_weight_row,
    rows,
    in_size,
    eps,
    x_row_stride,
    residual_row_stride,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``[BLOCK_N, BLOCK_M]``: rows of the weight times rows of the input, each of which is there several times."""
    in_rows = tl.arange(0, ROWS).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + in_rows * x_row_stride + cols
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([ROWS, 1], tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_in = cols < (BLOCK_K if IS_EVEN else in_size - start)
        is_row = (in_rows < rows) & is_in
        weight = tl.load(weight_ptrs + start + cols, mask=is_weight_row[:, None] & is_in, other=0.0)
        x = tl.load(x_ptrs + start, mask=is_row, other=0.0)
        if norm_weight_ptr is not None:
            residual_ptrs = residual_ptr + in_rows * residual_row_stride + start + cols
            residual = tl.load(residual_ptrs, mask=is_row, other=0.0).to(tl.float32)
            norm_weight = tl.load(norm_weight_ptr + start + cols, mask=is_in, other=0.0).to(tl.float32)
            rounded = (residual + x.to(tl.float32)).to(new_residual_ptr.dtype.element_ty)
            new_residual_ptrs = new_residual_ptr + in_rows * in_size + start + cols
            tl.store(new_residual_ptrs, rounded, mask=is_row & writes_residual)
            summed = rounded.to(tl.float32)
            squares += tl.sum(summed * summed, axis=1, keep_dims=True)
            x = (summed * norm_weight).to(weight.dtype)
        acc = tl.dot(weight, repeat_rows(x, BLOCK_M).T, acc=acc, input_precision="ieee")
    if norm_weight_ptr is not None:
        acc *= repeat_rows(tl.rsqrt(squares / in_size + eps), BLOCK_M).T
    return acc


@triton.jit(do_not_specialize=["rows", "n_groups"])
def _lora_linear_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    a_ptr,
    out_ptr,
    new_residual_ptr,
    hidden_ptr,  # [rows, LORA_ROWS] float32, in the order of rows_ptr
    rows_ptr,
    groups_ptr,
    n_groups,
    rows,
    out_size,
    in_size,
    eps,
    x_row_stride,
    residual_row_stride,
    weight_row_stride,
    a_slot_stride,
    a_row_stride,
    LORA_ROWS: tl.constexpr,  # of A of one adapter: of all parts
    LORA_BLOCKS: tl.constexpr,  # programs for an adapter
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    REPEATS: tl.constexpr = BLOCK_M // ROWS
    out_rows = tl.arange(0, BLOCK_M) // REPEATS
    is_once = (tl.arange(0, BLOCK_M) % REPEATS == 0) & (out_rows < rows)
    block = tl.program_id(0) - n_groups * LORA_BLOCKS
    if block >= 0:
        weight_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_weight_row = weight_rows < out_size
        weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * weight_row_stride
        acc = _product(
            x_ptr, residual_ptr, norm_weight_ptr, new_residual_ptr, block == 0, weight_ptrs, is_weight_row, rows,
            in_size, eps, x_row_stride, residual_row_stride, IS_EVEN, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + weight_rows, mask=is_weight_row, other=0.0).to(tl.float32)[:, None]
        out_ptrs = out_ptr + out_rows[None, :].to(tl.int64) * out_size + weight_rows[:, None]
        tl.store(out_ptrs, acc, mask=is_once[None, :] & is_weight_row[:, None])
    else:
        group, lora_block = tl.program_id(0) // LORA_BLOCKS, tl.program_id(0) % LORA_BLOCKS
        slot = tl.load(groups_ptr + group).to(tl.int64)
        if slot >= 0:
            places = tl.load(groups_ptr + n_groups + group) + tl.arange(0, BLOCK_M)
            end = tl.load(groups_ptr + 2 * n_groups + group)
            own_rows = tl.load(rows_ptr + places, mask=places < end, other=-1)
            is_same = own_rows[None, :] == out_rows[:, None]
            hidden_rows = tl.sum(tl.where(is_same, places[None, :], 0), axis=1)
            is_own = is_once & (tl.sum(is_same.to(tl.int32), axis=1) > 0)
            a_rows = lora_block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_a_row = a_rows < LORA_ROWS
            a_ptrs = a_ptr + slot * a_slot_stride + a_rows.to(tl.int64)[:, None] * a_row_stride
            acc = _product(
                x_ptr, residual_ptr, norm_weight_ptr, new_residual_ptr, False, a_ptrs, is_a_row, rows,
                in_size, eps, x_row_stride, residual_row_stride, IS_EVEN, ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            hidden_ptrs = hidden_ptr + hidden_rows[None, :] * LORA_ROWS + a_rows[:, None]
            tl.store(hidden_ptrs, acc, mask=is_own[None, :] & is_a_row[:, None])


def multiply(x: Tensor, layer: ops.LoraLinear, config: Config, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """The op by the kernel and ``expand``, for up to ``MIN_ROWS`` rows ``[rows, in]``; and the new residual, or x."""
    (rows, in_size), (out_size, _), lora = x.shape, layer.weight.shape, layer.lora
    block_k = min(config.block_bytes // x.element_size(), max(next_power_of_2(in_size), MIN_BLOCK_K))
    lora_rows, n_groups = lora.a.shape[1], layer.rows.groups.shape[1]
    lora_blocks = cdiv(lora_rows, config.block_n)
    out, hidden = x.new_empty((rows, out_size)), new_hidden(1, rows, lora)
    new_residual = x if norm is None else x.new_empty((rows, in_size))
    _lora_linear_kernel[(n_groups * lora_blocks + cdiv(out_size, config.block_n),)](
        x,
        None if norm is None else norm.residual,
        None if norm is None else norm.weight.contiguous(),
        layer.weight,
        layer.bias,
        lora.a,
        out,
        None if norm is None else new_residual,
        hidden,
        layer.rows.rows,
        layer.rows.groups,
        n_groups,
        rows,
        out_size,
        in_size,
        0.0 if norm is None else norm.eps,
        x.stride(0),
        0 if norm is None else norm.residual.stride(0),
        layer.weight.stride(0),
        lora.a.stride(0),
        lora.a.stride(1),
        LORA_ROWS=lora_rows,
        LORA_BLOCKS=lora_blocks,
        IS_EVEN=in_size % block_k == 0,
        ROWS=MIN_ROWS if norm is None else next_power_of_2(rows),
        BLOCK_M=MIN_ROWS,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        num_warps=config.num_warps,
        num_stages=stages_that_fit((config.block_n + MIN_ROWS) * block_k * x.element_size(), config.num_stages),
    )
    expand(out, hidden, lora, layer.rows, layer.rows.max_group)
    return out, new_residual


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def multiply_beside(x: Tensor, layer: ops.LoraLinear) -> Tensor:
    """The op with shrink beside ``linear``: a fork and a join, in a captured graph too."""
    lora, rows, n_groups = layer.lora, layer.rows, layer.rows.groups.shape[1]
    most = MAX_SPLITS_OF_WIDE if len(layer.weight) >= WIDE else MAX_SPLITS_BESIDE
    splits = min(splits_of(n_groups, lora.num_parts, x.shape[1]), most)
    hidden = new_hidden(splits, len(rows.rows), lora)  # on the stream of its next reader, which frees it
    if x.is_cpu or not ops.active_traits().has_streams:
        out = ops.linear(x, layer.weight, layer.bias)
        shrink(x, lora, rows, splits, rows.max_group, hidden=hidden)
    else:
        second, current = _second_stream(x.device), torch.cuda.current_stream(x.device)
        second.wait_stream(current)
        with torch.cuda.stream(second):
            shrink(x, lora, rows, splits, rows.max_group, hidden=hidden)
        out = ops.linear(x, layer.weight, layer.bias)
        current.wait_stream(second)
    expand(out, hidden, lora, rows, rows.max_group)
    return out


@ops.lora_linear.impl("triton")
def lora_linear(x: Tensor, layer: ops.LoraLinear) -> Tensor:
    check_last_contiguous("lora_linear", x=x, weight=layer.weight)
    check_lora("lora_linear", layer.lora, layer.rows)
    if not len(x) or not layer.rows.groups.shape[1]:
        return ops.linear(x, layer.weight, layer.bias)
    config = plain.config_of(len(x), *layer.weight.shape) if len(x) <= MIN_ROWS else None
    if config is not None:
        return multiply(x, layer, config)[0]
    if len(x) <= MAX_ROWS_BESIDE:
        return multiply_beside(x, layer)
    return ops.lora_linear.impls[ops.REFERENCE](x, layer)


@ops.add_rms_norm_lora_linear.impl("triton")
def add_rms_norm_lora_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, layer: ops.LoraLinear
) -> tuple[Tensor, Tensor]:
    op, weight = "add_rms_norm_lora_linear", layer.weight
    check_last_contiguous(op, x=x, residual=residual, weight=weight)
    check_lora(op, layer.lora, layer.rows)
    is_fit = norm_linear.takes(x, residual, weight) and layer.rows.groups.shape[1] > 0
    config = first_fit(NORM_RULES, len(x), *weight.shape) if is_fit else None
    if config is None:
        return ops.add_rms_norm_lora_linear.impls[ops.REFERENCE](x, residual, norm_weight, eps, layer)
    return multiply(x, layer, config, Norm(residual, norm_weight, eps))
