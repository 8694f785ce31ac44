"""ERNIE 4.5, Hunyuan, Helium and other dense models since 2025."""

from __future__ import annotations

from typing import Any

from test.models.architectures.case import SMALL as SMALL_LLAMA, Case, Json, Tensors, without
from test.models.architectures.latent import LATENT, YARN

SMALL = {**SMALL_LLAMA, "num_hidden_layers": 2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {**SMALL, "hidden_size": 40, "num_attention_heads": 10, "head_dim": 12}
FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.2,
}
WINDOW = 24
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
APERTUS = {**SMALL, "dtype": "float32"}  # of the learned numbers
LIMIT = -1e-3
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}
FIXED_NTK = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10_000.0}


def _older_hunyuan(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As on the hub: rope_scaling with all its fields."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    unused = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    config["rope_scaling"] = {"type": "dynamic", "alpha": rope["alpha"], "factor": 1.0, **unused}
    return {**config, "use_qk_norm": True, "use_cla": False}, tensors


def _near_zero(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """The limit of xIELU: farther away it jumps at 0, and rounding decides on which side a number is."""
    limits = {name: tensor.new_tensor(LIMIT) for name, tensor in tensors.items() if name.endswith(".act_fn.eps")}
    return config, {**tensors, **limits}


def _with_limit_near_zero(hf: Any) -> Any:
    for layer in hf.model.layers:
        layer.mlp.act_fn.eps.fill_(LIMIT)
    return hf


def _older_apertus(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """Without rotary positions and activation, which have defaults."""
    return _near_zero({key: config[key] for key in config if key not in ("rope_parameters", "hidden_act")}, tensors)


CASES = {
    "ernie4_5": Case("ernie4_5", {**SMALL, "head_dim": 16, "tie_word_embeddings": True}),
    "ernie4_5-biased": Case("ernie4_5", {**SMALL, "head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", {**WIDE, "rope_parameters": FIXED_NTK}, _older_hunyuan),
    "hunyuan_v1_dense-biased": Case("hunyuan_v1_dense", {**SMALL, "head_dim": 16, "attention_bias": True}),
    "helium": Case("helium", {**SMALL, "head_dim": 8}),
    "cwm": Case(
        "cwm",
        {**SMALL, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": WINDOW, "rope_parameters": LLAMA3},
        without("layer_types"),
    ),
    "hyperclovax": Case("hyperclovax", {**SMALL, **FACTORS}),
    "hyperclovax-no-post-norms": Case(
        "hyperclovax",
        {**SMALL, "attention_bias": True, "mlp_bias": True, "use_post_norm": False, "head_dim": 16},
        without("attention_multiplier"),
    ),
    "jais2": Case("jais2", {**SMALL}),
    "youtu": Case("youtu", {**LATENT, "rope_parameters": YARN}),
    "vaultgemma": Case(
        "vaultgemma",
        {
            **SMALL,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 30,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",
        },
    ),
    "apertus": Case("apertus", {**APERTUS, "rope_parameters": LLAMA3}, _near_zero, _with_limit_near_zero),
    "apertus-biased": Case("apertus", {**APERTUS, "attention_bias": True}, _older_apertus, _with_limit_near_zero),
    "granite_swa": Case(
        "granite_swa",
        {
            **SMALL,
            **FACTORS,
            "num_hidden_layers": 5,
            "sliding_window": WINDOW,
            "layer_rope_theta": [0, 1e4, 3e4, 0, 2e5],
        },
    ),
    "granite_swa-without": Case(
        "granite_swa",
        {**SMALL, **FACTORS, "num_hidden_layers": 2, "sliding_window": WINDOW, "tie_word_embeddings": False},
        without("layer_types", "layer_rope_theta"),
    ),
    "minicpm3": Case(
        "minicpm3",
        {**LATENT, "num_hidden_layers": 2, "scale_emb": 3.0, "scale_depth": 0.9, "dim_model_base": 20},
    ),
    "minicpm3-longrope": Case(
        "minicpm3",
        {
            **LATENT,
            "v_head_dim": None,
            "num_hidden_layers": 2,
            "rope_parameters": LONGROPE,
            "scale_emb": 3.0,
            "scale_depth": 0.9,
        },
        without("v_head_dim"),
    ),
}
