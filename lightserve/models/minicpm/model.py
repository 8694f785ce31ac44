"""MiniCPM is Llama with factors of the embedding, the residuals and the logits.

MiniCPM 4 attends sparsely in long requests only: shorter ones are served (``dense_len``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError

UNSUPPORTED = {"num_experts": "experts", "mixer_types": "linear attention"}


class MiniCpmTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("attention_bias")
        return replace(
            super().layer_spec(layer_num),
            residual_scale=residual_scale(self.config),
            qkv_bias=has_bias,
            o_bias=has_bias,
        )

    def model_spec(self) -> bm.ModelSpec:
        embedding_scale, logit_scale = embedding_and_logit_scale(self.config)
        return replace(super().model_spec(), embedding_scale=embedding_scale, logit_scale=logit_scale)

    def _verify_params(self) -> None:
        for field, what in UNSUPPORTED.items():
            if self.config.hf.get(field):
                raise ModelFilesError(
                    f"config.json: {field} is set, but minicpm is supported without {what} only; "
                    "remove it if the model can do without"
                )
        if self.config.hf.get("sparse_config") and self.args.max_req_total_len > self.config.count_or_0("dense_len"):
            raise ModelFilesError(
                f"config.json: sparse_config is set, but minicpm is supported without sparse attention only; set "
                f"max_req_total_len to at most its dense_len, {self.config.count_or_0('dense_len')}"
            )


def residual_scale(config: bm.ModelConfig) -> float:
    return config.number("scale_depth", 1.0) / math.sqrt(config.num_layers)


def embedding_and_logit_scale(config: bm.ModelConfig) -> tuple[float, float]:
    return config.number("scale_emb", 1.0), config.number("dim_model_base", 1.0) / config.hidden_size
