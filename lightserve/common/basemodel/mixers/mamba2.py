"""Mamba2: a short convolution, a state space model with a matrix for each head, and a gate, mostly with a norm."""

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
    check_divides,
    check_heads,
)
from lightserve.common.kv.layout import StateTensor
from lightserve.common.ops.activation import sigmoid
from lightserve.errors import ModelFilesError

if TYPE_CHECKING:
    from lightserve.common.basemodel.spec import LayerSpec


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
    has_norm: bool = True  # False: a gate only
    norms_groups: bool = False  # the norm is over each group, instead of over all heads
    gates_first: bool = True  # the norm is of what the gate lets through
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    has_bias: bool = False  # of the first linear
    has_out_bias: bool = False
    has_conv_bias: bool = True
    input_scale: float = 1.0
    part_scales: tuple[float, ...] = ()  # of the gate, x, B, C and dt behind the first linear
    out_scale: float = 1.0
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
            StateTensor((heads, self.head_dim, self.state_dim), torch.float32, is_sum=True),
        )

    def check_tp(self, size: int) -> None:
        check_divides("heads of recurrent layers", self.num_heads, size)
        check_heads("groups of recurrent layers", self.num_groups, size)
        if self.has_norm and self.norms_groups and self.num_groups % size:
            raise ModelFilesError(
                f"{self.num_groups} norms of recurrent layers do not divide among tp={size} ranks; choose a smaller tp"
            )

    @property
    def input_parts(self) -> tuple[tuple[int, int], ...]:
        """Heads and their rows of the first linear: of the gate, x, B, C and dt."""
        return (self.num_heads, self.head_dim), *self.conv_parts, (self.num_heads, 1)

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
        norm = (f"{at}.{names.norm}", mixer.width, mixer.norm_eps, context)
        self.norm = SplitNormWeight(*norm) if mixer.has_norm else None
        self.out_proj = RowWeight(f"{at}.{names.out}", mixer.width, hidden, context, bias=mixer.has_out_bias)
        self._conv_params = ops.ConvParams(self.conv.tensor, self.conv.bias)
        self._params = ops.MambaParams(self.decay_rates.tensor, self.dt_bias.tensor, self.skip.tensor, mixer.dt_limits)
        self._scales = _scales(mixer, context) if mixer.part_scales else None
        self._mixer, self._tp_size = mixer, context.tp.size
        self._width = mixer.width // context.tp.size
        self._num_groups = max(mixer.num_groups // context.tp.size, 1)

    def forward(self, x: Tensor, states: Sequence[Tensor], batch: ops.StateBatch) -> Tensor:
        inputs, matrices = states
        projected = self._project(x)
        sizes = [self._width, self.conv.num_channels, len(self.dt_bias.tensor)]
        gate, conv_inputs, dt = projected.split_with_sizes(sizes, dim=1)
        convolved = batch.run(ops.causal_conv1d, conv_inputs, self._conv_params, inputs)
        out = batch.run(ops.mamba_scan, self._scan_inputs(convolved, dt), self._params, matrices)
        out = self.out_proj.mm(self._gated(out.flatten(1), gate))
        return out if self._mixer.out_scale == 1.0 else out * self._mixer.out_scale

    def _project(self, x: Tensor) -> Tensor:
        projected = self.in_proj.mm(x if self._mixer.input_scale == 1.0 else x * self._mixer.input_scale)
        return projected if self._scales is None else projected.mul_(self._scales)

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

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        mixer, norm = self._mixer, self.norm
        if norm is None or (not mixer.norms_groups and self._tp_size > 1):
            wide, factor = x.float(), gate.float() * sigmoid(gate.float())
            if norm is None:
                return (wide * factor).to(x.dtype)
            out = norm.norm(wide * factor) if mixer.gates_first else norm.norm(wide) * factor
            return out.to(x.dtype)
        groups = self._num_groups if mixer.norms_groups else 1
        shape, weight = (len(x), groups, -1), norm.tensor.view(groups, -1)
        order = ops.GatedNorm(gates_first=mixer.gates_first)
        return ops.gated_rms_norm(x.reshape(shape), gate.reshape(shape), weight, mixer.norm_eps, order).flatten(1)


def _scales(mixer: Mamba2Spec, context: WeightContext) -> Tensor:
    """The factor of each output of the first linear on this rank, in float32."""
    scales = []
    for (num_heads, dim), scale in zip(mixer.input_parts, mixer.part_scales, strict=True):
        heads = context.tp.part_of(num_heads)
        scales.append(torch.full(((heads.stop - heads.start) * dim,), scale))
    return torch.cat(scales).to(context.device)


def _inputs(mixer: Mamba2Spec, at: str) -> list[Block]:
    parts = mixer.input_parts
    maps = in_blocks(*(count * dim for count, dim in parts))
    return [Block(f"{at}.{mixer.names.inputs}", *size, rows) for size, rows in zip(parts, maps, strict=True)]
