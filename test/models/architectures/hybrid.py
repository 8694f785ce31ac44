"""Models in which some layers have recurrent state instead of attention. Chunks of prompts end anywhere in them."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from test.models.architectures.case import SMALL, Case, Json, Tensors, without
from test.models.architectures.moe import QWEN

# odd sizes, three value heads for each key head, and attention in every third layer
DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 3,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
SHARED = {**{key: QWEN[key] for key in QWEN.keys() - SMALL.keys()}, "shared_expert_intermediate_size": 44}
AS_EXPERT = {**SHARED, "shared_expert_intermediate_size": SHARED["moe_intermediate_size"]}  # as the published ones
ROPE = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25}

# attention in two of four layers
CONV = {**SMALL, "num_hidden_layers": 4, "hidden_size": 96, "full_attn_idxs": [1, 3]}
CONV_EXPERTS = {
    **{key: value for key, value in CONV.items() if key != "full_attn_idxs"},
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
}
# three heads share an input and an output of the states
MAMBA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "shared_intermediate_size": 40,
}
BAMBA = {"num_hidden_layers": 4, **{key: value for key, value in MAMBA.items() if key.startswith("mamba_")}}
FALCON = {
    **BAMBA,
    "num_hidden_layers": 3,
    "mamba_d_ssm": 60,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.5, 1.4, 0.8, 1.2, 0.6],
    "mlp_multipliers": [0.9, 0.6],
}
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
NEMOTRON = {
    **{key: value for key, value in SMALL.items() if key != "num_hidden_layers"},
    "head_dim": 16,
    "hybrid_override_pattern": "M-M*-M",
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
}
KIMI = {
    **{key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "num_hidden_layers": 5,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "kv_lora_rank": 20,
    "rms_norm_eps": 1e-2,  # the norms inside attention have another one
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEMOTRON_EXPERTS = {
    **NEMOTRON,
    "hybrid_override_pattern": "ME*E-",
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.5,
}
MINIMAX = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "block_size": 16,
    "full_attn_alpha_factor": 1.3,
    "linear_attn_alpha_factor": 3.0,
    "mlp_alpha_factor": 0.7,
}
MINIMAX_M1 = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}
NO_INTERMEDIATE = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
NO_ROPE = {"rope_type": "default", "rope_theta": None}  # as published
OLMO = {**SMALL, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-3}
ONE_KEY_HEAD = {
    "num_hidden_layers": 3,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
}
INTERLEAVED = {**ROPE, "mrope_interleaved": True, "mrope_section": [1, 1, 0]}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 16,
    "num_position_embeddings": 16,
}


def _as_granite_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    return {**config_json, "layer_types": [kinds[kind] for kind in config_json["layer_types"]]}, tensors


def _with_pattern(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As Nemotron-H was published."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    fields = {key: value for key, value in config_json.items() if key != "layers_block_type"}
    pattern = "".join(letters[kind] for kind in config_json["layers_block_type"])
    return {**fields, "hybrid_override_pattern": pattern}, tensors


def with_limits_of_config(hf: Any) -> Any:
    """transformers 5.22 limits the steps by time_step_min, unlike NVIDIA's code for these models."""
    for module in hf.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = hf.config.time_step_limit
    return hf


def with_all_experts(case: Case) -> Case:
    """Every token uses all experts. Rounding then changes no choice of a token, which those behind it would see."""
    fields = deepcopy(case.fields)
    text = fields.get("text_config", fields)
    if "num_experts_per_tok" in text:
        names = ("num_local_experts", "n_routed_experts", "num_experts")
        text[next(name for name in names if name in text)] = text["num_experts_per_tok"]
        text |= dict.fromkeys(text.keys() & {"n_group", "topk_group"}, 1)
    return replace(case, fields=fields)


def _with_dense_names(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """transformers 5.22 saves dense feed-forwards under the name of experts."""
    renamed = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): tensor for name, tensor in tensors.items()}
    return config_json, renamed


