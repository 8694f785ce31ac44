"""Gated DeltaNet: a short convolution over queries, keys and values, the gated delta rule, and a norm with a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.linears import Block, ColumnWeight, GateColumnWeight, RowWeight
from lightserve.common.basemodel.layer_weights.norms import RmsNormWeight
from lightserve.common.basemodel.layer_weights.row_map import in_blocks, in_head_parts
from lightserve.common.basemodel.layer_weights.weight import WeightContext
from lightserve.common.basemodel.mixers.mixer import (
    ConvWeight,
    DecayRates,
    HeadValues,
    JoinedConvWeight,
    MixerSpec,
    MixerWeight,
    check_divides,
    check_heads,
)
from lightserve.common.kv.layout import StateTensor
from lightserve.errors import ModelFilesError

if TYPE_CHECKING:
    from lightserve.common.basemodel.spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNames:
    """The names of its tensors in the checkpoint, without ``.weight``."""

    qkv: str = "linear_attn.in_proj_qkv"  # all rows of q, then of k, then of v
    parts: tuple[str, str, str] | None = None  # three linears instead of that: q, k and v
    z: str = "linear_attn.in_proj_z"  # the gate of the norm
    qkvz: str | None = None  # one linear instead of two: for each key head its q, its k, its values and their gates
    b: str = "linear_attn.in_proj_b"  # how much of the error is corrected
    a: str = "linear_attn.in_proj_a"  # the step sizes
    ba: str | None = None  # one linear instead of two: for each key head its b and its a
    conv: str = "linear_attn.conv1d"
    convs: tuple[str, str, str] | None = None  # three tensors instead of one: of q, k and v
    decay: str = "linear_attn.A_log"  # the tensor itself
    dt_bias: str = "linear_attn.dt_bias"  # the tensor itself
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(MixerSpec):
    """Neighbouring value heads share a query and a key."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float | None = None  # None: that of the layer
    beta_scale: float = 1.0  # of how much of the error is corrected: up to so much
    names: GatedDeltaNames = field(default_factory=GatedDeltaNames)

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ModelFilesError(
                f"config.json: {self.num_key_heads} key heads do not divide {self.num_value_heads} value heads of a "
                "recurrent layer"
            )

    @property
    def conv_parts(self) -> tuple[tuple[int, int], ...]:
        """Heads and their channels: of queries, keys and values."""
        keys, values = (self.num_key_heads, self.key_dim), (self.num_value_heads, self.value_dim)
        return keys, keys, values

    def weight(self, spec: LayerSpec, context: WeightContext) -> GatedDeltaWeight:
        return GatedDeltaWeight(self, spec, context)

    def state_tensors(self, tp_size: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and a matrix for each value head."""
        keys, values = max(self.num_key_heads // tp_size, 1), self.num_value_heads // tp_size
        channels = 2 * keys * self.key_dim + values * self.value_dim
        return (
            StateTensor((self.conv_width - 1, channels), dtype),
            StateTensor((values, self.value_dim, self.key_dim), torch.float32, is_sum=True),
        )

    def check_tp(self, size: int) -> None:
        check_divides("value heads of recurrent layers", self.num_value_heads, size)
        check_heads("key heads of recurrent layers", self.num_key_heads, size)

    def num_weights(self, hidden_size: int) -> int:
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return hidden_size * (2 * keys + 3 * values + 2 * self.num_value_heads)


class GatedDeltaWeight(MixerWeight):
    def __init__(self, mixer: GatedDeltaSpec, spec: LayerSpec, context: WeightContext) -> None:
        at, names, hidden = spec.prefix, mixer.names, spec.hidden_size
        # one product, unless what is quantised while loading are the wide linears alone
        is_joined = spec.config.quantization is None
        self.in_proj = ColumnWeight(_qkvz(mixer, at) + (_ba(mixer, at) if is_joined else []), hidden, context)
        self.ba_proj = None if is_joined else GateColumnWeight(_ba(mixer, at), hidden, context)
        self.conv = _conv(mixer, at, context)
        self.decay_rates = DecayRates(f"{at}.{names.decay}", mixer.num_value_heads, context)
        self.dt_bias = HeadValues(f"{at}.{names.dt_bias}", mixer.num_value_heads, context)
        self.norm = RmsNormWeight(f"{at}.{names.norm}", mixer.value_dim, mixer.norm_eps or spec.norm_eps, context)
        width = mixer.num_value_heads * mixer.value_dim
        self.out_proj = RowWeight(f"{at}.{names.out}", width, hidden, context)
        self._mixer = mixer
        self._num_heads = len(self.dt_bias.tensor)  # of this rank
        self._conv_params = ops.ConvParams(self.conv.tensor)

    def forward(self, x: Tensor, states: Sequence[Tensor], batch: ops.StateBatch) -> Tensor:
        inputs, matrices = states
        qkvz, ba = self._projected(x)
        qkv, z = self._parts(qkvz, self._num_heads * self._mixer.value_dim)
        b, a = self._parts(ba, self._num_heads)
        qkv = batch.run(ops.causal_conv1d, qkv, self._conv_params, inputs)
        out = batch.run(ops.gated_delta_rule, self._delta_inputs(qkv, b, a), matrices)
        normed = ops.gated_rms_norm(out, z.view(out.shape), self.norm.tensor, self.norm.eps, ops.GatedNorm())
        return self.out_proj.mm(normed.flatten(1))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.ba_proj is not None:
            return self.in_proj.mm(x), self.ba_proj.mm(x)
        return self._parts(self.in_proj.mm(x), 2 * self._num_heads)

    def _delta_inputs(self, qkv: Tensor, b: Tensor, a: Tensor) -> ops.DeltaInputs:
        keys, v = self._parts(qkv, self._num_heads * self._mixer.value_dim)
        q, k = self._parts(keys, keys.shape[1] // 2)
        log_decay, beta = ops.delta_gates(a, b, self.decay_rates.tensor, self.dt_bias.tensor)
        return ops.DeltaInputs(
            q.reshape(len(q), -1, self._mixer.key_dim),
            k.reshape(len(k), -1, self._mixer.key_dim),
            v.reshape(len(v), -1, self._mixer.value_dim),
            log_decay,
            beta=beta if self._mixer.beta_scale == 1.0 else beta * self._mixer.beta_scale,
        )

    @staticmethod
    def _parts(x: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """The first columns, and the ``last`` ones."""
        first, second = x.split_with_sizes([x.shape[1] - last, last], dim=1)
        return first, second


def _conv(mixer: GatedDeltaSpec, at: str, context: WeightContext) -> ConvWeight | JoinedConvWeight:
    names, width = mixer.names, mixer.conv_width
    if names.convs is None:
        return ConvWeight(f"{at}.{names.conv}", mixer.conv_parts, width, context)
    return JoinedConvWeight([f"{at}.{name}" for name in names.convs], mixer.conv_parts, width, context)


def _qkvz(mixer: GatedDeltaSpec, at: str) -> list[Block]:
    """Queries, keys, values, and the gates of the norm."""
    names, heads = mixer.names, mixer.num_key_heads
    sizes = [count * dim for count, dim in mixer.conv_parts]
    parts = [*mixer.conv_parts, mixer.conv_parts[-1]]
    if names.parts is not None:
        blocks = [Block(f"{at}.{name}", *size) for name, size in zip(names.parts, mixer.conv_parts, strict=True)]
        return [*blocks, Block(f"{at}.{names.z}", *parts[-1])]
    if names.qkvz is None:
        maps = in_blocks(*sizes)
        blocks = [Block(f"{at}.{names.qkv}", *size, rows) for size, rows in zip(mixer.conv_parts, maps, strict=True)]
        return [*blocks, Block(f"{at}.{names.z}", *parts[-1])]
    maps = in_head_parts(heads, *(size // heads for size in [*sizes, sizes[-1]]))
    return [Block(f"{at}.{names.qkvz}", *size, rows) for size, rows in zip(parts, maps, strict=True)]


def _ba(mixer: GatedDeltaSpec, at: str) -> list[Block]:
    names, count = mixer.names, mixer.num_value_heads
    if names.ba is None:
        return [Block(f"{at}.{name}", count) for name in (names.b, names.a)]
    per_key_head = count // mixer.num_key_heads
    maps = in_head_parts(mixer.num_key_heads, per_key_head, per_key_head)
    return [Block(f"{at}.{names.ba}", count, row_map=rows) for rows in maps]
