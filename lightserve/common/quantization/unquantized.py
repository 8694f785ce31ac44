"""Weights that are not quantised: in the dtype of the activations, or in half as many bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.quantization.linear_method import LinearMethod, LinearPart, LinearSpec, RmsNorm


class UnquantizedLinear(LinearMethod):
    """One weight ``[out, in]`` and perhaps a bias ``[out]``; pieces ``PREFIX.weight`` and ``PREFIX.bias``.

    ``stored_dtype`` of the weight; None: ``dtype``, in which the activations and the bias are.
    """

    def __init__(
        self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, stored_dtype: torch.dtype | None = None
    ) -> None:
        self._spec, self._dtype = spec, dtype
        self.weight = ops.empty_weight((spec.out_size, spec.num_columns), stored_dtype or dtype, device)
        has_bias = spec.has_bias and spec.adds_bias
        self.bias = torch.empty(spec.out_size, dtype=dtype, device=device) if has_bias else None
        self._zero_padding()

    def _zero_padding(self) -> None:
        for padding in self._spec.padding():
            self.weight[padding] = 0
            if self.bias is not None:
                self.bias[padding] = 0

    def pieces(self) -> Iterator[Piece]:
        for linear_part, weight_rows in self._spec.parts_with_rows():
            yield from self._weight_pieces(linear_part, weight_rows)
        yield from bias_pieces(self._spec, self.bias)

    def _weight_pieces(self, linear_part: LinearPart, weight_rows: slice) -> Iterator[Piece]:
        name, columns, weight = f"{linear_part.prefix}.weight", self._spec.columns, self.weight[weight_rows]
        if self._spec.is_transposed:
            yield Piece(name, (self._spec.in_size, linear_part.out_size), weight.T, slicer(columns, linear_part.rows))
        else:
            yield Piece(name, (linear_part.out_size, self._spec.in_size), weight, slicer(linear_part.rows, columns))

    def bias_of_rows(self) -> Tensor | None:
        return self.bias

    def scale_rows(self, factors: Tensor) -> None:
        self.weight *= factors.to(self.weight.dtype)[:, None]
        if self.bias is not None:
            self.bias *= factors.to(self.bias.dtype)

    def mm(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def mm_float32(self, x: Tensor) -> Tensor:
        out = ops.linear_float32(x, self.weight)
        return out if self.bias is None else out + self.bias.float()

    def embed(self, ids: Tensor, first_id: int) -> Tensor:
        return ops.vocab_embedding(ids, self.weight, first_id).to(self._dtype)

    def add_rms_norm_mm(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)

    def add_rms_norm_gate_up(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm_gate_up(x, residual, norm.weight, norm.eps, self.weight, self.bias)

    def mm_lora(self, x: Tensor, lora: ops.LoraWeights, rows: ops.LoraRows) -> Tensor:
        return ops.lora_linear(x, ops.LoraLinear(self.weight, self.bias, lora, rows))

    def add_rms_norm_mm_lora(
        self, x: Tensor, residual: Tensor, norm: RmsNorm, lora: ops.LoraWeights, rows: ops.LoraRows
    ) -> tuple[Tensor, Tensor]:
        layer = ops.LoraLinear(self.weight, self.bias, lora, rows)
        return ops.add_rms_norm_lora_linear(x, residual, norm.weight, norm.eps, layer)


def bias_pieces(spec: LinearSpec, bias: Tensor | None) -> Iterator[Piece]:
    """``bias`` is None if another rank adds it."""
    for linear_part, weight_rows in spec.parts_with_rows() if spec.has_bias else ():
        into = None if bias is None else bias[weight_rows]
        yield Piece(f"{linear_part.prefix}.bias", (linear_part.out_size,), into, slicer(linear_part.rows))


def slicer(*parts: slice | Tensor) -> Callable[[Tensor], Tensor]:
    """Cut the same part out of any tensor: for each dimension a slice, or the numbers of the rows."""
    return lambda tensor: tensor[parts]
