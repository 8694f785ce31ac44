"""GGUF files of models with recurrent layers, with the metadata that llama.cpp's converter writes for them."""

from __future__ import annotations

from test.models import gguf_converter as conv, gguf_recurrent_steps as steps
from test.models.architectures import hybrid
from test.models.architectures.case import SMALL, Case, Json, Tensors
from test.models.gguf_converter import GgufCase, common, head_dim, rope_table
from test.models.gguf_recurrent_steps import named_by_hand

H = hybrid.CASES
KV, KEY, VALUE = "attention.head_count_kv", "attention.key_length", "attention.value_length"
# inner_size is a multiple of the hidden size
GRANITE = {**SMALL, **hybrid.MAMBA, **hybrid.GRANITE_FACTORS, "mamba_expand": 2, "position_embedding_type": "nope"}
GRANITE_EXPERTS = {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 28}
FALCON = {**SMALL, **hybrid.FALCON, "head_dim": 16}
NO_FACTORS = {key: value for key, value in FALCON.items() if "multiplier" not in key}


def qwen_hybrid(config: Json) -> Json:
    values = config["linear_num_value_heads"]
    return {
        **common(config),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": config["linear_value_head_dim"] * values,
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(head_dim(config) * rope_table(config).get("partial_rotary_factor", 0.25)),
    }


def _kv_heads(config: Json, attention: str = "full_attention") -> list[int]:
    return [config["num_key_value_heads"] if kind == attention else 0 for kind in config["layer_types"]]


