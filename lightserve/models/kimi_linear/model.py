"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others; V3's experts."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.deepseek.model import DeepseekTpPartModel
from lightserve.models.glm4_moe.model import deepseek_v3_moe, is_sparse
from lightserve.models.mixtral.model import NAMES

MOE_NAMES = replace(
    NAMES,
    score_bias="block_sparse_moe.gate.e_score_correction_bias",
    shared="block_sparse_moe.shared_experts",
    shared_expert=bm.ExpertNames(),
)


class KimiLinearTpPartModel(DeepseekTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            rope=None,
            has_rope_pairs=False,
            mixer=self._mixer() if self.config.is_recurrent(layer_num) else None,
        )

    def _is_sparse(self, layer_num: int) -> bool:
        return is_sparse(self.config, layer_num)

    def _moe(self) -> bm.MoeSpec:
        return replace(deepseek_v3_moe(self.config), names=MOE_NAMES)

    def _mixer(self) -> bm.KimiDeltaSpec:
        count = self.config.count
        return bm.KimiDeltaSpec(
            num_heads=count("linear_num_heads"),
            head_dim=count("linear_head_dim"),
            conv_width=count("linear_conv_kernel_dim"),
        )

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("hidden_act", "silu", "swish")  # the convolution's too
        self.config.check_value("mla_use_nope", True)
        self.config.check_value("moe_router_activation_func", "sigmoid")
        self.config.check_value("moe_layer_freq", 1)
