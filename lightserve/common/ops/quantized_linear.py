"""Products with quantised weights: ``x @ weight.T + bias``, computed in float32 and returned in the dtype of ``x``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.quantized_weight import (
    FP8_MAX,
    Fp8Weight,
    InputQuant,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    in_groups,
)
from lightserve.common.ops.registry import op

INT8_MAX = 127.0


@op
def linear_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
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
    return F.linear(rounded, weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)


def round_input(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """``x`` in float32, rounded as ``weight.input_quant`` says."""
    if weight.input_quant is InputQuant.NONE:
        return x
    most = FP8_MAX if isinstance(weight, Fp8Weight) else INT8_MAX
    grouped = in_groups(x, weight.group_size) if weight.input_quant is InputQuant.GROUP else x
    if weight.input_quant is InputQuant.STATIC:
        assert weight.input_scale is not None
        scale = weight.input_scale
    else:
        scale = (grouped.abs().amax(-1, keepdim=True) / most).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (grouped / scale).clamp(-most, most)
    rounded = codes.to(torch.float8_e4m3fn).float() if isinstance(weight, Fp8Weight) else codes.round()
    return (rounded * scale).view(x.shape)