def _as_kimi_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    fields = {
        key: value for key, value in config_json.items() if key.partition("_")[0] not in ("linear", "layer", "mlp")
    }
    table = {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4], "head_dim": 12, "num_heads": 4}
    table["short_conv_kernel_size"] = 3
    return _with_dense_names(
        fields | {"linear_attn_config": table, "head_dim": 72, "first_k_dense_replace": 2}, tensors
    )


def _with_drafts(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As Qwen3.5 was published: behind the layers there is one for drafts."""
    return config_json, {**tensors, "mtp.fc.weight": torch.ones(48, 96), "mtp.norm.weight": torch.ones(48)}


def _with_its_decays(hf: Any) -> Any:
    """They are buffers, which have noise."""
    for module in hf.modules():
        if hasattr(module, "slope_rate"):
            module.slope_rate.copy_(module.get_slope_rate())
            decays = module.decay_factors(module.slope_rate)
            for name, values in zip(("query_decay", "key_decay", "diagonal_decay"), decays, strict=True):
                getattr(module, name).copy_(values)
    return hf


def _with_half_rotary(hf: Any) -> Any:
    """transformers 5.22 rotates whole heads: here, by no angle what MiniMax's code does not rotate."""
    frequencies = 1e7 ** (-torch.arange(0, 8, 2) / 8)
    hf.model.rotary_emb.inv_freq = torch.cat((frequencies, torch.zeros(4)))
    return _with_its_decays(hf)


def _as_minimax_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """The numbers of a head that rotate come first, and there are no decays."""
    halves = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    fields = {key: value for key, value in config_json.items() if not key.endswith("_factor")}
    fields |= {f"layernorm_{half}_alpha": config_json[f"{name}_alpha_factor"] for name, half in halves.items()}
    types = [int(kind == "full_attention") for kind in fields.pop("layer_types")]
    fields |= {"model_type": "minimax_m1", "attn_type_list": types, "rotary_dim": 8, "postnorm": True}
    order = torch.tensor([*range(4), *range(8, 12), *range(4, 8), *range(12, 16)])
    done = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_decay", "slope_rate"))}
    for name in (name for name in done if re.search(r"self_attn\.[qk]_proj", name)):
        done[name] = done[name].view(-1, 16, 48)[:, order].reshape(-1, 48)
    return fields, done


def _as_olmo_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """transformers 5.22 saves the convolution in equal parts, and norms of attention layers under another name."""
    keys, values = (
        config_json[f"linear_num_{kind}_heads"] * config_json[f"linear_{kind}_head_dim"] for kind in ("key", "value")
    )
    done = dict(tensors)
    for layer, kind in enumerate(config_json["layer_types"]):
        at = f"model.layers.{layer}"
        if kind == "full_attention":
            done[f"{at}.post_attention_layernorm.weight"] = done.pop(f"{at}.feedforward_layer_norm.weight")
            continue
        names = [f"{at}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        parts = whole.split_with_sizes([keys, keys, values])
        done |= {name: tensor.clone() for name, tensor in zip(names, parts, strict=True)}
    return config_json, done


def _multimodal(model_type: str, text: Json) -> Case:
    fields = {"text_config": {**text, "rope_parameters": INTERLEAVED}, "vision_config": VISION}
    return Case(model_type, {**fields, "tie_word_embeddings": False}, _with_drafts)


CASES = {
    "bamba": Case("bamba", {**SMALL, **BAMBA, "attn_layer_indices": [1]}),
    "bamba-bias": Case(
        "bamba",
        {
            **SMALL,
            **BAMBA,
            "attn_layer_indices": [0, 2],
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.65, 0.75],
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
        },
    ),
    "falcon_h1": Case("falcon_h1", {**SMALL, **FALCON}),
    "falcon_h1-norm": Case(
        "falcon_h1",
        {
            **SMALL,
            **{key: value for key, value in BAMBA.items() if key != "num_hidden_layers"},
            "head_dim": 16,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.65, 0.75],
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1-gate_first": Case(
        "falcon_h1", {**SMALL, **FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
    "granitemoehybrid": Case("granitemoehybrid", {**SMALL, **MAMBA, **GRANITE_FACTORS, "num_local_experts": 0}),
    "granitemoehybrid-experts": Case(
        "granitemoehybrid",
        {
            **SMALL,
            **MAMBA,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 28,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.1, 1.5],
            "tie_word_embeddings": True,
        },
        _as_granite_published,
    ),
    "kimi_linear": Case("kimi_linear", {**KIMI, "n_group": 4, "topk_group": 2}, _with_dense_names),
    "kimi_linear-table": Case(
        "kimi_linear",
        {
            **KIMI,
            "q_lora_rank": 24,
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
        },
        _as_kimi_published,
    ),
    "lfm2": Case("lfm2", {**CONV, "block_multiple_of": 10, "block_ffn_dim_multiplier": 1.3}),
    "lfm2-bias": Case(
        "lfm2",
        {
            **CONV,
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_embedding": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        without("layer_types"),
    ),
    "lfm2_moe": Case("lfm2_moe", CONV_EXPERTS),
    "lfm2_moe-no-bias": Case(
        "lfm2_moe",
        {
            **CONV_EXPERTS,
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "minimax": Case("minimax", MINIMAX, adapt_oracle=_with_its_decays),
    "minimax_m1": Case("minimax", {**MINIMAX, **MINIMAX_M1}, _as_minimax_published, _with_half_rotary),
    "minimax_text_01": Case(
        "minimax",
        {**MINIMAX, "tie_word_embeddings": True, "sliding_window": 40},
        lambda config_json, tensors: ({**config_json, "model_type": "minimax_text_01"}, tensors),
        _with_its_decays,
    ),
    "nemotron_h": Case("nemotron_h", NEMOTRON, _with_pattern, with_limits_of_config),
    "nemotron_h-bias": Case(
        "nemotron_h",
        {
            **NEMOTRON,
            "hybrid_override_pattern": "M*-M",
            "time_step_limit": [0.3, 1.2],
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
        },
        adapt_oracle=with_limits_of_config,
    ),
    "nemotron_h-experts": Case("nemotron_h", NEMOTRON_EXPERTS, _with_pattern, with_limits_of_config),
    "nemotron_h-latent": Case(
        "nemotron_h",
        {
            **NEMOTRON_EXPERTS,
            "moe_latent_size": 20,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
        adapt_oracle=with_limits_of_config,
    ),
    "nemotron_h-biased-experts": Case(
        "nemotron_h", {**NEMOTRON_EXPERTS, "mlp_bias": True}, adapt_oracle=with_limits_of_config
    ),
    "olmo_hybrid": Case("olmo_hybrid", {**OLMO, "rope_parameters": NO_ROPE}, _as_olmo_published),
    "olmo_hybrid-rope": Case(
        "olmo_hybrid",
        {
            **OLMO,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        _as_olmo_published,
    ),
    "qwen3_5_text": Case("qwen3_5_text", {**SMALL, **DELTA, **ONE_KEY_HEAD, "rope_parameters": ROPE}),
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", {**NO_INTERMEDIATE, **SHARED, **DELTA, "tie_word_embeddings": True}),
    "qwen3_5": _multimodal("qwen3_5", {**SMALL, **DELTA}),
    "qwen3_5_moe": _multimodal("qwen3_5_moe", {**NO_INTERMEDIATE, **AS_EXPERT, **DELTA}),
    "qwen3_next": Case("qwen3_next", {**SMALL, **AS_EXPERT, **DELTA, "rope_parameters": ROPE}),
    "qwen3_next-dense": Case(
        "qwen3_next",
        {
            **SMALL,
            **SHARED,
            **DELTA,
            "full_attention_interval": 4,  # the default
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        without("layer_types"),
    ),
}
