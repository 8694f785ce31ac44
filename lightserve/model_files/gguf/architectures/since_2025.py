"""Models of 2025 with files of their own: ERNIE 4.5, Hunyuan, Ling, dots.llm1 and MiMo V2."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, JoinedTensor, Names
from lightserve.model_files.gguf.architectures.experts import (
    DEEPSEEK_EXPERTS,
    SHARED_LINEARS,
    SIGMOID,
    SOFTMAX,
    check_gating,
    deepseek_expert_fields,
    expert_fields,
)
from lightserve.model_files.gguf.architectures.llama_like import rotary_decoder_fields
from lightserve.model_files.gguf.fields import (
    RMS_EPS,
    WINDOW,
    WINDOW_PATTERN,
    attention_fields,
    bad_value,
    count,
    counts,
    flag,
    has_tensor,
    layer_count,
    number,
    window_fields,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import rope_fields

VALUE_SCALE = 0.707  # of MiMo-V2-Flash, whose first files do not have it


def ernie_fields(header: GgufHeader) -> dict[str, Any]:
    fields = rotary_decoder_fields(header)
    return fields | {"use_bias": fields["attention_bias"]}


def ernie_moe_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SOFTMAX, default=SOFTMAX)
    sparse = [layer for layer, is_sparse in enumerate(_sparse_layers(header)) if is_sparse]
    return {
        **ernie_fields(header),
        **expert_fields(header),
        "moe_num_shared_experts": int(number(header, "expert_shared_count", 0)),
        "moe_layer_interval": count(header, "interleave_moe_layer_step", 1),
        "moe_layer_start_index": int(number(header, "leading_dense_block_count", 0)),
        "moe_layer_end_index": sparse[-1] if sparse else -1,
    }


def hunyuan_fields(header: GgufHeader) -> dict[str, Any]:
    """The base of the rope is scaled already."""
    return rotary_decoder_fields(header) | {"use_qk_norm": has_tensor(header, "attn_q_norm.weight")}


def hunyuan_moe_fields(header: GgufHeader) -> dict[str, Any]:
    shared = int(number(header, "expert_shared_count", 1))
    return {**hunyuan_fields(header), **expert_fields(header), "num_shared_expert": shared}


def dots1_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SIGMOID, default=SIGMOID)
    return rotary_decoder_fields(header) | deepseek_expert_fields(header)


def ling_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SOFTMAX, default=SOFTMAX)
    return {**rotary_decoder_fields(header), **deepseek_expert_fields(header), "use_qkv_bias": False}


def ling2_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SIGMOID, default=SIGMOID)
    fields = attention_fields(header)
    return {
        "partial_rotary_factor": 1.0,
        **fields,
        **rope_fields(header, fields["head_dim"], can_be_partial=True),
        **deepseek_expert_fields(header),
        "norm_topk_prob": flag(header, "expert_weights_norm", True),
        "use_qkv_bias": has_tensor(header, "attn_qkv.bias"),
        "use_qk_norm": has_tensor(header, "attn_q_norm.weight"),
        "moe_router_enable_expert_bias": has_tensor(header, "exp_probs_b.bias"),
        "score_function": "sigmoid",
        "hidden_act": "silu",
        "rms_norm_eps": number(header, RMS_EPS),
    }


def afmoe_fields(header: GgufHeader) -> dict[str, Any]:
    """Every fourth layer has no window, as in llama.cpp, which scales all embeddings."""
    check_gating(header, SIGMOID, default=SIGMOID)
    has_norm = flag(header, "expert_weights_norm", True)
    return {
        **rotary_decoder_fields(header),
        **deepseek_expert_fields(header),
        **window_fields(header),
        "sliding_window": count(header, WINDOW),
        "mup_enabled": True,
        "norm_topk_prob": has_norm,
        "route_norm": has_norm,
    }


def mimo_fields(header: GgufHeader) -> dict[str, Any]:
    """As the folders of the hub have them, whose window is without the token itself."""
    key_dim = count(header, "attention.key_length")
    rotary_dim = count(header, "rope.dimension_count", key_dim)
    theta = number(header, "rope.freq_base")
    return {
        **deepseek_expert_fields(header),
        **_kinds_of_layers(header),
        "norm_topk_prob": True,  # as llama.cpp computes it
        "head_dim": key_dim,
        "v_head_dim": count(header, "attention.value_length", key_dim),
        "attention_value_scale": number(header, "attention.value_scale", VALUE_SCALE),
        "attention_bias": has_tensor(header, "attn_q.bias"),
        "rope_theta": theta,
        "swa_rope_theta": number(header, "rope.freq_base_swa", theta),
        "partial_rotary_factor": math.nextafter(rotary_dim / key_dim, 1.0),
        "moe_layer_freq": [int(is_sparse) for is_sparse in _sparse_layers(header)],
        "hidden_act": "silu",
        "layernorm_epsilon": number(header, RMS_EPS),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _kinds_of_layers(header: GgufHeader) -> dict[str, Any]:
    layers, pattern = layer_count(header), header.metadata.get(f"{header.architecture}.{WINDOW_PATTERN}")
    if not isinstance(pattern, list) or len(pattern) < layers:
        raise bad_value(header, WINDOW_PATTERN, pattern, f"0 or 1 for each of {layers} layers")
    is_windowed = [bool(kind) for kind in pattern[:layers]]
    heads = counts(header, "attention.head_count_kv")
    by_layer = heads if isinstance(heads, list) else [heads] * layers
    sinks = [f"blk.{layer}.attn_sinks.weight" in header.tensors for layer in range(layers)]
    kinds = set(zip(is_windowed, by_layer, sinks, strict=True))
    full, windowed = ([kind for kind in kinds if kind[0] is value] for value in (False, True))
    if len(full) > 1 or len(windowed) > 1:
        raise bad_value(header, "attention.head_count_kv", heads, "layers of two kinds, with a window and without")
    (_, of_full, full_sinks), (_, of_windowed, windowed_sinks) = (full or windowed)[0], (windowed or full)[0]
    window = count(header, WINDOW)
    return {
        "hybrid_layer_pattern": [int(value) for value in is_windowed],
        "num_key_value_heads": of_full,
        "swa_num_key_value_heads": of_windowed,
        "sliding_window": window,
        "sliding_window_size": window,
        "add_full_attention_sink_bias": full_sinks,
        "add_swa_attention_sink_bias": windowed_sinks,
    }


def _sparse_layers(header: GgufHeader) -> list[bool]:
    return [f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in range(layer_count(header))]


_EXPERTS = frozenset({"expert_count"})
_ERNIE = GgufArchitecture("ernie4_5", "Ernie4_5ForCausalLM", ernie_fields, names.LAYERS, names.LLAMA)
_HUNYUAN = GgufArchitecture(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    hunyuan_fields,
    names.LAYERS,
    {**names.LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
)

_LING_TENSORS: Names = {
    **{name: value for name, value in names.LLAMA.items() if name not in ("attn_q", "attn_k", "attn_v")},
    **DEEPSEEK_EXPERTS,
    "token_embd": "model.word_embeddings",
    "attn_output": "attention.dense",
}
_LING = GgufArchitecture(
    "bailing_moe",
    "BailingMoeForCausalLM",
    ling_fields,
    names.LAYERS,
    _LING_TENSORS,
    row_orders=names.PERMUTED_QK,
    joined=(JoinedTensor("attention.query_key_value.weight", ("attn_q.weight", "attn_k.weight", "attn_v.weight")),),
    options=_EXPERTS,
)

ARCHITECTURES = {
    "ernie4_5": (_ERNIE,),
    "bailingmoe": (_LING,),
    "bailingmoe2": (
        replace(
            _LING,
            model_type="bailing_moe_v2",
            model_class="BailingMoeV2ForCausalLM",
            config_fields=ling2_fields,
            tensors={
                **_LING_TENSORS,
                "attn_qkv": "attention.query_key_value",
                "attn_q_norm": "attention.query_layernorm",
                "attn_k_norm": "attention.key_layernorm",
                "exp_probs_b.bias": "mlp.gate.expert_bias",
            },
            row_orders={},
            joined=(),
        ),
    ),
    "dots1": (
        GgufArchitecture(
            "dots1",
            "Dots1ForCausalLM",
            dots1_fields,
            names.LAYERS,
            {**names.QWEN3, **DEEPSEEK_EXPERTS},
            options=_EXPERTS,
        ),
    ),
    "afmoe": (
        GgufArchitecture(
            "afmoe",
            "AfmoeForCausalLM",
            afmoe_fields,
            names.LAYERS,
            {
                **names.QWEN3,
                **DEEPSEEK_EXPERTS,
                "attn_gate": "self_attn.gate_proj",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_gate_inp": "mlp.router.gate",
                "exp_probs_b.bias": "mlp.expert_bias",
            },
            options=_EXPERTS | {WINDOW},
        ),
    ),
    "ernie4_5-moe": (
        replace(
            _ERNIE,
            model_type="ernie4_5_moe",
            model_class="Ernie4_5_MoeForCausalLM",
            config_fields=ernie_moe_fields,
            tensors={
                **names.LLAMA,
                **DEEPSEEK_EXPERTS,
                "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
            },
            options=_EXPERTS,
        ),
    ),
    "hunyuan-dense": (_HUNYUAN,),
    "hunyuan-moe": (
        replace(
            _HUNYUAN,
            model_type="hunyuan_v1_moe",
            model_class="HunYuanMoEV1ForCausalLM",
            config_fields=hunyuan_moe_fields,
            tensors={
                **_HUNYUAN.tensors,
                **names.EXPERTS,
                "ffn_gate_inp": "mlp.gate.wg",
                **{name: f"mlp.shared_mlp.{linear}" for name, linear in SHARED_LINEARS.items()},
            },
            options=_EXPERTS,
        ),
    ),
    "mimo2": (
        GgufArchitecture(
            "mimo_v2_flash",
            "MiMoV2FlashForCausalLM",
            mimo_fields,
            names.LAYERS,
            {**names.LLAMA, **DEEPSEEK_EXPERTS, "attn_sinks.weight": "self_attn.attention_sink_bias"},
            options=_EXPERTS | {WINDOW},
        ),
    ),
}
