"""Products with weights in int8 and fp8: which kernel computes which number of rows.

us on an H200, without scaling the output of ``tensorwise``, for a weight [out, in] and a number of rows:

| weight        | rows | Triton | tensorwise | rowwise | blockwise | int8 Triton | _int_mm | bfloat16 |
|---------------|-----:|-------:|-----------:|--------:|----------:|------------:|--------:|---------:|
| [28672, 4096] |    1 |   30.9 |       30.9 |    46.0 |     fails |        31.2 |   fails |     58.3 |
|               |   64 |   35.1 |       34.2 |    36.4 |      36.9 |        34.1 |    38.2 |     66.0 |
|               |  256 |    116 |       50.3 |    51.6 |      57.9 |             |    89.8 |     95.6 |
|               | 4096 |        |        705 |     688 |       882 |             |    1204 |     1233 |
| [4096, 14336] |    1 |   18.9 |       19.5 |    37.5 |     fails |        17.8 |   fails |     32.4 |
|               |   64 |   26.8 |       18.9 |    37.7 |      42.1 |        26.4 |    33.8 |     37.4 |
|               | 1024 |        |         78 |      82 |        97 |             |     153 |      149 |
| [4096, 4096]  |   64 |   14.0 |        7.6 |    13.8 |      14.7 |         9.5 |    11.8 |     11.9 |

The kernel that scales the output of ``tensorwise`` takes 4 us for 64 rows of 28672.
``blockwise`` is faster than the Triton kernel from 128 rows on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.ops import Fp8Weight, Int8Weight, QuantizedRows, QuantizedWeight
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.linear import _eight_bit_linear, _scaled_products, _weight_only_linear

INVARIANT = ops.batch_invariant("triton")
MAX_TRITON_ROWS = 16  # fp8 with scales per row
# Of wide weights: [28672, 4096] with 64 rows takes 33.8 us in Triton, and 36.6 tensorwise with its scaling.
WIDE_OUT, MAX_WIDE_TRITON_ROWS = 16384, 64
MAX_TENSORWISE_ROWS = 128
MIN_BLOCKWISE_ROWS = 128
MAX_TRITON_INT8_ROWS = 128
MAX_WEIGHT_ONLY_ROWS = 64  # not measured yet; for more rows the weight is widened into memory
ALIGNMENT = 16  # of both sizes of a weight, for torch's products

EightBit = Fp8Weight | Int8Weight
Product = Callable[[QuantizedRows, EightBit, Tensor | None, torch.dtype], Tensor]


def product_of(rows: int, weight: EightBit, row_groups: int, dtype: torch.dtype, has_blockwise: bool) -> Product | None:
    """torch's product, for results in ``dtype``; None: the Triton kernel computes it."""
    out_size, in_size = weight.shape
    if out_size % ALIGNMENT or in_size % ALIGNMENT or weight.offsets is not None:
        return None
    groups = weight.scales.shape[1], row_groups
    if groups == (1, 1):
        return _ungrouped_product(rows, weight, dtype)
    has_blocks = isinstance(weight, Fp8Weight) and weight.rows_per_scale == weight.group_size == 128
    is_blockwise = has_blocks and groups[0] == groups[1] and out_size % 128 == 0 and dtype == torch.bfloat16
    return _scaled_products.blockwise if is_blockwise and has_blockwise and rows >= MIN_BLOCKWISE_ROWS else None  # type: ignore[return-value]


def _ungrouped_product(rows: int, weight: EightBit, dtype: torch.dtype) -> Product | None:
    if isinstance(weight, Int8Weight):
        return None if rows <= MAX_TRITON_INT8_ROWS else _scaled_products.int_product  # type: ignore[return-value]
    if rows <= (MAX_WIDE_TRITON_ROWS if weight.shape[0] >= WIDE_OUT else MAX_TRITON_ROWS):
        return None
    is_tensorwise = rows <= MAX_TENSORWISE_ROWS or dtype != torch.bfloat16
    return _scaled_products.tensorwise if is_tensorwise else _scaled_products.rowwise  # type: ignore[return-value]


@ops.linear_quantized_rows.impl("triton")
def linear_quantized_rows(
    codes: Tensor, scales: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    check_last_contiguous("linear_quantized_rows", codes=codes, weight=weight.codes)
    rows = QuantizedRows(codes, scales)
    if not _is_eight_bit(weight, rows):
        return ops.linear_quantized_rows.impls[ops.REFERENCE](codes, scales, weight, bias, dtype)
    traits = ops.active_traits()
    if traits.has_scaled_mm and not codes.is_cpu:
        product = product_of(len(rows.codes), weight, rows.scales.shape[1], dtype, traits.has_blockwise_mm)
        if product is not None:
            return product(rows, weight, bias, dtype)
    return _eight_bit_linear.multiply(rows, weight, bias, dtype)


@ops.linear_quantized_rows.impl(INVARIANT)
def linear_quantized_rows_in_order(
    codes: Tensor, scales: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    rows = QuantizedRows(codes, scales)
    if not _is_eight_bit(weight, rows):
        return ops.linear_quantized_rows.impls[ops.REFERENCE](codes, scales, weight, bias, dtype)
    config, block_m = _eight_bit_linear.INVARIANT, _eight_bit_linear.INVARIANT_BLOCK_M
    return _eight_bit_linear.multiply(rows, weight, bias, dtype, config, block_m)


def _is_eight_bit(weight: QuantizedWeight, rows: QuantizedRows) -> TypeGuard[EightBit]:
    if not isinstance(weight, EightBit) or rows.codes.dtype != weight.codes.dtype:
        return False
    return _eight_bit_linear.can_multiply(rows, weight)


def _linear(x: Tensor, weight: EightBit, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    quant = ops.row_quant_of(weight)
    if quant is not None:
        out = ops.linear_quantized_rows(*ops.quantize_rows(rows, quant), weight, bias, x.dtype)
    elif len(rows) <= MAX_WEIGHT_ONLY_ROWS and _weight_only_linear.can_multiply(weight):
        out = _weight_only_linear.multiply(rows, weight, bias)
    else:
        out = F.linear(rows, _weight_only_linear.dequantize(weight, x.dtype), bias)
    return out.view(*x.shape[:-1], len(weight.codes))


def _linear_in_order(x: Tensor, weight: EightBit, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    quant = ops.row_quant_of(weight)
    if quant is not None:
        out = ops.linear_quantized_rows(*ops.quantize_rows(rows, quant), weight, bias, x.dtype)
    elif _weight_only_linear.can_multiply(weight):
        config, block_m = _weight_only_linear.INVARIANT, _weight_only_linear.INVARIANT_BLOCK_M
        out = _weight_only_linear.multiply(rows, weight, bias, config, block_m)
    else:
        out = ops.linear(rows, _weight_only_linear.dequantize(weight, x.dtype), bias)
    return out.view(*x.shape[:-1], len(weight.codes))


@ops.linear_fp8.impl("triton")
def linear_fp8(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    check_last_contiguous("linear_fp8", x=x, weight=weight.codes)
    return _linear(x, weight, bias)


@ops.linear_int8.impl("triton")
def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    check_last_contiguous("linear_int8", x=x, weight=weight.codes)
    return _linear(x, weight, bias)


@ops.linear_fp8.impl(INVARIANT)
def linear_fp8_in_order(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    return _linear_in_order(x, weight, bias)


@ops.linear_int8.impl(INVARIANT)
def linear_int8_in_order(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    return _linear_in_order(x, weight, bias)
