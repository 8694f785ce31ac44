"""Mamba2: a short convolution, a state space model with a matrix for each head, and a gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.linears import Block, ColumnWeight, RowWeight
from lightserve.common.basemodel.layer_weights.norms import SplitNormWeight
from lightserve.common.basemodel.layer_weights.row_map import in_blocks
from lightserve.common.basemodel.layer_weights.weight import WeightContext
from lightserve.common.basemodel.mixers.mixer import (
    ConvWeight,
    DecayRates,
    HeadValues,
    MixerSpec,
    MixerWeight,
    check_heads,
)
from lightserve.common.kv.layout import StateTensor
from lightserve.common.ops.activation import sigmoid
from lightserve.errors import ModelFilesError

if TYPE_CHECKING:
    from lightserve.common.basemodel.spec import LayerSpec

GATES_FIRST = ops.GatedNorm(gates_first=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Names:
    """The names of its tensors in the checkpoint, without ``.weight`` and ``.bias``."""

    inputs: str = "mamba.in_proj"  # all rows of the gate, then of x, of B, of C and of dt
    conv: str = "mamba.conv1d"
    decay: str = "mamba.A_log"  # the tensor itself
    dt_bias: str = "mamba.dt_bias"  # the tensor itself
    skip: str = "mamba.D"  # the tensor itself
    norm: str = "mamba.norm"
    out: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(MixerSpec):
    """Neighbouring heads share B and C: they are a group."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int
    norm_eps: float
    norms_groups: bool = False  # the norm is over each group, instead of over all heads
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    has_bias: bool = False  # of the linears
    has_conv_bias: bool = True
    names: Mamba2Names = field(default_factory=Mamba2Names)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ModelFilesError(
                f"config.json: {self.num_groups} groups do not divide {self.num_heads} heads of a recurrent layer"
            )

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_parts(self) -> tuple[tuple[int, int], ...]:
        """Heads and their channels: of x, B and C."""
        groups = self.num_groups, self.state_dim
        return (self.num_heads, self.head_dim), groups, groups

    def weight(self, spec: LayerSpec, context: WeightContext) -> Mamba2Weight:
        return Mamba2Weight(self, spec, context)

    def state_tensors(self, tp_size: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and a matrix for each head."""
        heads, groups = self.num_heads // tp_size, max(self.num_groups // tp_size, 1)
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        return (
            StateTensor((self.conv_width - 1, channels), dtype),
            StateTensor((heads, self.head_dim, self.state_dim), torch.float32),
        )

    def check_tp(self, size: int) -> None:
        if self.num_heads % size:
            raise ModelFilesError(
                f"{self.num_heads} heads of recurrent layers do not divide among tp={size} ranks; choose a tp that "
                "divides them"
            )
        check_heads("groups of recurrent layers", self.num_groups, size)
        if self.norms_groups and self.num_groups % size:
            raise ModelFilesError(
                f"{self.num_groups} norms of recurrent layers do not divide among tp={size} ranks; choose a smaller tp"
            )

    def num_weights(self, hidden_size: int) -> int:
        groups = 2 * self.num_groups * self.state_dim
        return hidden_size * (3 * self.width + groups + self.num_heads)


class Mamba2Weight(MixerWeight):
    def __init__(self, mixer: Mamba2Spec, spec: LayerSpec, context: WeightContext) -> None:
        at, names, hidden, heads = spec.prefix, mixer.names, spec.hidden_size, mixer.num_heads
        self.in_proj = ColumnWeight(_inputs(mixer, at), hidden, context, bias=mixer.has_bias)
        self.conv = ConvWeight(
            f"{at}.{names.conv}", mixer.conv_parts, mixer.conv_width, context, bias=mixer.has_conv_bias
        )
        self.decay_rates = DecayRates(f"{at}.{names.decay}", heads, context)
        self.dt_bias = HeadValues(f"{at}.{names.dt_bias}", heads, context)
        self.skip = HeadValues(f"{at}.{names.skip}", heads, context)
        self.norm = SplitNormWeight(f"{at}.{names.norm}", mixer.width, mixer.norm_eps, context)
        self.out_proj = RowWeight(f"{at}.{names.out}", mixer.width, hidden, context, bias=mixer.has_bias)
        self._conv_params = ops.ConvParams(self.conv.tensor, self.conv.bias)
        self._params = ops.MambaParams(self.decay_rates.tensor, self.dt_bias.tensor, self.skip.tensor, mixer.dt_limits)
        self._mixer, self._tp_size = mixer, context.tp.size
        self._width = mixer.width // context.tp.size
        self._num_groups = max(mixer.num_groups // context.tp.size, 1)

    def forward(self, x: Tensor, states: Sequence[Tensor], batch: ops.StateBatch) -> Tensor:
        inputs, matrices = states
        projected = self.in_proj.mm(x)
        sizes = [self._width, self.conv.num_channels, len(self.dt_bias.tensor)]
        gate, conv_inputs, dt = projected.split_with_sizes(sizes, dim=1)
        convolved = ops.causal_conv1d(conv_inputs, self._conv_params, inputs, batch)
        out = ops.mamba_scan(self._scan_inputs(convolved, dt), self._params, matrices, batch)
        return self.out_proj.mm(self._gated_norm(out.flatten(1), gate))

    def _scan_inputs(self, convolved: Tensor, dt: Tensor) -> ops.MambaInputs:
        groups = self._num_groups * self._mixer.state_dim
        x, b, c = convolved.split_with_sizes([self._width, groups, groups], dim=1)
        rows = len(x)
        return ops.MambaInputs(
            x.reshape(rows, -1, self._mixer.head_dim),
            dt,
            b.reshape(rows, self._num_groups, -1),
            c.reshape(rows, self._num_groups, -1),
        )

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """The norm of ``x * silu(gate)``."""
        groups = self._num_groups if self._mixer.norms_groups else 1
        if not self._mixer.norms_groups and self._tp_size > 1:
            wide = gate.float()
            return self.norm.norm(x.float() * wide * sigmoid(wide)).to(x.dtype)
        shape, weight = (len(x), groups, -1), self.norm.tensor.view(groups, -1)
        return ops.gated_rms_norm(
            x.reshape(shape), gate.reshape(shape), weight, self._mixer.norm_eps, GATES_FIRST
        ).flatten(1)


def _inputs(mixer: Mamba2Spec, at: str) -> list[Block]:
    heads = (mixer.num_heads, mixer.head_dim)
    parts = [heads, *mixer.conv_parts, (mixer.num_heads, 1)]
    maps = in_blocks(*(count * dim for count, dim in parts))
    return [Block(f"{at}.{mixer.names.inputs}", *size, rows) for size, rows in zip(parts, maps, strict=True)]
