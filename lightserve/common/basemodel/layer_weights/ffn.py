"""The weights of feed-forwards, and how each kind computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.basemodel.expert_rows import ExpertRows
from lightserve.common.basemodel.layer_weights.linears import Block, ColumnWeight, RowWeight
from lightserve.common.basemodel.layer_weights.norms import NormWeight, SplitNormWeight
from lightserve.common.basemodel.layer_weights.row_map import in_blocks
from lightserve.common.basemodel.layer_weights.weight import Weight, WeightContext, WeightGroup
from lightserve.common.basemodel.spec import LayerSpec
from lightserve.common.checkpoint.piece import Piece
from lightserve.errors import ModelFilesError

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": ops.gelu_tanh,
    "relu": ops.relu,
    "relu2": ops.relu2,
}
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
    "relu2": ops.relu2_and_mul,
}


class FfnWeight(WeightGroup):
    """A feed-forward: hidden states to what it adds to them, complete on every rank."""

    has_experts: ClassVar[bool] = False  # whether ``forward`` reads ``rows``

    @abstractmethod
    def forward(self, x: Tensor, rows: ExpertRows | None) -> Tensor:
        """``rows``: what experts need to know of the step; None: ``x`` has all rows and no padding."""

    def add_norm_forward(
        self, x: Tensor, residual: Tensor, norm: NormWeight, rows: ExpertRows | None
    ) -> tuple[Tensor, Tensor]:
        """``forward`` of ``norm.add_norm``, and the new residual; ``residual`` is not valid afterwards."""
        return self.forward(norm.add_norm(x, residual), rows), residual


class DenseFfnWeight(FfnWeight):
    """Every token uses all of it."""

    def _init_down(self, spec: LayerSpec, context: WeightContext) -> None:
        self.down_norm = _down_norm(spec, context)
        self.down_proj = RowWeight(
            f"{spec.prefix}.{spec.names.down}",
            spec.intermediate_size,
            spec.hidden_size,
            context,
            bias=spec.ffn_bias,
            is_transposed=spec.is_transposed,
        )

    def _input_of_down(self, activated: Tensor) -> Tensor:
        return activated if self.down_norm is None else self.down_norm.norm(activated)

    def _down(self, activated: Tensor) -> Tensor:
        return self.down_proj.mm(self._input_of_down(activated))

    @abstractmethod
    def _activated(self, x: Tensor) -> Tensor:
        """What is between the linears."""

    def partial_forward(self, x: Tensor) -> Tensor:
        """This rank's part of ``forward``, for a caller that sums over the ranks."""
        return self.down_proj.partial_mm(self._input_of_down(self._activated(x)))


class GatedFfnWeight(DenseFfnWeight):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, spec: LayerSpec, context: WeightContext) -> None:
        self._activation = _activation(spec, GATED)
        self._is_silu = spec.activation == "silu" and spec.ffn_limit is None
        if spec.ffn_limit is not None:
            self._activation = partial(_limited_silu, limit=spec.ffn_limit)
        self.gate_up_proj = ColumnWeight(
            _gate_up(spec), spec.hidden_size, context, bias=spec.ffn_bias, is_transposed=spec.is_transposed
        )
        self._init_down(spec, context)

    def forward(self, x: Tensor, rows: ExpertRows | None) -> Tensor:
        if self._fuses_down:
            return self.down_proj.silu_and_mul_mm(self.gate_up_proj.mm(x))
        return self._down(self._activated(x))

    @property
    def _fuses_down(self) -> bool:
        return self._is_silu and self.down_norm is None and self.down_proj.method.fuses_silu_and_mul

    def _activated(self, x: Tensor) -> Tensor:
        return self._activation(self.gate_up_proj.mm(x))

    def add_norm_forward(
        self, x: Tensor, residual: Tensor, norm: NormWeight, rows: ExpertRows | None
    ) -> tuple[Tensor, Tensor]:
        if self._fuses_down:
            gate_up, residual = self.gate_up_proj.add_norm_mm(x, residual, norm)
            return self.down_proj.silu_and_mul_mm(gate_up), residual
        if self._is_silu:
            gated, residual = self.gate_up_proj.add_norm_gate_up(x, residual, norm)
        else:
            gate_up, residual = self.gate_up_proj.add_norm_mm(x, residual, norm)
            gated = self._activation(gate_up)
        return self._down(gated), residual


class PlainFfnWeight(DenseFfnWeight):
    """``down(activation(up(x)))``."""

    def __init__(self, spec: LayerSpec, context: WeightContext) -> None:
        has_numbers = spec.activation == "xielu"
        self.xielu = XieluWeight(f"{spec.prefix}.{spec.names.activation}", context) if has_numbers else None
        self._activation = self.xielu.activate if self.xielu else _activation(spec, PLAIN)
        up = Block(f"{spec.prefix}.{spec.names.up}", spec.intermediate_size)
        self.up_proj = ColumnWeight(
            [up], spec.hidden_size, context, bias=spec.ffn_bias, is_transposed=spec.is_transposed
        )
        self._init_down(spec, context)

    def forward(self, x: Tensor, rows: ExpertRows | None) -> Tensor:
        return self._down(self._activated(x))

    def _activated(self, x: Tensor) -> Tensor:
        return self._activation(self.up_proj.mm(x))


class XieluWeight(Weight):
    """The learned numbers of xIELU, in float32 on every rank."""

    def __init__(self, prefix: str, context: WeightContext) -> None:
        self._prefix = prefix
        self._stored = torch.empty(4, dtype=torch.float32, device=context.device)
        self.tensor = torch.empty_like(self._stored)  # as ops.xielu reads them

    def pieces(self) -> Iterator[Piece]:
        for i, name in enumerate(("alpha_p", "alpha_n")):
            yield Piece(f"{self._prefix}.{name}", (1,), self._stored[i : i + 1])
        for i, name in enumerate(("beta", "eps"), start=2):
            yield Piece(f"{self._prefix}.{name}", (), self._stored[i])

    def process_weights_after_loading(self) -> None:
        """Factors are stored as the inverse of softplus; that of the exponential without beta."""
        positive, negative, beta, eps = self._stored.unbind()
        self.tensor.copy_(torch.stack([F.softplus(positive), beta + F.softplus(negative), beta, eps]))

    def activate(self, x: Tensor) -> Tensor:
        return ops.xielu(x, self.tensor)


def dense_ffn_weight(spec: LayerSpec, context: WeightContext) -> DenseFfnWeight:
    return GatedFfnWeight(spec, context) if spec.is_gated else PlainFfnWeight(spec, context)


def _down_norm(spec: LayerSpec, context: WeightContext) -> SplitNormWeight | None:
    name = spec.names.down_norm
    return SplitNormWeight(f"{spec.prefix}.{name}", spec.intermediate_size, spec.norm_eps, context) if name else None


def _gate_up(spec: LayerSpec) -> list[Block]:
    names, size = spec.names, spec.intermediate_size
    if names.gate_up is None:
        return [Block(f"{spec.prefix}.{name}", size) for name in (names.gate, names.up)]
    return [Block(f"{spec.prefix}.{names.gate_up}", size, row_map=rows) for rows in in_blocks(size, size)]


def _limited_silu(gate_up: Tensor, limit: float) -> Tensor:
    """Of few layers of few models, so it is no op of its own."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ops.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _activation(spec: LayerSpec, known: dict[str, Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    if spec.activation not in known:
        kind = "a gated" if spec.is_gated else "a plain"
        raise ModelFilesError(
            f"config.json: {kind} feed-forward with {spec.activation} is not supported; supported: {', '.join(known)}"
        )
    return known[spec.activation]
