"""The mixer of LFM2: a short convolution between two gates. A request stores its last inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.linears import Block, ColumnWeight, RowWeight
from lightserve.common.basemodel.layer_weights.row_map import in_blocks
from lightserve.common.basemodel.layer_weights.weight import WeightContext
from lightserve.common.basemodel.mixers.mixer import ConvWeight, MixerSpec, MixerWeight, check_divides
from lightserve.common.kv.layout import StateTensor

if TYPE_CHECKING:
    from lightserve.common.basemodel.spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvNames:
    """The names of its tensors in the checkpoint, without ``.weight`` and ``.bias``."""

    gates: str = "conv.in_proj"  # all rows of the gate before, then of the gate behind, then of the input
    conv: str = "conv.conv"
    out: str = "conv.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(MixerSpec):
    """``out(gate_behind(x) * conv(gate_before(x) * input(x)))``."""

    num_channels: int
    conv_width: int
    has_bias: bool = False
    names: ShortConvNames = field(default_factory=ShortConvNames)

    def weight(self, spec: LayerSpec, context: WeightContext) -> ShortConvWeight:
        return ShortConvWeight(self, spec, context)

    def state_tensors(self, tp_size: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution."""
        return (StateTensor((self.conv_width - 1, self.num_channels // tp_size), dtype),)

    def check_tp(self, size: int) -> None:
        check_divides("channels of recurrent layers", self.num_channels, size)

    def num_weights(self, hidden_size: int) -> int:
        return 4 * hidden_size * self.num_channels


class ShortConvWeight(MixerWeight):
    def __init__(self, mixer: ShortConvSpec, spec: LayerSpec, context: WeightContext) -> None:
        at, names, channels, bias = spec.prefix, mixer.names, mixer.num_channels, mixer.has_bias
        blocks = [Block(f"{at}.{names.gates}", channels, row_map=rows) for rows in in_blocks(*[channels] * 3)]
        self.in_proj = ColumnWeight(blocks, spec.hidden_size, context, bias=bias)
        self.conv = ConvWeight(f"{at}.{names.conv}", [(channels, 1)], mixer.conv_width, context, bias=bias)
        self.out_proj = RowWeight(f"{at}.{names.out}", channels, spec.hidden_size, context, bias=bias)
        self._conv_params = ops.ConvParams(self.conv.tensor, self.conv.bias, has_silu=False)

    def forward(self, x: Tensor, states: Sequence[Tensor], batch: ops.StateBatch) -> Tensor:
        before, behind, inputs = self.in_proj.mm(x).tensor_split(3, dim=1)
        mixed = batch.run(ops.causal_conv1d, before * inputs, self._conv_params, states[0])
        return self.out_proj.mm(behind * mixed)
