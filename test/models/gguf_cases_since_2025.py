"""GGUF files of models with latent attention beside DeepSeek's, of vision models' language part, and of others."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch
from torch import Tensor

from test.models import gguf_converter as conv
from test.models.architectures import dense_c, latent, llama4 as llama4_models, llama_like, moe, moe_b, step
from test.models.architectures.case import Case, Json, Tensors
from test.models.gguf_converter import GgufCase, Step, common, rope_table, stack_experts

LATENT_STEPS = (stack_experts, conv.split_kv_b)
YARN = {**latent.YARN, "mscale": latent.YARN["mscale_all_dim"]}  # the file has one of both


def experts_of_deepseek(config: Json) -> Json:
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "leading_dense_block_count": config["first_k_dense_replace"],
    }


def deepseek2(config: Json) -> Json:
    mscale = rope_table(config).get("mscale_all_dim")
    nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    return {
        **common(config),
        **experts_of_deepseek(config),
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "rope.dimension_count": rope,
        "rope.scaling.yarn_log_multiplier": None if mscale is None else 0.1 * mscale,
        "expert_gating_func": 2 if config["model_type"] != "deepseek_v2" else None,
    }


def with_indexer(config: Json) -> Json:
    types = config.get("indexer_types") if config["model_type"] == "glm_moe_dsa" else None
    return {
        **deepseek2(config),
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.types": None if types is None else [kind == "full" for kind in types],
    }


def mistral4(config: Json) -> Json:
    """Files that were converted from Mistral's own format have the scale of queries."""
    beta = rope_table(config)["llama_4_scaling_beta"]
    return {**deepseek2(config), "expert_gating_func": None, "attention.temperature_scale": beta or None}


