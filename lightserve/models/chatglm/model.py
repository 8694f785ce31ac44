"""ChatGLM 2 and 3, and GLM-4-9B with these names: GLM with q, k and v in one tensor."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError

LAYER_NAMES = bm.LayerNames(
    layers="transformer.encoder.layers",
    qkv="self_attention.query_key_value",
    o="self_attention.dense",
    gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
MODEL_NAMES = bm.ModelNames(
    embedding="transformer.embedding.word_embeddings",
    final_norm="transformer.encoder.final_layernorm",
    lm_head="transformer.output_layer",
)
# what the code computes; another value is refused
REQUIRED = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False}


class ChatGlmTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("add_bias_linear")
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            has_rope_pairs=self.config.flag("original_rope", True),
            qkv_bias=has_bias or self.config.flag("add_qkv_bias"),
            o_bias=has_bias,
            ffn_bias=has_bias,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES)

    def _verify_params(self) -> None:
        if "position_encoding_2d" in self.config.hf:
            raise ModelFilesError("config.json: ChatGLM 1 (position_encoding_2d) is not supported; use ChatGLM 2 or 3")
        for field, value in REQUIRED.items():
            self.config.check_value(field, value)
