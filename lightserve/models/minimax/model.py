"""MiniMax-Text-01 and M1: lightning attention in seven of eight layers, Mixtral's attention and experts.

The hidden states that pass by a half of a layer are those behind the norm before it, times a factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from lightserve.common import basemodel as bm
from lightserve.models.mixtral.model import MixtralTpPartModel

NORM_EPS = 1e-6  # of lightning attention
DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # follow from the number of the layer


class MiniMaxLayerInfer(bm.DecoderLayerInferTpl[bm.DecoderLayerWeight]):
    def __init__(self, spec: bm.LayerSpec, tp: bm.RankGroup) -> None:
        super().__init__(spec, tp)
        kind = "full" if spec.mixer is None else "linear"
        self._att_factor = spec.config.number(f"{kind}_attn_alpha_factor", 1.0)
        self._ffn_factor = spec.config.number("mlp_alpha_factor", 1.0)

    def _att_norm(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: bm.DecoderLayerWeight) -> Tensor:
        x = super()._att_norm(input, infer_state, layer_weight)
        infer_state.residual = x * self._att_factor
        return x

    def _ffn_norm(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: bm.DecoderLayerWeight) -> Tensor:
        x = super()._ffn_norm(input, infer_state, layer_weight)
        infer_state.residual = x * self._ffn_factor
        return x


class MiniMaxTpPartModel(MixtralTpPartModel):
    transformer_layer_infer_class = MiniMaxLayerInfer

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec, config = super().layer_spec(layer_num), self.config
        rotary_dim = config.count("rotary_dim", default=spec.rotary_dim)
        rope = replace(config.rope, partial_rotary_factor=rotary_dim / config.head_dim)
        mixer = self._mixer(layer_num) if config.is_recurrent(layer_num) else None
        return replace(spec, rope=rope, window=spec.window if mixer is None else None, mixer=mixer)

    def _mixer(self, layer_num: int) -> bm.LightningSpec:
        return bm.LightningSpec(
            num_heads=self.config.count("num_attention_heads"),
            head_dim=self.config.head_dim,
            decay_scale=1 - layer_num / (self.config.num_layers - 1 + 1e-5) + 1e-5,
            norm_eps=NORM_EPS,
        )

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        return (tensor for tensor in super().adapt_checkpoint(checkpoint) if not tensor.name.endswith(DECAYS))

    def _verify_params(self) -> None:
        self.config.check_value("hidden_act", "silu", "swish")  # of lightning attention too
        self.config.check_value("postnorm", True)
        self.config.check_value("shared_intermediate_size", 0)
        for name in ("full_attn_beta_factor", "linear_attn_beta_factor", "mlp_beta_factor"):
            self.config.check_value(name, 1)
