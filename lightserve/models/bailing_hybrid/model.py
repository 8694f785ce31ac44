"""Ling 3: Kimi Delta Attention in most layers, gated latent attention with positions in the others; V3's experts."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError
from lightserve.models.bailing_moe.model import MODEL_NAMES, NAMES as MOE_NAMES
from lightserve.models.deepseek.model import DeepseekLayerWeight, DeepseekTpPartModel
from lightserve.models.glm4_moe.model import deepseek_v3_moe, is_sparse

MOST_NEGATIVE = -100.0  # log decays below are zeros, infinity and NaN none
LAYER_NAMES = bm.LayerNames(head_gate="attention.g_proj", o="attention.dense")
MIXER_NAMES = bm.KimiDeltaNames(
    q="attention.q_proj",
    k="attention.k_proj",
    v="attention.v_proj",
    convs=("attention.q_conv1d", "attention.k_conv1d", "attention.v_conv1d"),
    b="attention.b_proj",
    forget=("attention.f_proj",),
    decay="attention.A_log",
    dt_bias="attention.dt_bias",
    gate=("attention.g_proj",),
    norm="attention.o_norm",
    out="attention.dense",
)


class BailingHybridLayerWeight(DeepseekLayerWeight):
    attention_name = "attention"


class BailingHybridTpPartModel(DeepseekTpPartModel):
    transformer_weight_class = BailingHybridLayerWeight

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        mixer = self._mixer() if self.config.is_recurrent(layer_num) else None
        return replace(super().layer_spec(layer_num), names=LAYER_NAMES, mixer=mixer)

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES)

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
            min_log_decay=self._min_log_decay(),
            has_flat_rates=True,
            names=MIXER_NAMES,
        )

    def _min_log_decay(self) -> float | None:
        if not self.config.flag("kda_safe_gate", default=True):
            return None
        bound = self.config.hf.get("kda_lower_bound", -5.0)
        if not isinstance(bound, int | float) or not MOST_NEGATIVE < bound < 0:
            raise ModelFilesError(f"config.json: kda_lower_bound is {bound!r}, wanted a negative number; correct it")
        return float(bound)

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("hidden_act", "silu", "swish")  # the convolution's too
        self.config.check_value("score_function", "sigmoid")
        self.config.check_value("no_kda_lora", True)
        for name in ("use_mla_nope", "use_nGPT", "up_proj_norm", "value_norm", "use_bias"):
            self.config.check_value(name, False)
        self.config.check_value("gated_attention_proj_granularity_type", "head_wise")
        for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            limits = self.config.hf.get(name)
            if isinstance(limits, list) and not any(limits):
                continue  # 0 and null are no limits
            self.config.check_value(name, None)
