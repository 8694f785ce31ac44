"""Weights in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.quantization.linear_method import LinearMethod, LinearSpec, RmsNorm


class UnquantizedLinear(LinearMethod):
    """One weight ``[out, in]`` and perhaps a bias ``[out]``; pieces ``PREFIX.weight`` and ``PREFIX.bias``."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self.weight = torch.empty(spec.out_size, spec.num_columns, dtype=dtype, device=device)
        has_bias = spec.has_bias and spec.adds_bias
        self.bias = torch.empty(spec.out_size, dtype=dtype, device=device) if has_bias else None
        self._zero_padding()

    def _zero_padding(self) -> None:
        end = 0
        for part in self._spec.parts:
            end += part.num_rows
            self.weight[end - part.padding : end] = 0
            if self.bias is not None:
                self.bias[end - part.padding : end] = 0

    def pieces(self) -> Iterator[Piece]:
        begin, columns = 0, self._spec.columns
        for part in self._spec.parts:
            end = begin + part.num_rows - part.padding
            own = self.weight[begin:end]
            if self._spec.is_transposed:
                shape = (self._spec.in_size, part.out_size)
                yield Piece(f"{part.prefix}.weight", shape, own.T, slicer(columns, part.rows))
            else:
                shape = (part.out_size, self._spec.in_size)
                yield Piece(f"{part.prefix}.weight", shape, own, slicer(part.rows, columns))
            if self._spec.has_bias:
                bias = None if self.bias is None else self.bias[begin:end]
                yield Piece(f"{part.prefix}.bias", (part.out_size,), bias, slicer(part.rows))
            begin = end + part.padding

    def mm(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def mm_float32(self, x: Tensor) -> Tensor:
        out = ops.linear_float32(x, self.weight)
        return out if self.bias is None else out + self.bias.float()

    def embed(self, ids: Tensor, first_id: int) -> Tensor:
        return ops.vocab_embedding(ids, self.weight, first_id)

    def add_rms_norm_mm(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)

    def add_rms_norm_gate_up(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm_gate_up(x, residual, norm.weight, norm.eps, self.weight, self.bias)


def slicer(*parts: slice | Tensor) -> Callable[[Tensor], Tensor]:
    """Cut the same part out of any tensor: for each dimension a slice, or the numbers of the rows."""
    return lambda tensor: tensor[parts]
