"""Products of 8-bit rows and weights by torch, for many rows."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops import Fp8Weight, Int8Weight, QuantizedRows
from lightserve.common.triton_kernel._blocks import cdiv

BLOCK = 1024
# Sums of fp8 that stay in the tensor cores keep 14 bits. Longer sums are added in float32 in between, which is slower.
MAX_FAST_IN = 8192
ROWS_MULTIPLE = 16  # of the blockwise product, which fails with 1 row


@triton.jit
def _scale_output_kernel(
    product_ptr, row_scales_ptr, column_scales_ptr, bias_ptr, out_ptr, row_scales_stride, n_cols, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    out = tl.load(product_ptr + row * n_cols + cols, mask=mask, other=0).to(tl.float32)
    out *= tl.load(row_scales_ptr + row * row_scales_stride)
    out *= tl.load(column_scales_ptr + cols, mask=mask, other=0.0)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n_cols + cols, out, mask=mask)


def scale_output(
    product: Tensor, row_scales: Tensor, column_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``product`` ``[rows, out]`` times the scale of its row and of its column, plus the bias."""
    rows, width = product.shape
    out = torch.empty((rows, width), dtype=dtype, device=product.device)
    _scale_output_kernel[(rows, cdiv(width, BLOCK))](
        product, row_scales, column_scales.contiguous(), bias, out, row_scales.stride(0), width, BLOCK
    )
    return out


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def tensorwise(rows: QuantizedRows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Without scales, which follow in a kernel of their own. float16 has no room for sums that are not scaled."""
    unit_scale = _one(rows.codes.device)
    product = torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=unit_scale,
        scale_b=unit_scale,
        out_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        use_fast_accum=rows.codes.shape[1] <= MAX_FAST_IN,
    )
    return scale_output(product, rows.scales, weight.scales, bias, dtype)


def rowwise(rows: QuantizedRows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """torch scales the result of each row and column, for results in bfloat16 only."""
    out = torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=rows.scales.contiguous(),
        scale_b=weight.scales.t().contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=rows.codes.shape[1] <= MAX_FAST_IN,
    ).to(dtype)
    return out if bias is None else out + bias


def blockwise(rows: QuantizedRows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scales per row and 128 inputs, and per 128 x 128 weights."""
    count = len(rows.codes)
    padding = -count % ROWS_MULTIPLE
    codes, scales = rows.codes, rows.scales
    if padding:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, padding)).view(codes.dtype)
        scales = F.pad(scales.t(), (0, padding)).t()
    out = F.scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales.t().contiguous().t(),  # the rows side by side
        scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=block_scales(weight.scales),
        scale_recipe_b=F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[:count].to(dtype)
    return out if bias is None else out + bias


def block_scales(scales: Tensor) -> Tensor:
    """As cuBLAS reads them: a multiple of four columns, stored by column block."""
    return F.pad(scales, (0, -scales.shape[1] % 4)).t()


def int_product(rows: QuantizedRows, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    product = torch._int_mm(rows.codes, weight.codes.t())
    return scale_output(product, rows.scales, weight.scales, bias, dtype)