def vision(config: Json) -> Json:
    """Of the language part. Positions have three axes, which are equal in a text."""
    return {**common(config), "rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}


def vision_moe(config: Json) -> Json:
    return {**vision(config), "expert_feed_forward_length": config["moe_intermediate_size"]}


def ernie_moe(config: Json) -> Json:
    return {
        **common(config),
        "expert_count": conv.first(config, "moe_num_experts", "num_experts"),
        "expert_used_count": conv.first(config, "moe_k", "num_experts_per_tok"),
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
    }


def ernie_bias(tensors: Tensors, config: Json) -> Tensors:
    return {
        name.replace("e_score_correction_bias", "e_score_correction.bias"): value for name, value in tensors.items()
    }


def hunyuan(config: Json) -> Json:
    table = conv.first(config, "rope_parameters", "rope_scaling") or {}
    alpha, base = table.get("alpha"), conv.first(config, "rope_theta") or table.get("rope_theta") or 10_000.0
    dim = conv.head_dim(config)
    theta = base * alpha ** (dim / (dim - 2)) if alpha else base
    return {**common(config), "expert_count": None, "rope.freq_base": theta, "rope.scaling.type": "none"}


def hunyuan_moe(config: Json) -> Json:
    def one(value: object) -> object:
        return value[0] if isinstance(value, list) else value

    return {
        **hunyuan(config),
        "expert_count": config["num_experts"],
        "expert_used_count": one(conv.first(config, "moe_topk", "num_experts_per_tok")),
        "expert_shared_feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": one(conv.first(config, "moe_intermediate_size", "intermediate_size")),
        "expert_shared_count": one(config.get("num_shared_expert", 1)),
    }


def dots1(config: Json) -> Json:
    return {**common(config), **experts_of_deepseek(config), "expert_gating_func": 2}


def ling(config: Json) -> Json:
    share = 0.5 if config["model_type"] == "bailing_moe_v2" else 1.0
    return {
        **common(config),
        "rope.dimension_count": int(conv.head_dim(config) * config.get("partial_rotary_factor", share)),
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2 if config.get("score_function") == "sigmoid" else None,
    }


def split_query_key_value(tensors: Tensors, config: Json) -> Tensors:
    """With the rows of rotary pairs side by side."""
    heads, kv_heads, done = config["num_attention_heads"], config["num_key_value_heads"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if "query_key_value" not in name:
            done[name] = tensor
            continue
        dim, layer = conv.head_dim(config), name.split(".")[2]
        q, k, v = tensor.split_with_sizes([heads * dim, kv_heads * dim, kv_heads * dim])
        parts = {"q": conv.permute(q, heads), "k": conv.permute(k, kv_heads), "v": v}
        done |= {f"blk.{layer}.attn_{part}.weight": rows for part, rows in parts.items()}
    return done


def as_expert_bias(tensors: Tensors, config: Json) -> Tensors:
    pattern = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.expert_bias")
    return {pattern.sub(r"blk.\1.exp_probs_b.bias", name): tensor for name, tensor in tensors.items()}


def afmoe(config: Json) -> Json:
    return {
        **common(config),
        "expert_shared_count": config["num_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_weights_norm": True,
        "expert_weights_scale": float(config["route_scale"]),
        "attention.sliding_window": config["sliding_window"],
    }


def afmoe_bias(tensors: Tensors, config: Json) -> Tensors:
    return {re.sub(r"expert_bias$", "expert_bias.bias", name): tensor for name, tensor in tensors.items()}


def llama4(config: Json) -> Json:
    return {
        **common(config),
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "rope.dimension_count": conv.head_dim(config),
    }


def llama4_experts(tensors: Tensors, config: Json) -> Tensors:
    """[in, out] becomes [out, in], and gate and up are apart."""
    done: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
            prefix = name.removesuffix("gate_up_proj")
            done |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            done[f"{name}.weight"] = tensor.transpose(1, 2)
        else:
            done[name] = tensor
    return done


def llama3_factors(tensors: Tensors, config: Json) -> Tensors:
    """Of each frequency. Llama 4 has one bound, so nothing lies between two."""
    rope, dim = rope_table(config), conv.head_dim(config)
    bound = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    wavelengths = [2 * math.pi * rope["rope_theta"] ** (2 * i / dim) for i in range(dim // 2)]
    factors = [1.0 if wavelength < bound else rope["factor"] for wavelength in wavelengths]
    return tensors | {"rope_freqs.weight": torch.tensor(factors)}


def step35(config: Json) -> Json:
    layers, other = config["num_hidden_layers"], config["attention_other_setting"]
    windows = [kind == "sliding_attention" for kind in config["layer_types"][:layers]]
    heads = config["num_attention_heads"], other["num_attention_heads"]
    kv_heads = config["num_attention_groups"], other["num_attention_groups"]
    thetas = dict(zip(config["layer_types"], config["rope_theta"], strict=True))
    return {
        **common({**config, "rope_theta": thetas["full_attention"]}),
        "attention.head_count": [heads[is_windowed] for is_windowed in windows],
        "attention.head_count_kv": [kv_heads[is_windowed] for is_windowed in windows],
        **conv.window_pattern({**config, "layer_types": config["layer_types"][:layers]}),
        "rope.freq_base_swa": thetas["sliding_attention"],
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_top_k"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_weights_scale": config["moe_router_scaling_factor"],
        "swiglu_clamp_exp": config["swiglu_limits"],
        "swiglu_clamp_shexp": config["swiglu_limits_shared"],
    }


def step_factors(tensors: Tensors, config: Json) -> Tensors:
    """Of layers without a window, which rotate half of each head; 1 for the other half."""
    rope, dim = config["rope_scaling"], conv.head_dim(config) // 2
    theta = dict(zip(config["layer_types"], config["rope_theta"], strict=True))["full_attention"]
    frequencies = 1 / theta ** (torch.arange(0, dim, 2) / dim)
    original, low, high = (rope[key] for key in STEP_BOUNDS)
    smooth = ((original * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return tensors | {"rope_freqs.weight": torch.cat([factors, torch.ones(dim // 2)])}


def mimo2(config: Json) -> Json:
    windows = config["hybrid_layer_pattern"]
    heads = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    return {
        **common(config),
        "attention.head_count_kv": [heads[is_windowed] for is_windowed in windows],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windows,
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "attention.layer_norm_rms_epsilon": config["layernorm_epsilon"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base_swa": conv.as_float(config["swa_rope_theta"]),
        "nextn_predict_layers": 0,
    }


def as_weights(*ends: str, kind: str = "weight") -> Step:
    """Of parameters that are no modules."""
    return lambda tensors, config: {
        f"{name}.{kind}" if name.endswith(ends) else name: tensor for name, tensor in tensors.items()
    }


def _of(name: str, **fields: object) -> Case:
    return Case(latent.CASES[name].model_type, {**latent.CASES[name].fields, **fields})


D, M = dense_c.CASES, moe_b.CASES
# what files do not have is that of the published models
PUBLISHED = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
LLAMA4 = {**llama4_models.TEXT, **PUBLISHED, "rope_parameters": llama4_models.UNBLENDED}
MAVERICK = {
    **llama4_models.TEXT,
    **PUBLISHED,
    "num_local_experts": 128,
    "use_qk_norm": False,
    "interleave_moe_layer_step": 2,
}
STEP_BOUNDS = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
STEP_ROPES = {
    "full_attention": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 128,  # three frequencies are between the bounds
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
STEP = {
    **step.TEXT,
    "hidden_size": 64,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "rope_parameters": STEP_ROPES,
}
LLAMA4_STEPS = (llama4_experts, llama3_factors)
UNSCALED = {**latent.QUERY_SCALE, "llama_4_scaling_beta": 0.0}
MISTRAL_STEPS = (as_weights("experts.gate_up_proj", "experts.down_proj"), conv.split_kv_b)
CASES_SINCE_2025 = {
    "deepseek32": GgufCase("deepseek32", _of("deepseek_v32", rope_parameters=YARN), with_indexer, LATENT_STEPS),
    "glm-dsa": GgufCase("glm-dsa", latent.CASES["glm_moe_dsa"], with_indexer, LATENT_STEPS),
    "mistral4": GgufCase("mistral4", _of("mistral4", rope_parameters=UNSCALED), mistral4, MISTRAL_STEPS),
    "mistral4-scaled": GgufCase("mistral4", latent.CASES["mistral4"], mistral4, MISTRAL_STEPS),
    "qwen2vl": GgufCase("qwen2vl", llama_like.CASES["qwen2"], vision),
    "qwen3vl": GgufCase("qwen3vl", llama_like.CASES["qwen3"], vision),
    "qwen3vlmoe": GgufCase("qwen3vlmoe", moe.CASES["qwen3_moe"], vision_moe, (stack_experts,)),
    "ernie4_5": GgufCase("ernie4_5", D["ernie4_5"], common),
    "ernie4_5-biased": GgufCase("ernie4_5", D["ernie4_5-biased"], common),
    "ernie4_5-moe": GgufCase("ernie4_5-moe", M["ernie4_5_moe"], ernie_moe, (stack_experts,)),
    "ernie4_5-moe-layers": GgufCase("ernie4_5-moe", M["ernie4_5_moe-layers"], ernie_moe, (stack_experts,)),
    "hunyuan-dense": GgufCase("hunyuan-dense", D["hunyuan_v1_dense"], hunyuan),
    "hunyuan-moe": GgufCase("hunyuan-moe", M["hunyuan_v1_moe"], hunyuan_moe, (stack_experts,)),
    "dots1": GgufCase("dots1", M["dots1"], dots1, (stack_experts,)),
    "bailingmoe": GgufCase("bailingmoe", M["bailing_moe"], ling, (split_query_key_value, stack_experts)),
    "bailingmoe2": GgufCase("bailingmoe2", M["bailing_moe_v2"], ling, (as_expert_bias, stack_experts)),
    "afmoe": GgufCase(
        "afmoe",
        Case("afmoe", {**moe_b.CASES["afmoe"].fields, "global_attn_every_n_layers": 4}),
        afmoe,
        (afmoe_bias, stack_experts),
    ),
    "llama4": GgufCase("llama4", Case("llama4_text", LLAMA4), llama4, LLAMA4_STEPS),
    "llama4-maverick": GgufCase("llama4", Case("llama4_text", MAVERICK), llama4, (llama4_experts,)),
    "step35": GgufCase(
        "step35",
        replace(step.CASES["step3p5"], fields={**step.CASES["step3p5"].fields, "text_config": STEP}),
        step35,
        (as_weights("router_bias", kind="bias"), step_factors, conv.norms_plus_one),
    ),
    "mimo2": GgufCase("mimo2", M["mimo_v2_flash"], mimo2, (as_weights("attention_sink_bias"), stack_experts)),
}
