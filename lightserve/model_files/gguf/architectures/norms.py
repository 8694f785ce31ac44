"""Rotary decoders with other norms than Llama, or with windows in some layers: Gemma, Cohere, EXAONE, OLMo, GLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, Names
from lightserve.model_files.gguf.architectures.llama_like import LLAMA, has_window, rotary_decoder_fields
from lightserve.model_files.gguf.fields import (
    LAYER_EPS,
    RMS_EPS,
    WINDOW,
    attention_fields,
    bad_value,
    has_tensor,
    layer_count,
    number,
    window_fields,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import rope_fields

GEMMA2_27B_LAYERS = 46
GEMMA3_27B_LAYERS = 62


def gemma_fields(header: GgufHeader) -> dict[str, Any]:
    return rotary_decoder_fields(header) | {"hidden_act": "gelu_pytorch_tanh"}


def gemma2_fields(header: GgufHeader) -> dict[str, Any]:
    softcaps = {key: number(header, key, 0) or None for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    number(header, WINDOW)
    return _gemma(header, GEMMA2_27B_LAYERS) | window_fields(header) | softcaps


def gemma3_fields(header: GgufHeader) -> dict[str, Any]:
    number(header, WINDOW)
    return {
        **_gemma(header, GEMMA3_27B_LAYERS),
        "sliding_window_pattern": 6,
        **window_fields(header),
        "rope_theta": number(header, "rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": number(header, "rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": number(header, "final_logit_softcapping", 0) or None,
    }


def _gemma(header: GgufHeader, layers_of_27b: int) -> dict[str, Any]:
    """The file has no scale for attention: the 27B model divides the hidden size by the heads, others take head_dim."""
    fields = gemma_fields(header)
    per_head = number(header, "embedding_length") // number(header, "attention.head_count")
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if layer_count(header) == layers_of_27b else fields["head_dim"],
    }


def cohere_fields(header: GgufHeader) -> dict[str, Any]:
    fields = attention_fields(header)
    return {
        **fields,
        **rope_fields(header, fields["head_dim"]),
        "hidden_act": "silu",
        "rms_norm_eps": number(header, LAYER_EPS),
        "logit_scale": number(header, "logit_scale"),
        "use_qk_norm": has_tensor(header, "attn_q_norm.weight"),
    }


def cohere2_fields(header: GgufHeader) -> dict[str, Any]:
    number(header, WINDOW)
    return cohere_fields(header) | window_fields(header)


def exaone4_fields(header: GgufHeader) -> dict[str, Any]:
    """Without a window all layers attend to everything."""
    return rotary_decoder_fields(header) | window_fields(header)


def olmo_fields(header: GgufHeader) -> dict[str, Any]:
    fields = attention_fields(header)
    return {
        **fields,
        **rope_fields(header, fields["head_dim"]),
        "hidden_act": "silu",
        "attention_bias": False,  # the converter does not write the rows of a bias in the order of the weight
        "rms_norm_eps": number(header, LAYER_EPS),
        "clip_qkv": number(header, "attention.clamp_kqv", 0) or None,
    }


def olmo3_fields(header: GgufHeader) -> dict[str, Any]:
    return rotary_decoder_fields(header) | window_fields(header)


def glm_fields(header: GgufHeader) -> dict[str, Any]:
    fields = attention_fields(header)
    rope = rope_fields(header, fields["head_dim"], can_be_partial=True)
    eps = number(header, RMS_EPS)
    return {"partial_rotary_factor": 1.0, **fields, **rope, "hidden_act": "silu", "rms_norm_eps": eps}


def chatglm_fields(header: GgufHeader) -> dict[str, Any]:
    fields = glm_fields(header)
    dim, head_dim = number(header, "rope.dimension_count"), fields["head_dim"]
    if 2 * dim != head_dim:
        raise bad_value(header, "rope.dimension_count", dim, f"{head_dim // 2}, half of a head")
    return fields | {
        "kv_channels": head_dim,
        "multi_query_attention": True,
        "multi_query_group_num": fields["num_key_value_heads"],
        "add_qkv_bias": has_tensor(header, "attn_qkv.bias"),
        "add_bias_linear": has_tensor(header, "attn_output.bias"),
    }


def has_fused_qkv(header: GgufHeader) -> bool:
    return has_tensor(header, "attn_qkv.weight")


_GEMMA2_TENSORS: Names = names.LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM_TENSORS: Names = {**names.LLAMA, "ffn_up": "mlp.gate_up_proj"}
_CHATGLM_TENSORS: Names = {
    "token_embd": "transformer.embedding.word_embeddings",
    "output_norm": "transformer.encoder.final_layernorm",
    "output": "transformer.output_layer",
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_WINDOW = frozenset({WINDOW})

_GEMMA = GgufArchitecture("gemma", "GemmaForCausalLM", gemma_fields, names.LAYERS, names.LLAMA, has_norms_plus_one=True)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    model_class="Gemma2ForCausalLM",
    config_fields=gemma2_fields,
    tensors=_GEMMA2_TENSORS,
    options=_WINDOW | {"attn_logit_softcapping", "final_logit_softcapping"},
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    model_class="Gemma3ForCausalLM",
    config_fields=gemma3_fields,
    tensors=_GEMMA2_TENSORS | names.QK_NORMS,
    options=_WINDOW | {"final_logit_softcapping"},
)
_COHERE = GgufArchitecture(
    "cohere", "CohereForCausalLM", cohere_fields, names.LAYERS, names.QWEN3, options=frozenset({"logit_scale"})
)
_COHERE2 = replace(
    _COHERE,
    model_type="cohere2",
    model_class="Cohere2ForCausalLM",
    config_fields=cohere2_fields,
    options=_WINDOW | {"logit_scale"},
)
_OLMO = replace(
    LLAMA,
    model_type="olmo",
    model_class="OlmoForCausalLM",
    config_fields=olmo_fields,
    options=frozenset({"attention.clamp_kqv"}),
)
_OLMO2 = GgufArchitecture(
    "olmo2", "Olmo2ForCausalLM", rotary_decoder_fields, names.LAYERS, names.QWEN3 | names.NORMS_BEHIND
)
_OLMO3 = replace(
    _OLMO2,
    model_type="olmo3",
    model_class="Olmo3ForCausalLM",
    config_fields=olmo3_fields,
    options=_WINDOW,
    applies=has_window,
)
_EXAONE4 = replace(
    _OLMO2,
    model_type="exaone4",
    model_class="Exaone4ForCausalLM",
    config_fields=exaone4_fields,
    options=_WINDOW,
)
_CHATGLM = GgufArchitecture(
    "chatglm",
    "ChatGLMModel",
    chatglm_fields,
    "transformer.encoder.layers",
    _CHATGLM_TENSORS,
    applies=has_fused_qkv,
)
_GLM = GgufArchitecture("glm", "GlmForCausalLM", glm_fields, names.LAYERS, _GLM_TENSORS)
_GLM4 = replace(
    _GLM,
    model_type="glm4",
    model_class="Glm4ForCausalLM",
    tensors=_GLM_TENSORS | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
)

ARCHITECTURES = {
    "gemma": (_GEMMA,),
    "gemma2": (_GEMMA2,),
    "gemma3": (_GEMMA3,),
    "command-r": (_COHERE,),
    "cohere2": (_COHERE2,),
    "exaone4": (_EXAONE4,),
    "olmo": (_OLMO,),
    "olmo2": (_OLMO3, _OLMO2),
    "chatglm": (_CHATGLM, _GLM),
    "glm4": (_GLM4,),
}
