"""Linears in MXFP4: the product of experts, with one expert that all rows choose."""

from __future__ import annotations

from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import InputQuant, Mxfp4Weight
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._quantized_expert_linear import TILES, quantized_linear

INVARIANT_ROWS = 32  # of a program, for every number of rows


@ops.linear_mxfp4.impl("triton")
def linear_mxfp4(x: Tensor, weight: Mxfp4Weight, bias: Tensor | None = None) -> Tensor:
    return _multiply(x, weight, bias, next((size for size in TILES if x.shape[0] <= size), max(TILES)))


@ops.linear_mxfp4.impl(ops.batch_invariant("triton"))
def linear_mxfp4_in_fixed_tiles(x: Tensor, weight: Mxfp4Weight, bias: Tensor | None = None) -> Tensor:
    return _multiply(x, weight, bias, INVARIANT_ROWS)


def _multiply(x: Tensor, weight: Mxfp4Weight, bias: Tensor | None, block_m: int) -> Tensor:
    check_last_contiguous("linear_mxfp4", x=x, codes=weight.codes, scales=weight.scales)
    if weight.input_quant is not InputQuant.NONE:
        raise ValueError(f"linear_mxfp4: inputs cannot be rounded ({weight.input_quant.value})")
    return quantized_linear(x, weight, block_m, bias) if x.numel() else x.new_empty((0, weight.shape[0]))
