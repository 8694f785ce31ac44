"""StableLM: LayerNorm and partial rotary positions. The 12B model also has parallel halves and norms per head."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

SEQUENTIAL = bm.LayerNames(
    q_norm="self_attn.q_layernorm.norms.{head}",
    k_norm="self_attn.k_layernorm.norms.{head}",
)
PARALLEL = replace(SEQUENTIAL, ffn_norm=None)


class StableLmTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        is_parallel = config.flag("use_parallel_residual")
        return replace(
            super().layer_spec(layer_num),
            names=PARALLEL if is_parallel else SEQUENTIAL,
            norm=bm.Norm.LAYER,
            is_parallel=is_parallel,
            qk_norm=bm.QkNorm.EACH_HEAD if config.flag("qk_layernorm") else None,
            qkv_bias=config.flag("use_qkv_bias"),
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), norm=bm.Norm.LAYER)
