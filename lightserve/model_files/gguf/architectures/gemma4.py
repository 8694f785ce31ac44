"""Gemma 4: layers that see all tokens have heads of another size, and their positions have factors in a tensor."""

from __future__ import annotations

import math
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, Names
from lightserve.model_files.gguf.fields import (
    RMS_EPS,
    WINDOW,
    bad_value,
    count,
    counts,
    has_tensor,
    largest,
    number,
    number_or_none,
    unsupported,
    window_fields,
)
from lightserve.model_files.gguf.header import GgufHeader

FREQUENCY_FACTORS, FULL = "rope_freqs.weight", "full_attention"
PER_LAYER_TABLE = "per_layer_token_embd.weight"
TENSORS: Names = {
    **names.QWEN3,
    **names.NORMS_BEHIND,
    "ffn_norm": "pre_feedforward_layernorm",
    "layer_output_scale.weight": "layer_scalar",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": ("experts.*.gate_proj", "experts.*.up_proj"),
    "ffn_gate_exps": "experts.*.gate_proj",
    "ffn_up_exps": "experts.*.up_proj",
    "ffn_down_exps": "experts.*.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}


def gemma4_fields(header: GgufHeader) -> dict[str, Any]:
    """As the files of the hub have them."""
    fields = window_fields(header)
    if "layer_types" not in fields:
        raise bad_value(header, f"{WINDOW}_pattern", None, "a list with true for every layer with a window")
    widths, table = counts(header, "feed_forward_length"), header.tensors.get(PER_LAYER_TABLE)
    return {
        **fields,
        **_heads(header, fields["layer_types"]),
        **_experts(header),
        "intermediate_size": min(widths) if isinstance(widths, list) else widths,
        "use_double_wide_mlp": isinstance(widths, list),
        "num_kv_shared_layers": int(number(header, "attention.shared_kv_layers", 0)),
        "hidden_size_per_layer_input": int(number(header, "embedding_length_per_layer_input", 0)),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "rope_parameters": _ropes(header),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": number(header, "final_logit_softcapping", 0) or None,
        "rms_norm_eps": number(header, RMS_EPS),
        "attention_bias": has_tensor(header, "attn_q.bias"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _heads(header: GgufHeader, layer_types: list[str]) -> dict[str, Any]:
    """``key_length`` is that of layers that see all tokens. Those of large models have no projection of values."""
    kv_heads = counts(header, "attention.head_count_kv", count(header, "attention.head_count"))
    of_full = [layer for layer, kind in enumerate(layer_types) if kind == FULL]
    fields = {
        "head_dim": count(header, "attention.key_length_swa"),
        "global_head_dim": count(header, "attention.key_length"),
        "attention_k_eq_v": not any(f"blk.{layer}.attn_v.weight" in header.tensors for layer in of_full),
    }
    if not isinstance(kv_heads, list):
        return {**fields, "num_key_value_heads": kv_heads}
    global_heads = {kv_heads[layer] for layer in of_full}
    if len(global_heads) > 1:
        raise bad_value(header, "attention.head_count_kv", kv_heads, "the same number in all layers without a window")
    return {**fields, "num_key_value_heads": largest(kv_heads), "num_global_key_value_heads": global_heads.pop()}


def _ropes(header: GgufHeader) -> dict[str, Any]:
    """Frequencies that a head does not use have factors that make their angles 0."""
    if FREQUENCY_FACTORS not in header.tensors:
        raise unsupported(header, f"tensor {FREQUENCY_FACTORS} is missing; convert the model again")
    factors = header.floats(FREQUENCY_FACTORS)
    share = sum(factor == 1 for factor in factors) / len(factors)
    head_dim = count(header, "attention.key_length_swa")
    dim = number_or_none(header, "rope.dimension_count_swa") or head_dim
    return {
        FULL: {
            "rope_type": "proportional",
            "rope_theta": number(header, "rope.freq_base", 1_000_000.0),
            "partial_rotary_factor": math.nextafter(share, 1.0),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": number(header, "rope.freq_base_swa", 10_000.0),
            "partial_rotary_factor": dim / head_dim,
        },
    }


def _experts(header: GgufHeader) -> dict[str, Any]:
    if not number(header, "expert_count", 0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count(header, "expert_count"),
        "top_k_experts": count(header, "expert_used_count"),
        "moe_intermediate_size": count(header, "expert_feed_forward_length"),
    }


ARCHITECTURES = {
    "gemma4": (
        GgufArchitecture(
            "gemma4_text",
            "Gemma4ForCausalLM",
            gemma4_fields,
            names.LAYERS,
            TENSORS,
            options=frozenset({WINDOW, "expert_count", "final_logit_softcapping"}),
        ),
    ),
}
