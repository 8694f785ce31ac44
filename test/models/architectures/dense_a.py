"""Mistral to OLMo 3."""

from __future__ import annotations

from test.models.architectures import converted, pruned
from test.models.architectures.case import SMALL as SMALL_LLAMA, Case, without

SMALL = {**SMALL_LLAMA, "pad_token_id": None}
WINDOW = 24
# five query heads to a KV head, which are wider than hidden_size / heads
WIDE = {**SMALL, "hidden_size": 40, "num_attention_heads": 10, "head_dim": 12}
FOUR_LAYERS = {**SMALL, "num_hidden_layers": 4}
MHA = {**SMALL, "num_key_value_heads": 6}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALED_QUERIES = {
    **YARN,
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
MINICPM = {**FACTORS, "attention_multiplier": 8**-0.5}


CASES = {
    "mistral": Case("mistral", {**SMALL, "sliding_window": WINDOW}),
    "mistral-wide-heads": Case("mistral", {**WIDE, "sliding_window": None}),
    "ministral": Case(
        "ministral",
        {**WIDE, "sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "ministral-all-windowed": Case(
        "ministral", {**SMALL, "head_dim": 16, "sliding_window": WINDOW}, without("layer_types")
    ),
    "ministral3": Case("ministral3", {**WIDE, "rope_parameters": SCALED_QUERIES}),
    "granite": Case("granite", {**SMALL, **FACTORS}),
    "granite-biased": Case(
        "granite", {**WIDE, **FACTORS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "seed_oss": Case("seed_oss", {**WIDE}),
    "seed_oss-biased": Case("seed_oss", {**WIDE, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": Case("smollm3", {**FOUR_LAYERS}, without("no_rope_layers", "layer_types", "tie_word_embeddings")),
    "smollm3-window": Case(
        "smollm3",
        {**SMALL, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW},
        without("layer_types"),
    ),
    "exaone4": Case("exaone4", {**FOUR_LAYERS, "sliding_window": WINDOW}, without("layer_types")),
    "exaone4-pattern": Case(
        "exaone4",
        {**WIDE, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        lambda config, tensors: ({**config, "layer_types": None, "sliding_window_pattern": "LG"}, tensors),
    ),
    "exaone4-global": Case(
        "exaone4", {**SMALL, "sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}
    ),
    "olmo": Case("olmo", {**SMALL}),
    "olmo-clipped": Case("olmo", {**WIDE, "clip_qkv": 0.3, "attention_bias": True}),
    "olmo2": Case("olmo2", {**SMALL}),
    "olmo2-biased": Case("olmo2", {**WIDE, "attention_bias": True}),
    "olmo3": Case("olmo3", {**FOUR_LAYERS, "sliding_window": WINDOW, "rope_scaling": YARN}),
    "olmo3-older-file": Case(
        "olmo3",
        {**FOUR_LAYERS, "sliding_window": WINDOW, "rope_scaling": YARN},
        lambda config, tensors: (
            {**config, "rope_parameters": None, "rope_scaling": YARN, "layer_types": None},
            tensors,
        ),
    ),
    "glm": Case("glm", {**SMALL, "head_dim": 16}),
    "glm-older-file": Case("glm", {**WIDE}, without("rope_parameters", "attention_bias")),
    "glm4": Case("glm4", {**SMALL, "head_dim": 16}),
    "glm4-rotary-quarter": Case(
        "glm4", {**WIDE, "head_dim": 24, "attention_bias": False, "partial_rotary_factor": 0.25}
    ),
    "internlm": Case("llama", {**MHA, "attention_bias": True, "rope_theta": 5000.0}, converted.to_internlm),
    "internlm-no-bias": Case("llama", {**MHA}, converted.to_internlm),
    "internlm2": Case("llama", {**SMALL}, converted.to_internlm2),
    "internlm2-dynamic": Case("llama", {**SMALL, "rope_scaling": DYNAMIC}, converted.to_internlm2),
    "internlm2-biased": Case(
        "llama", {**SMALL, "num_attention_heads": 12, "attention_bias": True}, converted.to_internlm2
    ),
    "internlm3": Case("llama", {**WIDE}, converted.to_internlm3),
    "internlm3-biased": Case("llama", {**WIDE, "attention_bias": True, "mlp_bias": True}, converted.to_internlm3),
    "baichuan-7b": Case("llama", {**MHA}, converted.to_baichuan),
    "baichuan-13b": Case("llama", {**MHA}, converted.to_baichuan_13b, converted.AlibiLlama),
    "qwen": Case("qwen2", {**MHA, "rope_theta": 5000.0}, converted.to_qwen),
    "chatglm": Case("glm", {**SMALL, "head_dim": 16}, converted.to_chatglm),
    "chatglm-wide-heads": Case("glm", {**WIDE, "rope_theta": 5_000_000.0}, converted.to_chatglm),
    "chatglm-no-groups": Case(
        "glm", {**MHA, "num_key_value_heads": 6, "head_dim": 8, "attention_bias": False}, converted.to_chatglm
    ),
    "minicpm": Case("granite", {**SMALL, **MINICPM, "tie_word_embeddings": True}, converted.to_minicpm),
    "minicpm-untied": Case("granite", {**SMALL, **MINICPM, "num_key_value_heads": 6}, converted.to_minicpm),
    "yi": Case("llama", {**SMALL}, lambda config, tensors: ({**config, "model_type": "Yi"}, tensors)),
    "aquila": Case("llama", {**MHA}, lambda config, tensors: ({**config, "model_type": "aquila"}, tensors)),
    "xverse": Case("llama", {**MHA}, lambda config, tensors: ({**config, "model_type": "xverse"}, tensors)),
    "deci": pruned.DECI,
    "llama-pruned": pruned.LLAMA,
    "qwen2-pruned": pruned.QWEN2,
    "nemotron-nas": pruned.NEMOTRON_NAS,
}
