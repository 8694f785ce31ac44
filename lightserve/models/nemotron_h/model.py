"""Nemotron-H: every layer is one of Mamba2, attention without positions, a feed-forward, or experts without a gate."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import Relu2
from lightserve.models.glm4_moe.model import SPARSE, deepseek_v3_moe
from lightserve.models.granitemoehybrid.model import dt_limits

LAYER_NAMES = bm.LayerNames(
    layers="backbone.layers",
    att_norm="norm",
    q="mixer.q_proj",
    k="mixer.k_proj",
    v="mixer.v_proj",
    o="mixer.o_proj",
    ffn_norm="norm",
    up="mixer.up_proj",
    down="mixer.down_proj",
)
MAMBA_NAMES = bm.Mamba2Names(
    inputs="mixer.in_proj",
    conv="mixer.conv1d",
    decay="mixer.A_log",
    dt_bias="mixer.dt_bias",
    skip="mixer.D",
    norm="mixer.norm",
    out="mixer.out_proj",
)
MOE_NAMES = bm.MoeNames(
    router="mixer.gate",
    score_bias="mixer.gate.e_score_correction_bias",
    experts="mixer.experts",
    shared="mixer.shared_experts",
    latent_in="mixer.fc1_latent_proj",
    latent_out="mixer.fc2_latent_proj",
)
MODEL_NAMES = bm.ModelNames(embedding="backbone.embeddings", final_norm="backbone.norm_f")


class NemotronHTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            rope=None,
            activation=bm.activation_of(config, "mlp_hidden_act"),
            is_gated=False,
            ffn_bias=config.flag("mlp_bias"),
            mixer=self._mixer() if config.is_recurrent(layer_num) else None,
            moe=self._moe() if config.hf["mlp_layer_types"][layer_num] == SPARSE else None,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES)

    def _moe(self) -> bm.MoeSpec:
        """Chosen as DeepSeek V3 chooses them."""
        config = self.config
        return replace(
            deepseek_v3_moe(config),
            names=MOE_NAMES,
            activation=Relu2(),
            latent_size=config.count_or_0("moe_latent_size"),
            shared_size=config.count("moe_shared_expert_intermediate_size"),
            has_shared_apart=config.flag("mlp_bias"),  # which the others lack
        )

    def _mixer(self) -> bm.Mamba2Spec:
        config = self.config
        return bm.Mamba2Spec(
            num_heads=config.count("mamba_num_heads"),
            head_dim=config.count("mamba_head_dim"),
            num_groups=config.count("n_groups"),
            state_dim=config.count("ssm_state_size"),
            conv_width=config.count("conv_kernel"),
            norm_eps=config.norm_eps,
            norms_groups=True,
            dt_limits=dt_limits(config),
            has_bias=config.flag("use_bias"),
            has_out_bias=config.flag("use_bias"),
            has_conv_bias=config.flag("use_conv_bias", default=True),
            names=MAMBA_NAMES,
        )

    def _verify_params(self) -> None:
        self.config.check_value("mamba_hidden_act", "silu")
        self.config.check_value("attention_bias", False)
        self.config.check_value("residual_in_fp32", False)
        self.config.check_value("tie_word_embeddings", False)
        if self.config.experts_name is not None:
            self.config.check_value("n_shared_experts", 1)
            if self.config.count_or_0("moe_latent_size"):
                self.config.check_value("mlp_bias", False)
