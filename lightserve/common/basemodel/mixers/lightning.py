"""Lightning attention: linear attention without positions, in which each head decays at a rate that is not learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.linears import Block, ColumnWeight, RowWeight
from lightserve.common.basemodel.layer_weights.norms import SplitNormWeight
from lightserve.common.basemodel.layer_weights.row_map import in_head_parts
from lightserve.common.basemodel.layer_weights.weight import WeightContext
from lightserve.common.basemodel.mixers.mixer import MixerSpec, MixerWeight, check_divides
from lightserve.common.kv.layout import StateTensor

if TYPE_CHECKING:
    from lightserve.common.basemodel.spec import LayerSpec

GATED_NORM = ops.GatedNorm("sigmoid")
STEP_LIMITS = (1.0, 1.0)  # Mamba2's recurrence with steps of size 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningNames:
    """The names of its tensors in the checkpoint, without ``.weight``."""

    qkv: str = "self_attn.qkv_proj"  # for each head its q, its k and its v
    gate: str = "self_attn.output_gate"
    norm: str = "self_attn.norm"
    out: str = "self_attn.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec(MixerSpec):
    """``out(norm(scan(silu(qkv(x)))) * sigmoid(gate(x)))``, with the norm over all heads."""

    num_heads: int
    head_dim: int
    decay_scale: float  # of all heads: layers near the end forget less
    norm_eps: float
    names: LightningNames = field(default_factory=LightningNames)

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def log_decays(self) -> list[float]:
        """Of a token, for each head: ALiBi's slopes."""
        return [-self.decay_scale * 2.0 ** (-8 * (head + 1) / self.num_heads) for head in range(self.num_heads)]

    def weight(self, spec: LayerSpec, context: WeightContext) -> LightningWeight:
        return LightningWeight(self, spec, context)

    def state_tensors(self, tp_size: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """A matrix for each head."""
        return (StateTensor((self.num_heads // tp_size, self.head_dim, self.head_dim), torch.float32, is_sum=True),)

    def check_tp(self, size: int) -> None:
        check_divides("heads of recurrent layers", self.num_heads, size)

    def num_weights(self, hidden_size: int) -> int:
        return 5 * hidden_size * self.width


class LightningWeight(MixerWeight):
    def __init__(self, mixer: LightningSpec, spec: LayerSpec, context: WeightContext) -> None:
        at, names, hidden = spec.prefix, mixer.names, spec.hidden_size
        heads, dim = mixer.num_heads, mixer.head_dim
        qkv = [Block(f"{at}.{names.qkv}", heads, dim, rows) for rows in in_head_parts(heads, dim, dim, dim)]
        self.in_proj = ColumnWeight([*qkv, Block(f"{at}.{names.gate}", heads, dim)], hidden, context)
        self.norm = SplitNormWeight(f"{at}.{names.norm}", mixer.width, mixer.norm_eps, context)
        self.out_proj = RowWeight(f"{at}.{names.out}", mixer.width, hidden, context)
        log_decays = torch.tensor(mixer.log_decays)[context.tp.part_of(heads)].to(context.device)
        self._zeros = torch.zeros_like(log_decays)
        self._params = ops.MambaParams(log_decays, self._zeros, self._zeros, STEP_LIMITS)
        self._head_dim, self._norm_eps, self._tp_size = dim, mixer.norm_eps, context.tp.size

    def forward(self, x: Tensor, states: Sequence[Tensor], batch: ops.StateBatch) -> Tensor:
        (matrices,) = states
        projected = self.in_proj.mm(x)
        width = projected.shape[1] // 4
        qkv, gate = projected.split_with_sizes([3 * width, width], dim=1)
        q, k, v = (rows.view(len(x), -1, self._head_dim) for rows in ops.silu(qkv).tensor_split(3, dim=1))
        inputs = ops.MambaInputs(v, self._zeros.expand(len(x), -1), k, q)
        out = batch.run(ops.mamba_scan, inputs, self._params, matrices)
        return self.out_proj.mm(self._gated(out.flatten(1), gate))

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        if self._tp_size > 1:
            return (self.norm.norm(x.float()) * ops.gate(gate.float())).to(x.dtype)
        x, gate = x[:, None], gate[:, None]
        return ops.gated_rms_norm(x, gate, self.norm.tensor, self._norm_eps, GATED_NORM).flatten(1)
