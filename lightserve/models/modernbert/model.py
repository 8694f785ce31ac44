"""ModernBERT: an encoder with rotary positions, a gated feed-forward, and windows in two of three layers."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.bert.model import EncoderTpPartModel

LAYER_NAMES = bm.LayerNames(
    layers="layers",
    att_norm="attn_norm",
    qkv="attn.Wqkv",
    o="attn.Wo",
    ffn_norm="mlp_norm",
    gate_up="mlp.Wi",
    down="mlp.Wo",
)
MODEL_NAMES = bm.ModelNames(
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    final_norm="final_norm",
    optional_prefix="model.",
)
TRAINING = ("head.", "decoder.")  # of the masked language model


class ModernBertTpPartModel(EncoderTpPartModel):
    training_tensors = (*EncoderTpPartModel.training_tensors, *TRAINING)

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        has_bias = config.flag("attention_bias")
        window = config.window_of(layer_num)
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES if layer_num else replace(LAYER_NAMES, att_norm=None),
            norm=self._norm,
            rope=bm.RopeConfig.from_hf(config.hf, config.layer_type(layer_num)),
            window=None if window is None else window // 2 + 1,
            qkv_bias=has_bias,
            o_bias=has_bias,
            ffn_bias=config.flag("mlp_bias"),
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES, norm=self._norm)

    @property
    def _norm(self) -> bm.Norm:
        return bm.Norm.LAYER if self.config.flag("norm_bias") else bm.Norm.LAYER_NO_BIAS
