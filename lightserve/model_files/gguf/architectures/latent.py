"""Models with latent attention beside those of DeepSeek V2 and V3: with indexers, or with experts by softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures.architecture import Names
from lightserve.model_files.gguf.architectures.experts import (
    DEEPSEEK_TENSORS,
    DEEPSEEK_V3,
    SIGMOID,
    SOFTMAX,
    check_gating,
    deepseek_v3_fields,
)
from lightserve.model_files.gguf.fields import bad_value, count, flag, layer_count, number
from lightserve.model_files.gguf.header import GgufHeader

INDEXER_TYPES = "attention.indexer.types"
# Files of GLM-5.2 and later that do not say which layers have indexers: every fourth one behind the first three.
LONG_CONTEXT, FIRST_INDEXERS, INDEXERS_EVERY = 1 << 20, 3, 4


def sparse_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SIGMOID, default=SIGMOID)
    return {
        **deepseek_v3_fields(header),
        "norm_topk_prob": flag(header, "expert_weights_norm", True),
        "index_n_heads": count(header, "attention.indexer.head_count"),
        "index_head_dim": count(header, "attention.indexer.key_length"),
        "index_topk": count(header, "attention.indexer.top_k"),
    }


def glm_dsa_fields(header: GgufHeader) -> dict[str, Any]:
    layers = layer_count(header)
    given = header.metadata.get(f"{header.architecture}.{INDEXER_TYPES}")
    if given is None:
        is_long = number(header, "context_length") >= LONG_CONTEXT
        given = [not is_long or _has_indexer_of_glm_5_2(layer) for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers:
        raise bad_value(header, INDEXER_TYPES, given, f"true or false for each of {layers} layers")
    types = ["full" if is_full else "shared" for is_full in given[:layers]]
    return {**sparse_fields(header), "indexer_types": types}


def _has_indexer_of_glm_5_2(layer: int) -> bool:
    return layer < FIRST_INDEXERS or (layer - FIRST_INDEXERS + 1) % INDEXERS_EVERY == 0


def mistral4_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SOFTMAX, default=SOFTMAX)
    fields = deepseek_v3_fields(header)
    rope = {"rope_type": "default", **(fields["rope_scaling"] or {}), "rope_theta": fields["rope_theta"]}
    beta = number(header, "attention.temperature_scale", 0)
    scaled = {**rope, "llama_4_scaling_beta": beta} if beta else rope
    return {
        **fields,
        "norm_topk_prob": flag(header, "expert_weights_norm", True),
        "rope_scaling": None,
        "rope_parameters": scaled,
    }


_SPARSE_TENSORS: Names = {
    **DEEPSEEK_TENSORS,
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    model_class="DeepseekV32ForCausalLM",
    config_fields=sparse_fields,
    tensors=_SPARSE_TENSORS,
    applies=lambda header: True,
)
_GLM_DSA = replace(
    _DEEPSEEK_V32, model_type="glm_moe_dsa", model_class="GlmMoeDsaForCausalLM", config_fields=glm_dsa_fields
)
_MISTRAL4 = replace(
    DEEPSEEK_V3,
    model_type="mistral4",
    model_class="Mistral4ForCausalLM",
    config_fields=mistral4_fields,
    options=DEEPSEEK_V3.options | {"attention.temperature_scale"},
    applies=lambda header: True,
)

ARCHITECTURES = {
    "deepseek32": (_DEEPSEEK_V32,),
    "glm-dsa": (_GLM_DSA,),
    "mistral4": (_MISTRAL4,),
}
