"""Products with quantised weights: ``x @ weight.T + bias``, computed in float32 and returned in the dtype of ``x``."""

from __future__ import annotations

from torch import Tensor

from lightserve.common.ops.linear import linear
from lightserve.common.ops.quantized_rows import quantize_rows, row_quant_of
from lightserve.common.ops.quantized_weight import (
    Codebook4Weight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
)
from lightserve.common.ops.registry import REFERENCE, op


@op
def linear_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    return _linear(x, weight, bias)


@op
def linear_codebook4(x: Tensor, weight: Codebook4Weight, bias: Tensor | None = None) -> Tensor:
    return _linear(x, weight, bias)


@op
def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    return _linear(x, weight, bias)


@op
def linear_fp8(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    return _linear(x, weight, bias)


@op
def linear_mxfp4(x: Tensor, weight: Mxfp4Weight, bias: Tensor | None = None) -> Tensor:
    return _linear(x, weight, bias)


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    rounded = round_input(x.float(), weight)
    return linear(rounded, weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)


def round_input(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """``x`` in float32, rounded as ``weight.input_quant`` says."""
    quant = row_quant_of(weight)
    if quant is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    return quantize_rows.impls[REFERENCE](rows, quant).dequantize().view(x.shape)
