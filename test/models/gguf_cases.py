"""Every architecture of GGUF files, with the metadata that llama.cpp's converter writes for it."""

from __future__ import annotations

import math
from collections.abc import Callable

from test.models import gguf_converter as conv
from test.models.architectures import converted, dense_a, dense_b, latent, llama_like, moe
from test.models.architectures.case import SMALL, Case, Json
from test.models.gguf_cases_since_2025 import CASES_SINCE_2025, YARN, deepseek2, experts_of_deepseek
from test.models.gguf_converter import GgufCase, common, head_dim, only, permute_qk, rope_table, stack_experts
from test.models.gguf_gemma4_cases import GEMMA4_CASES
from test.models.gguf_hybrid_cases import HYBRID_CASES

HALF = {"partial_rotary_factor": 0.5}
FFN_4X = {"intermediate_size": 4 * SMALL["hidden_size"]}  # some classes write four times the hidden size
FALCON = {**dense_b.FALCON, "ffn_hidden_size": FFN_4X["intermediate_size"]}
NEW_FALCON = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
GPT_NEOX_ROPE = {"rope_theta": 10_000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
BAICHUAN_13B = {**dense_a.MHA, "num_hidden_layers": 40, "hidden_size": 24, "intermediate_size": 16}
LATENT = {**latent.LATENT, **latent.GROUPS, "rope_parameters": YARN}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
KV, KEY, VALUE = "attention.head_count_kv", "attention.key_length", "attention.value_length"


def ministral3(config: Json) -> Json:
    rope = rope_table(config)
    scale = rope.get("llama_4_scaling_beta")
    return {
        **llama(config),
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": scale,
    }


def llama(config: Json) -> Json:
    return {**common(config), "rope.dimension_count": head_dim(config)}


def minicpm(config: Json) -> Json:
    return {
        **common(config),
        "embedding_scale": float(config["scale_emb"]),
        "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
    }


def granite(config: Json) -> Json:
    return {
        **llama(config),
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def cohere(config: Json) -> Json:
    return {**common(config), "logit_scale": float(config["logit_scale"]), "rope.scaling.type": "none"}


def cohere2(config: Json) -> Json:
    window = {"attention.sliding_window": config["sliding_window"]}
    return {**cohere(config), **window, "rope.dimension_count": head_dim(config)}


def gemma2(config: Json) -> Json:
    return {
        **only(KV, KEY, VALUE, RMS)(config),
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
    }


def gemma3(config: Json) -> Json:
    return {**common(config), "attention.sliding_window": config["sliding_window"]}


def windowed(config: Json) -> Json:
    return {**common(config), **conv.window_pattern(config)}


def olmo(config: Json) -> Json:
    return {**common(config), LAYER: 1e-5, "attention.clamp_kqv": config["clip_qkv"]}


def chatglm(config: Json) -> Json:
    return {
        **common(config),
        "context_length": config["seq_length"],
        "feed_forward_length": config["ffn_hidden_size"],
        KV: config["multi_query_group_num"],
        KEY: None,
        VALUE: None,
        RMS: config["layernorm_epsilon"],
        "rope.dimension_count": head_dim(config) // 2,
        "rope.freq_base": 10_000.0 * config["rope_ratio"],
    }


def glm(config: Json) -> Json:
    """The script writes 1e-5 for every norm_eps of these files."""
    fields = only(KV)(config)
    return {**fields, RMS: config["rms_norm_eps"], "rope.dimension_count": head_dim(config) // 2, "rope.freq_base": 1e4}


def partial(config: Json) -> Json:
    factor = rope_table(config)["partial_rotary_factor"]
    return {**common(config), "rope.dimension_count": int(head_dim(config) * factor)}


def with_4x(*keys: str) -> Callable[[Json], Json]:
    return lambda config: {
        **only(*keys)(config),
        "feed_forward_length": 4 * conv.first(config, "hidden_size", "n_embd"),
    }


def bloom(config: Json) -> Json:
    return {**with_4x(LAYER)(config), "context_length": config.get("seq_length", config["hidden_size"])}


def nemotron(config: Json) -> Json:
    return {**partial(config), LAYER: config["norm_eps"]}


def starcoder(config: Json) -> Json:
    return {**with_4x(LAYER)(config), KV: 1}


def falcon(config: Json) -> Json:
    is_new = config["new_decoder_architecture"]
    return {**with_4x(LAYER)(config), "context_length": 2048, KV: config["num_kv_heads"] if is_new else 1}


def mpt(config: Json) -> Json:
    attention = config["attn_config"]
    return {
        **only()(config),
        "context_length": config["max_seq_len"],
        "feed_forward_length": 4 * config["d_model"],
        LAYER: 1e-5,
        "attention.clamp_kqv": attention["clip_qkv"],
        "attention.max_alibi_bias": float(attention["alibi_bias_max"]),
    }


def gpt_neox(config: Json) -> Json:
    dim = int(rope_table(config)["partial_rotary_factor"] * head_dim(config))
    is_parallel = config["use_parallel_residual"]
    return {**only(LAYER)(config), "rope.dimension_count": dim, "use_parallel_residual": is_parallel}


def phi2(config: Json) -> Json:
    dim = int(rope_table(config)["partial_rotary_factor"] * head_dim(config))
    return {**with_4x(LAYER)(config), KV: config["num_attention_heads"], "rope.dimension_count": dim}


def phi3(config: Json) -> Json:
    rope = rope_table(config)
    original = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
    scale = config["max_position_embeddings"] / original
    factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return {
        **only(KV, RMS, "rope.freq_base")(config),
        "rope.dimension_count": int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": factor if rope.get("long_factor") else None,
        "attention.sliding_window": config["sliding_window"] or 0,
    }


def stablelm(config: Json) -> Json:
    dim = int(rope_table(config)["partial_rotary_factor"] * head_dim(config))
    fields = {**only(KV)(config), "rope.dimension_count": dim, "use_parallel_residual": True}
    return {**fields, LAYER: config["layer_norm_eps"]}


def qwen2moe(config: Json) -> Json:
    return {**common(config), "expert_feed_forward_length": config["moe_intermediate_size"]}


def gpt_oss(config: Json) -> Json:
    window = {"attention.sliding_window": config["sliding_window"]}
    return {**common(config), **window, "expert_feed_forward_length": config["intermediate_size"]}


def minimax_m2(config: Json) -> Json:
    width = config["intermediate_size"]
    return {**common(config), "expert_feed_forward_length": width, "rope.dimension_count": config["rotary_dim"]}


def glm4moe(config: Json) -> Json:
    return {
        **partial(config),
        **experts_of_deepseek(config),
        "expert_gating_func": 2,
        "expert_weights_norm": config["norm_topk_prob"],
        "nextn_predict_layers": 0,
    }


def glm_lite(config: Json) -> Json:
    """The converter writes no gating if config.json has no scoring_func."""
    return {**deepseek2(config), "expert_gating_func": None, "nextn_predict_layers": 0}


def older_deepseek2(config: Json) -> Json:
    """Before the converter split the keys and values of latent attention."""
    return {
        **deepseek2(config),
        KV: config["num_attention_heads"],
        KEY: config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        VALUE: config["v_head_dim"],
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }


def deci(config: Json) -> Json:
    return {**llama(config), KV: config["num_key_value_heads_per_layer"]}


A, B, M = dense_a.CASES, dense_b.CASES, moe.CASES
NEOX_QKV = conv.qkv_blocks(lambda config: conv.first(config, "num_attention_heads", "n_head"))
FALCON_QKV = conv.qkv_blocks(lambda config: config["num_kv_heads"] if config["new_decoder_architecture"] else 1)
GEMMA_STEPS = (conv.norms_plus_one, conv.without_lm_head)
PLAIN, MOE = (permute_qk,), (stack_experts,)
DEEPSEEK = (stack_experts, conv.split_kv_b)

GGUF_CASES = {
    "llama": GgufCase("llama", llama_like.CASES["llama"], llama, PLAIN),
    "llama-biased": GgufCase("llama", llama_like.CASES["llama-biased"], llama, PLAIN),
    "mixtral": GgufCase("llama", M["mixtral"], llama, (permute_qk, stack_experts, conv.mixtral_names)),
    "deci": GgufCase("deci", A["deci"], deci, PLAIN),
    "deci-pruned": GgufCase("deci", A["llama-pruned"], llama, PLAIN),
    "mistral3": GgufCase("mistral3", A["mistral-wide-heads"], llama, PLAIN),
    "ministral3": GgufCase("mistral3", A["ministral3"], ministral3, PLAIN),
    "xverse": GgufCase("xverse", A["xverse"], llama, PLAIN),
    "internlm2": GgufCase("internlm2", A["internlm2"], common, (conv.split_wqkv,)),
    "arcee": GgufCase("arcee", B["arcee"], llama, PLAIN),
    "smollm3": GgufCase("smollm3", A["smollm3"], llama, PLAIN),
    "minicpm": GgufCase("minicpm", A["minicpm"], minicpm, PLAIN),
    "granite": GgufCase("granite", A["granite"], granite, PLAIN),
    "baichuan": GgufCase("baichuan", A["baichuan-7b"], llama, (conv.split_w_pack,)),
    "baichuan-13b": GgufCase(
        "baichuan",
        Case("llama", BAICHUAN_13B, converted.to_baichuan_13b, converted.AlibiLlama),
        llama,
        (conv.split_w_pack,),
    ),
    "qwen": GgufCase("qwen", A["qwen"], common),
    "qwen2": GgufCase("qwen2", llama_like.CASES["qwen2"], common),
    "qwen3": GgufCase("qwen3", llama_like.CASES["qwen3"], common),
    "seed_oss": GgufCase("seed_oss", A["seed_oss"], common),
    "gemma": GgufCase("gemma", B["gemma"], only(KV, KEY, VALUE, RMS), GEMMA_STEPS),
    "gemma2": GgufCase(
        "gemma2", Case("gemma2", {**B["gemma2"].fields, "query_pre_attn_scalar": 16}), gemma2, GEMMA_STEPS
    ),
    # the sixth of seven layers is not windowed; the scale is that of head_dim
    "gemma3": GgufCase(
        "gemma3",
        Case(
            "gemma3_text",
            {
                **dense_b.GEMMA2,
                "num_hidden_layers": 7,
                "query_pre_attn_scalar": dense_b.GEMMA2["head_dim"],
                "rope_parameters": GEMMA3_ROPE,
            },
        ),
        gemma3,
        GEMMA_STEPS,
    ),
    "command-r": GgufCase("command-r", B["cohere"], cohere),
    "command-r-qk-norm": GgufCase("command-r", Case("cohere", {**SMALL, "use_qk_norm": True}), cohere),
    "cohere2": GgufCase("cohere2", B["cohere2"], cohere2),
    "exaone4": GgufCase("exaone4", A["exaone4"], windowed),
    "exaone4-pattern": GgufCase("exaone4", Case("exaone4", A["exaone4-pattern"].fields), windowed),
    "exaone4-global": GgufCase("exaone4", A["exaone4-global"], windowed),
    "olmo": GgufCase("olmo", A["olmo"], olmo, PLAIN),
    "olmo-clipped": GgufCase("olmo", Case("olmo", {**SMALL, "clip_qkv": 0.3}), olmo, PLAIN),
    "olmo2": GgufCase("olmo2", A["olmo2"], common),
    "olmo3": GgufCase("olmo2", A["olmo3"], windowed),
    "chatglm": GgufCase(
        "chatglm", Case("glm", {**dense_a.SMALL, "head_dim": 8, "rope_theta": 5e4}, converted.to_chatglm), chatglm
    ),
    "glm": GgufCase("chatglm", Case("glm", {**dense_a.SMALL, "head_dim": 8}), glm),
    "glm4": GgufCase("glm4", A["glm4"], partial),
    "glm4-rotary-quarter": GgufCase("glm4", A["glm4-rotary-quarter"], partial),
    "bloom": GgufCase("bloom", llama_like.CASES["bloom"], bloom, (NEOX_QKV,)),
    "gpt2": GgufCase("gpt2", B["gpt2"], with_4x(LAYER), (conv.transpose_conv1d,)),
    "starcoder": GgufCase("starcoder", B["gpt_bigcode"], starcoder),
    "starcoder2": GgufCase("starcoder2", Case("starcoder2", {**SMALL, "sliding_window": None}), common),
    "starcoder2-no-bias": GgufCase("starcoder2", B["starcoder2-no-bias"], common),
    "falcon-7b": GgufCase("falcon", Case("falcon", FALCON), falcon, (FALCON_QKV,)),
    "falcon-40b": GgufCase("falcon", Case("falcon", NEW_FALCON), falcon, (FALCON_QKV,)),
    "falcon-11b": GgufCase(
        "falcon", Case("falcon", {**NEW_FALCON, "num_ln_in_parallel_attn": 1}), falcon, (FALCON_QKV,)
    ),
    "mpt": GgufCase("mpt", B["mpt"], mpt),
    "mpt-clipped": GgufCase("mpt", Case("mpt", {**dense_b.MPT, "n_heads": 4, "attn_config": {"clip_qkv": 0.5}}), mpt),
    "gptneox": GgufCase(
        "gptneox",
        Case("gpt_neox", {**dense_b.WITHOUT_KV_HEADS, "rope_parameters": GPT_NEOX_ROPE}),
        gpt_neox,
        (NEOX_QKV,),
    ),
    "gptneox-sequential": GgufCase(
        "gptneox",
        Case(
            "gpt_neox",
            {**dense_b.WITHOUT_KV_HEADS, "rope_parameters": GPT_NEOX_ROPE, "use_parallel_residual": False},
        ),
        gpt_neox,
        (NEOX_QKV,),
    ),
    "nemotron": GgufCase("nemotron", B["nemotron-biased"], nemotron, (conv.norms_plus_one,)),
    "phi2": GgufCase("phi2", Case("phi", {**dense_b.WITHOUT_KV_HEADS, **FFN_4X, **HALF}), phi2),
    "phi3": GgufCase("phi3", B["phi3"], phi3),
    "phi3-partial": GgufCase("phi3", B["phi3-partial"], phi3),
    "phi3-longrope-short": GgufCase("phi3", B["phi3-longrope-short"], phi3, (conv.longrope_factors,)),
    "phi3-longrope-long": GgufCase("phi3", B["phi3-longrope-long"], phi3, (conv.longrope_factors,)),
    "stablelm": GgufCase("stablelm", B["stablelm"], stablelm),
    "stablelm-parallel": GgufCase("stablelm", B["stablelm-parallel"], stablelm, (conv.stack_head_norms,)),
    "qwen2moe": GgufCase(
        "qwen2moe", Case("qwen2_moe", {**moe.QWEN, "shared_expert_intermediate_size": 44}), qwen2moe, MOE
    ),
    "qwen3moe": GgufCase("qwen3moe", M["qwen3_moe"], qwen2moe, MOE),
    "olmoe": GgufCase("olmoe", M["olmoe"], common, MOE),
    "granitemoe": GgufCase("granitemoe", M["granitemoe"], granite, (permute_qk, conv.split_input_linear)),
    "gpt-oss": GgufCase(
        "gpt-oss",
        Case("gpt_oss", {**moe.MOE, "num_local_experts": 8, "head_dim": 16, "sliding_window": moe.WINDOW}),
        gpt_oss,
        (conv.gpt_oss_experts,),
    ),
    "minimax-m2": GgufCase("minimax-m2", M["minimax_m2"], minimax_m2, MOE),
    "glm4moe": GgufCase("glm4moe", M["glm4_moe"], glm4moe, MOE),
    "glm4moe-groups": GgufCase("glm4moe", M["glm4_moe-groups"], glm4moe, MOE),
    "deepseek2-lite": GgufCase("deepseek2", latent.CASES["deepseek_v2"], deepseek2, DEEPSEEK),
    "deepseek2-v2": GgufCase(
        "deepseek2", Case("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy"}), deepseek2, DEEPSEEK
    ),
    "deepseek2-v3": GgufCase("deepseek2", Case("deepseek_v3", LATENT), deepseek2, DEEPSEEK),
    "deepseek2-v3-older": GgufCase("deepseek2", Case("deepseek_v3", LATENT), older_deepseek2, MOE),
    "deepseek2-glm-lite": GgufCase("deepseek2", latent.CASES["glm4_moe_lite-first"], glm_lite, DEEPSEEK),
    "deepseek2-kimi": GgufCase("deepseek2", latent.CASES["kimi_k2"], deepseek2, DEEPSEEK),
    **CASES_SINCE_2025,
    **HYBRID_CASES,
    **GEMMA4_CASES,
}
