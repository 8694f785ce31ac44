"""Llama and the models that differ from it in few places."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, JoinedTensor, Names
from lightserve.model_files.gguf.fields import (
    RMS_EPS,
    WINDOW,
    attention_fields,
    layer_count,
    number,
    number_or_none,
    window_fields,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import rope_fields, with_mscale

BAICHUAN_13B_LAYERS = 40
SCALES = frozenset({"embedding_scale", "residual_scale", "logit_scale"})


def rotary_decoder_fields(header: GgufHeader) -> dict[str, Any]:
    fields = attention_fields(header)
    rope = rope_fields(header, fields["head_dim"])
    return fields | rope | {"hidden_act": "silu", "rms_norm_eps": number(header, RMS_EPS)}


def mistral_fields(header: GgufHeader) -> dict[str, Any]:
    return rotary_decoder_fields(header) | window_fields(header)


def ministral3_fields(header: GgufHeader) -> dict[str, Any]:
    fields = mistral_fields(header)
    rope = with_mscale(fields["rope_scaling"], number_or_none(header, "rope.scaling.yarn_log_multiplier")) or {}
    beta = number(header, "attention.temperature_scale")
    rope = {"rope_type": "default", **rope, "rope_theta": fields["rope_theta"], "llama_4_scaling_beta": beta}
    return fields | {"rope_scaling": None, "rope_parameters": rope}


def has_temperature(header: GgufHeader) -> bool:
    return bool(number(header, "attention.temperature_scale", 0))


def has_window(header: GgufHeader) -> bool:
    return bool(number(header, WINDOW, 0))


def arcee_fields(header: GgufHeader) -> dict[str, Any]:
    return rotary_decoder_fields(header) | {"hidden_act": "relu2"}


def minicpm_fields(header: GgufHeader) -> dict[str, Any]:
    """The first files have no factors; these are MiniCPM's."""
    hidden, layers = number(header, "embedding_length"), layer_count(header)
    return rotary_decoder_fields(header) | {
        "attention_bias": False,  # the converter does not write the rows of a bias in the order of the weight
        "scale_emb": number(header, "embedding_scale", 12.0),
        "scale_depth": number(header, "residual_scale", 1.4 / math.sqrt(layers)) * math.sqrt(layers),
        "dim_model_base": hidden / number(header, "logit_scale", hidden / 256),
    }


def granite_fields(header: GgufHeader) -> dict[str, Any]:
    fields = rotary_decoder_fields(header)
    return fields | {
        "attention_multiplier": number(header, "attention.scale", 0) or fields["head_dim"] ** -0.5,
        "embedding_multiplier": number(header, "embedding_scale", 1.0),
        "residual_multiplier": number(header, "residual_scale", 1.0),
        "logits_scaling": number(header, "logit_scale"),
    }


def baichuan_fields(header: GgufHeader) -> dict[str, Any]:
    """Only the number of layers tells the 13B models, which have ALiBi."""
    fields = rotary_decoder_fields(header)
    if layer_count(header) != BAICHUAN_13B_LAYERS:
        return fields
    return fields | {"max_position_embeddings": None, "model_max_length": number(header, "context_length")}


def qwen_fields(header: GgufHeader) -> dict[str, Any]:
    """The file has no seq_length, so requests may be as long as max_position_embeddings."""
    fields = attention_fields(header)
    eps = number_or_none(header, "attention.layer_norm_epsilon")  # in files of newer converters
    return {
        **fields,
        **rope_fields(header, fields["head_dim"]),
        "rms_norm_eps": number(header, RMS_EPS, eps),
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
    }


def seed_oss_fields(header: GgufHeader) -> dict[str, Any]:
    has_bias = any(name.endswith(".attn_output.bias") for name in header.tensors)
    return rotary_decoder_fields(header) | {"attention_out_bias": has_bias}


QWEN_TENSORS: Names = {
    **{key: names.GPT2[key] for key in ("token_embd", "output_norm", "output", "attn_norm", "ffn_norm")},
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_gate": "mlp.w2",
    "ffn_up": "mlp.w1",
    "ffn_down": "mlp.c_proj",
}
_WITHOUT_QKV: Names = {name: value for name, value in names.LLAMA.items() if name not in ("attn_q", "attn_k", "attn_v")}
_W_PACK = JoinedTensor("self_attn.W_pack.weight", ("attn_q.weight", "attn_k.weight", "attn_v.weight"))

LLAMA = GgufArchitecture(
    "llama", "LlamaForCausalLM", rotary_decoder_fields, names.LAYERS, names.LLAMA, row_orders=names.PERMUTED_QK
)
_MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    model_class="MistralForCausalLM",
    config_fields=mistral_fields,
    options=frozenset({WINDOW}),
)
_MINISTRAL3 = replace(
    _MISTRAL,
    model_type="ministral3",
    model_class="Ministral3ForCausalLM",
    config_fields=ministral3_fields,
    options=frozenset({WINDOW, "attention.temperature_scale"}),
    applies=has_temperature,
)
_MINICPM = replace(
    LLAMA, model_type="minicpm", model_class="MiniCPMForCausalLM", config_fields=minicpm_fields, options=SCALES
)
GRANITE = replace(
    LLAMA,
    model_type="granite",
    model_class="GraniteForCausalLM",
    config_fields=granite_fields,
    options=SCALES | {"attention.scale"},
)
_BAICHUAN = replace(
    LLAMA,
    model_type="baichuan",
    model_class="BaichuanForCausalLM",
    config_fields=baichuan_fields,
    tensors=_WITHOUT_QKV,
    joined=(_W_PACK,),
    expanded=frozenset({"output"}),  # Baichuan 2 divides the rows of its head by their length
)
_QWEN2 = GgufArchitecture("qwen2", "Qwen2ForCausalLM", rotary_decoder_fields, names.LAYERS, names.LLAMA)
_QWEN3 = replace(_QWEN2, model_type="qwen3", model_class="Qwen3ForCausalLM", tensors=names.QWEN3)
_SEED_OSS = replace(
    _QWEN2,
    model_type="seed_oss",
    model_class="SeedOssForCausalLM",
    config_fields=seed_oss_fields,
    tensors=names.LLAMA | {"post_attention_norm": "post_attention_layernorm"},
)

ARCHITECTURES = {
    "llama": (replace(_MISTRAL, applies=has_window), LLAMA),
    "deci": (LLAMA,),  # pruned models
    "internlm2": (LLAMA,),  # q, k and v are separate tensors, as in Llama
    "xverse": (LLAMA,),
    "mistral3": (_MINISTRAL3, _MISTRAL),
    "arcee": (replace(LLAMA, model_type="arcee", model_class="ArceeForCausalLM", config_fields=arcee_fields),),
    "smollm3": (replace(LLAMA, model_type="smollm3", model_class="SmolLM3ForCausalLM"),),
    "minicpm": (_MINICPM,),
    "granite": (GRANITE,),
    "baichuan": (_BAICHUAN,),
    "qwen": (GgufArchitecture("qwen", "QWenLMHeadModel", qwen_fields, "transformer.h", QWEN_TENSORS),),
    "qwen2": (_QWEN2,),
    "qwen2vl": (_QWEN2,),  # without the vision part, which is a file of its own
    "qwen3": (_QWEN3,),
    "qwen3vl": (_QWEN3,),
    "seed_oss": (_SEED_OSS,),
}
