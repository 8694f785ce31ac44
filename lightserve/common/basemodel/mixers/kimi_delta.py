"""Kimi Delta Attention: Gated DeltaNet in which each channel of the keys decays at a rate of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.linears import (
    Block,
    ColumnWeight,
    GateColumnWeight,
    ReplicatedWeight,
    RowWeight,
)
from lightserve.common.basemodel.layer_weights.norms import RmsNormWeight
from lightserve.common.basemodel.layer_weights.weight import WeightContext
from lightserve.common.basemodel.mixers.mixer import (
    DecayRates,
    HeadValues,
    JoinedConvWeight,
    MixerSpec,
    MixerWeight,
    check_divides,
)
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.kv.layout import StateTensor

if TYPE_CHECKING:
    from lightserve.common.basemodel.spec import LayerSpec

GATED_NORM = ops.GatedNorm("sigmoid")


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaNames:
    """The names of its tensors in the checkpoint, without ``.weight``."""

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    convs: tuple[str, ...] = ("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d")
    b: str = "self_attn.b_proj"  # how much of the error is corrected
    forget: tuple[str, ...] = ("self_attn.f_a_proj", "self_attn.f_b_proj")  # step sizes, by two narrow linears or one
    decay: str = "self_attn.A_log"  # the tensor itself
    dt_bias: str = "self_attn.dt_bias"  # the tensor itself
    gate: tuple[str, ...] = ("self_attn.g_a_proj", "self_attn.g_b_proj")  # the gate of the norm, by as many
    norm: str = "self_attn.o_norm"
    out: str = "self_attn.o_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec(MixerSpec):
    num_heads: int
    head_dim: int  # of keys and of values
    conv_width: int
    min_log_decay: float | None = None  # log decays are this number times a sigmoid; None: rates times a softplus
    has_flat_rates: bool = False  # A_log is stored [heads], not [1, 1, heads, 1]
    names: KimiDeltaNames = field(default_factory=KimiDeltaNames)

    @property
    def has_narrow_linears(self) -> bool:
        return len(self.names.forget) == 2

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def weight(self, spec: LayerSpec, context: WeightContext) -> KimiDeltaWeight:
        return KimiDeltaWeight(self, spec, context)

    def state_tensors(self, tp_size: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The last inputs of the convolutions, and a matrix for each head."""
        heads = self.num_heads // tp_size
        return (
            StateTensor((self.conv_width - 1, 3 * heads * self.head_dim), dtype),
            StateTensor((heads, self.head_dim, self.head_dim), torch.float32, is_sum=True),
        )

    def check_tp(self, size: int) -> None:
        check_divides("heads of recurrent layers", self.num_heads, size)

    def num_weights(self, hidden_size: int) -> int:
        narrow = 2 * self.head_dim * (hidden_size + self.width)
        gates = narrow if self.has_narrow_linears else 2 * hidden_size * self.width
        return hidden_size * (4 * self.width + self.num_heads) + gates


class KimiDeltaWeight(MixerWeight):
    def __init__(self, mixer: KimiDeltaSpec, spec: LayerSpec, context: WeightContext) -> None:
        at, names, hidden = spec.prefix, mixer.names, spec.hidden_size
        heads, dim = mixer.num_heads, mixer.head_dim
        qkv = [Block(f"{at}.{name}", heads, dim) for name in (names.q, names.k, names.v)]
        self.qkv_proj = ColumnWeight(qkv, hidden, context)
        is_narrow = mixer.has_narrow_linears
        first = [Block(f"{at}.{name}", 1, dim) for name in (names.forget[0], names.gate[0])]
        self.first_proj = ReplicatedWeight(first, hidden, context) if is_narrow else None
        width = dim if is_narrow else hidden
        self.forget_proj = GateColumnWeight([Block(f"{at}.{names.forget[-1]}", heads, dim)], width, context)
        self.gate_proj = GateColumnWeight([Block(f"{at}.{names.gate[-1]}", heads, dim)], width, context)
        self.b_proj = GateColumnWeight([Block(f"{at}.{names.b}", heads)], hidden, context)
        convs = [f"{at}.{name}" for name in names.convs]
        self.conv = JoinedConvWeight(convs, [(heads, dim)] * 3, mixer.conv_width, context)
        rates_class = DecayRates if mixer.has_flat_rates else KimiDecayRates
        self.decay_rates = rates_class(f"{at}.{names.decay}", heads, context)
        self.dt_bias = HeadValues(f"{at}.{names.dt_bias}", mixer.width, context)
        self.norm = RmsNormWeight(f"{at}.{names.norm}", dim, spec.norm_eps, context)
        self.out_proj = RowWeight(f"{at}.{names.out}", mixer.width, hidden, context)
        self._head_dim, self._min_log_decay = dim, mixer.min_log_decay
        self._conv_params = ops.ConvParams(self.conv.tensor)

    def forward(self, x: Tensor, states: Sequence[Tensor], batch: ops.StateBatch) -> Tensor:
        inputs, matrices = states
        forget, gate = self._gate_inputs(x)
        qkv = batch.run(ops.causal_conv1d, self.qkv_proj.mm(x), self._conv_params, inputs)
        q, k, v = map(self._in_heads, qkv.tensor_split(3, dim=1))
        a, rates, bias = self.forget_proj.mm(forget), self.decay_rates.tensor, self.dt_bias.tensor
        log_decay, beta = ops.delta_gates(a, self.b_proj.mm(x), rates, bias, self._min_log_decay)
        inputs_of_delta = ops.DeltaInputs(q, k, v, self._in_heads(log_decay), beta)
        out = batch.run(ops.gated_delta_rule, inputs_of_delta, matrices)
        gates = self._in_heads(self.gate_proj.mm(gate))
        normed = ops.gated_rms_norm(out, gates, self.norm.tensor, self.norm.eps, GATED_NORM)
        return self.out_proj.mm(normed.flatten(1))

    def _gate_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the last linears of the step sizes and of the gate of the norm read."""
        if self.first_proj is None:
            return x, x
        forget, gate = self.first_proj.mm(x).tensor_split(2, dim=1)
        return forget.contiguous(), gate.contiguous()

    def _in_heads(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, self._head_dim)


class KimiDecayRates(DecayRates):
    """Stored ``[1, 1, heads, 1]``."""

    def pieces(self) -> Iterator[Piece]:
        shape = (1, 1, self._num_heads, 1)
        yield Piece(self._name, shape, self.tensor, lambda values: values.flatten()[self._own])
