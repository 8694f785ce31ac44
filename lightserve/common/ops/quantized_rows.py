"""Rows of activations in 8 bits: for products that round their input. Each op has a form fused with its producer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.activation import silu_and_mul
from lightserve.common.ops.norm import add_rms_norm
from lightserve.common.ops.quantized_weight import (
    FP8_MAX,
    Fp8Weight,
    InputQuant,
    QuantizedWeight,
)
from lightserve.common.ops.registry import op

INT8_MAX = 127.0
TINY = torch.finfo(torch.float32).tiny  # the scale of a row of zeros


@dataclass(frozen=True, slots=True, eq=False)
class RowQuant:
    """How rows are rounded."""

    dtype: torch.dtype  # of the codes: float8_e4m3fn or int8
    group_size: int | None = None  # numbers with the same scale; None: all of a row
    scale: Tensor | None = None  # float32 scalar, for all rows; None: the largest number becomes the largest code

    @property
    def max_code(self) -> float:
        return FP8_MAX if self.dtype == torch.float8_e4m3fn else INT8_MAX


class QuantizedRows(NamedTuple):
    codes: Tensor  # [rows, width]
    scales: Tensor  # float32 [rows, groups]

    def dequantize(self) -> Tensor:
        """In float32."""
        groups = self.scales.shape[1]
        grouped = self.codes.float().reshape(len(self.codes), groups, self.codes.shape[1] // groups)
        return (grouped * self.scales.unsqueeze(-1)).flatten(1)


def row_quant_of(weight: QuantizedWeight) -> RowQuant | None:
    """How the product with ``weight`` rounds its input; None: not at all."""
    if weight.input_quant is InputQuant.NONE:
        return None
    dtype = torch.float8_e4m3fn if isinstance(weight, Fp8Weight) else torch.int8
    group = weight.group_size if weight.input_quant is InputQuant.GROUP else None
    return RowQuant(dtype, group, weight.input_scale if weight.input_quant is InputQuant.STATIC else None)


@op
def quantize_rows(x: Tensor, quant: RowQuant) -> QuantizedRows:
    """Round ``x`` ``[rows, width]``."""
    group = quant.group_size or x.shape[1]
    grouped = x.float().reshape(len(x), x.shape[1] // group, group)
    if quant.scale is None:
        scales = (grouped.abs().amax(-1) / quant.max_code).clamp(min=TINY)
    else:
        scales = quant.scale.float().expand(grouped.shape[:-1])
    scaled = (grouped / scales.unsqueeze(-1)).clamp(-quant.max_code, quant.max_code).flatten(-2)
    is_integer = quant.dtype == torch.int8
    return QuantizedRows((scaled.round() if is_integer else scaled).to(quant.dtype), scales)


@op
def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float, quant: RowQuant) -> QuantizedRows:
    """``quantize_rows`` of ``add_rms_norm``, which adds ``x`` to ``residual`` in place."""
    return quantize_rows(add_rms_norm(x, residual, weight, eps), quant)


@op
def silu_and_mul_quantize(gate_up: Tensor, quant: RowQuant) -> QuantizedRows:
    """``quantize_rows`` of ``silu_and_mul``."""
    return quantize_rows(silu_and_mul(gate_up), quant)


@op
def linear_quantized_rows(
    codes: Tensor, scales: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``x @ weight.T + bias`` for the rounded ``x`` of a ``QuantizedRows``, in ``dtype``."""
    rows = QuantizedRows(codes, scales).dequantize()
    return F.linear(rows, weight.dequantize(), None if bias is None else bias.float()).to(dtype)