def lfm2(config: Json) -> Json:
    width: int = conv.first(config, "block_ff_dim", "intermediate_size")
    if config.get("block_auto_adjust_ff_dim", True) and "num_experts" not in config:
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        multiple = config["block_multiple_of"]
        width = multiple * ((width + multiple - 1) // multiple)
    return {
        **common(config),
        KV: _kv_heads(config),
        "shortconv.l_cache": config["conv_L_cache"],
        "feed_forward_length": width,
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
    }


def lfm2_moe(config: Json) -> Json:
    return {
        **lfm2(config),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
    }


def mamba(config: Json) -> Json:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def granite(config: Json) -> Json:
    return {
        **common(config),
        **mamba(config),
        KV: _kv_heads(config),
        "rope.dimension_count": head_dim(config),
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "expert_count": config["num_local_experts"] or None,
        "rope.scaling.finetuned": False,
    }


def bamba(config: Json) -> Json:
    kinds = [i in config["attn_layer_indices"] for i in range(config["num_hidden_layers"])]
    dim = int(head_dim(config) * rope_table(config).get("partial_rotary_factor", 0.5))
    return {
        **common(config),
        **mamba(config),
        KV: [config["num_key_value_heads"] * has_attention for has_attention in kinds],
        "rope.dimension_count": dim,
        "rope.scaling.finetuned": True,
    }


def falcon_h1(config: Json) -> Json:
    return {**common(config), **mamba(config), "ssm.inner_size": config["mamba_d_ssm"]}


def nemotron_h(config: Json) -> Json:
    kinds, has_experts = config["hybrid_override_pattern"], "E" in config["hybrid_override_pattern"]
    width = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    fields = {
        **common(config),
        "block_count": len(kinds),
        KV: [config["num_key_value_heads"] * (kind == "*") for kind in kinds],
        "feed_forward_length": [width * (kind == ("E" if has_experts else "-")) for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }
    return {key: value for key, value in fields.items() if has_experts or not key.startswith("expert")}


def nemotron_h_moe(config: Json) -> Json:
    return {
        **nemotron_h(config),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "moe_latent_size": config.get("moe_latent_size"),
    }


def kimi_linear(config: Json) -> Json:
    nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    table = config["linear_attn_config"]
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        **common(config),
        KV: [int(layer in table["full_attn_layers"]) for layer in layers],
        KEY: rank + rope,
        VALUE: None,
        "ssm.conv_kernel": table["short_conv_kernel_size"],
        "expert_used_count": conv.first(config, "num_experts_per_tok", "num_experts_per_token"),
        "kda.head_dim": table["head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": conv.first(config, "num_shared_experts", "n_shared_experts"),
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_gating_func": 2,
        "rope.freq_base": None,
    }


def _as_nemotron_published(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    config, tensors = hybrid._with_pattern(config, tensors)
    return {**config, "n_shared_experts": 1}, tensors


QWEN_STEPS = (steps.qwen_norms, steps.recurrent)
QWEN_NAMES = named_by_hand(
    (r"linear_attn\.A_log", "ssm_a"),
    (r"linear_attn\.in_proj_ba\.weight", "ssm_ba.weight"),
)
BY_MAMBA_N_GROUPS = steps.mamba2(lambda config: int(config["mamba_n_groups"]))
MAMBA_NAMES = named_by_hand((r"(?:mamba|mixer)\.A_log", "ssm_a"), (r"(?:mamba|mixer)\.D", "ssm_d"))
NEMOTRON_STEPS = (conv.permute_qk, steps.mamba2(lambda config: int(config["n_groups"])), conv.stack_experts)
NEMOTRON_NAMES = named_by_hand(
    (r"mixer\.A_log", "ssm_a"),
    (r"mixer\.D", "ssm_d"),
    (r"mixer\.experts\.up_proj\.weight", "ffn_up_exps.weight"),
    (r"mixer\.experts\.down_proj\.weight", "ffn_down_exps.weight"),
)
LFM2_NAMES = named_by_hand(
    (r"feed_forward\.expert_bias", "exp_probs_b.bias"),
    (r"feed_forward\.experts\.w1\.weight", "ffn_gate_exps.weight"),
    (r"feed_forward\.experts\.w2\.weight", "ffn_down_exps.weight"),
    (r"feed_forward\.experts\.w3\.weight", "ffn_up_exps.weight"),
)
KIMI_NAMES = named_by_hand(
    (r"self_attn\.A_log", "ssm_a"),
    (r"block_sparse_moe\.experts\.w1\.weight", "ffn_gate_exps.weight"),
    (r"block_sparse_moe\.experts\.w2\.weight", "ffn_down_exps.weight"),
    (r"block_sparse_moe\.experts\.w3\.weight", "ffn_up_exps.weight"),
)
GRANITE_STEPS = (conv.permute_qk, BY_MAMBA_N_GROUPS, steps.split_shared_linear, conv.split_input_linear, MAMBA_NAMES)

HYBRID_CASES = {
    "qwen3next": GgufCase(
        "qwen3next",
        H["qwen3_next"],
        qwen_hybrid,
        (*QWEN_STEPS, steps.split_qkvz, conv.stack_experts, QWEN_NAMES),
    ),
    "qwen35": GgufCase(
        "qwen35",
        Case("qwen3_5_text", {**SMALL, **hybrid.DELTA, "rope_parameters": hybrid.ROPE}),
        qwen_hybrid,
        (steps.tile_values, *QWEN_STEPS, QWEN_NAMES),
    ),
    "qwen35-one-key-head": GgufCase(
        "qwen35", H["qwen3_5_text"], qwen_hybrid, (steps.tile_values, *QWEN_STEPS, QWEN_NAMES)
    ),
    "qwen35moe": GgufCase(
        "qwen35moe",
        H["qwen3_5_moe_text"],
        qwen_hybrid,
        (conv.without_lm_head, steps.tile_values, *QWEN_STEPS, conv.stack_experts, QWEN_NAMES),
    ),
    "lfm2": GgufCase("lfm2", H["lfm2"], lfm2, (steps.recurrent,)),
    "lfm2-untied": GgufCase("lfm2", Case("lfm2", H["lfm2-bias"].fields), lfm2, (steps.recurrent,)),
    "lfm2moe": GgufCase("lfm2moe", H["lfm2_moe"], lfm2_moe, (steps.recurrent, conv.stack_experts, LFM2_NAMES)),
    "granitehybrid": GgufCase(
        "granitehybrid", Case("granitemoehybrid", {**GRANITE, "num_local_experts": 0}), granite, GRANITE_STEPS
    ),
    "granitehybrid-experts": GgufCase(
        "granitehybrid", Case("granitemoehybrid", {**GRANITE, **GRANITE_EXPERTS}), granite, GRANITE_STEPS
    ),
    "granitehybrid-bamba": GgufCase(
        "granitehybrid", H["bamba"], bamba, (conv.permute_qk, BY_MAMBA_N_GROUPS, MAMBA_NAMES)
    ),
    "falcon-h1": GgufCase(
        "falcon-h1",
        Case("falcon_h1", FALCON),
        falcon_h1,
        (steps.falcon_h1_factors, BY_MAMBA_N_GROUPS, MAMBA_NAMES),
    ),
    "falcon-h1-norm": GgufCase(
        "falcon-h1",
        Case("falcon_h1", {**NO_FACTORS, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        falcon_h1,
        (BY_MAMBA_N_GROUPS, MAMBA_NAMES),
    ),
    "nemotron_h": GgufCase("nemotron_h", H["nemotron_h"], nemotron_h, (*NEMOTRON_STEPS, NEMOTRON_NAMES)),
    "nemotron_h_moe": GgufCase(
        "nemotron_h_moe", H["nemotron_h-experts"], nemotron_h_moe, (*NEMOTRON_STEPS, NEMOTRON_NAMES)
    ),
    "nemotron_h_moe-latent": GgufCase(
        "nemotron_h_moe",
        Case("nemotron_h", H["nemotron_h-latent"].fields, hybrid._with_pattern, hybrid.with_limits_of_config),
        nemotron_h_moe,
        (*NEMOTRON_STEPS, NEMOTRON_NAMES),
    ),
    "kimi-linear": GgufCase(
        "kimi-linear",
        Case(
            "kimi_linear",
            {**H["kimi_linear-table"].fields, "norm_topk_prob": True},
            hybrid._as_kimi_published,
        ),
        kimi_linear,
        (steps.kimi_tensors, conv.split_kv_b, KIMI_NAMES),
    ),
}
