"""The architectures of GGUF files that can be served.

A new one needs an entry in ARCHITECTURES, and one in gguf_tokenizer.PRE_TOKENIZERS if its tokenizer splits text in a
way of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from lightserve.model_files.gguf_fields import (
    bloom_fields,
    gemma3_fields,
    moe_fields,
    rotary_decoder_fields,
    unsupported,
)
from lightserve.model_files.gguf_header import GgufHeader


class RowOrder(Enum):
    """In which order llama.cpp's converter writes the rows of a tensor, if not in that of transformers."""

    ROTARY_PAIRS = auto()  # in each head, the two halves of the rotary dimensions alternate
    QKV_BLOCKS = auto()  # all rows of q, then of k, then of v, instead of q, k and v of each head


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How the config and the tensors of a GGUF file become those of a transformers model."""

    model_type: str  # in transformers and in models/registry.py
    model_class: str
    config_fields: Callable[[GgufHeader], dict[str, Any]]
    layers: str  # the prefix of a layer's tensors in transformers, without its number
    # llama.cpp's name, without blk.N and .weight: the name in transformers; * stands for the number of an expert, whose
    # tensors llama.cpp stores as one
    tensors: Mapping[str, str]
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)  # by llama.cpp's name
    copies: frozenset[str] = frozenset()  # tensors that repeat another one and are not loaded
    has_norms_plus_one: bool = False  # norms hold 1 + weight, where transformers has the weight


_LLAMA_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_TENSORS = _LLAMA_TENSORS | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3_TENSORS = _QWEN3_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOOM_TENSORS = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

_ROUTED_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_SHARED_TENSORS = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_TENSORS = _LLAMA_TENSORS | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}

# by general.architecture
ARCHITECTURES = {
    "llama": GgufArchitecture(  # Mistral too
        "llama",
        "LlamaForCausalLM",
        rotary_decoder_fields,
        "model.layers",
        _LLAMA_TENSORS,
        row_orders={"attn_q": RowOrder.ROTARY_PAIRS, "attn_k": RowOrder.ROTARY_PAIRS},
    ),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM", rotary_decoder_fields, "model.layers", _LLAMA_TENSORS),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM", rotary_decoder_fields, "model.layers", _QWEN3_TENSORS),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        gemma3_fields,
        "model.layers",
        _GEMMA3_TENSORS,
        has_norms_plus_one=True,
    ),
    "bloom": GgufArchitecture(
        "bloom",
        "BloomForCausalLM",
        bloom_fields,
        "transformer.h",
        _BLOOM_TENSORS,
        row_orders={"attn_qkv": RowOrder.QKV_BLOCKS},
        copies=frozenset({"output"}),  # of the embedding
    ),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        moe_fields,
        "model.layers",
        _LLAMA_TENSORS | _ROUTED_TENSORS | _SHARED_TENSORS,
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", moe_fields, "model.layers", _QWEN3_TENSORS | _ROUTED_TENSORS
    ),
    "olmoe": GgufArchitecture(
        "olmoe", "OlmoeForCausalLM", moe_fields, "model.layers", _QWEN3_TENSORS | _ROUTED_TENSORS
    ),
}


# The same for files that have experts, where the architecture is called like that of dense models.
WITH_EXPERTS = {
    "llama": GgufArchitecture(
        "mixtral",
        "MixtralForCausalLM",
        moe_fields,
        "model.layers",
        _MIXTRAL_TENSORS,
        row_orders=ARCHITECTURES["llama"].row_orders,
    ),
}


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    name = header.metadata.get("general.architecture")
    if name in WITH_EXPERTS and header.metadata.get(f"{name}.expert_count", 0):
        return WITH_EXPERTS[name]
    if name not in ARCHITECTURES:
        raise unsupported(header, f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
