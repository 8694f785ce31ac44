"""Nomic BERT: BERT with rotary positions, a gated feed-forward and no biases."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.bert.model import EncoderTpPartModel

LAYER_NAMES = bm.LayerNames(
    layers="encoder.layers",
    att_norm=None,
    qkv="attn.Wqkv",
    o="attn.out_proj",
    att_post_norm="norm1",
    ffn_norm=None,
    gate="mlp.fc12",
    up="mlp.fc11",
    down="mlp.fc2",
    ffn_post_norm="norm2",
)
MODEL_NAMES = bm.ModelNames(
    embedding="embeddings.word_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    final_norm=None,
    optional_prefix="bert.",
)


class NomicBertTpPartModel(EncoderTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), names=LAYER_NAMES, norm=bm.Norm.LAYER, is_post_norm=True)

    def model_spec(self) -> bm.ModelSpec:
        types = self.config.count("type_vocab_size", 2)
        return replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER, num_token_types=types)

    def _verify_params(self) -> None:
        super()._verify_params()
        for key in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "use_rms_norm"):
            self.config.check_value(key, False)
        self.config.check_value("rotary_emb_interleaved", False)
        self.config.check_value("rotary_emb_fraction", 1.0, 1)
        self.config.check_value("rotary_scaling_factor", 1.0, 1)
        self.config.check_value("num_experts", 0)
