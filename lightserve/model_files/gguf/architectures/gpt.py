"""Models with LayerNorm and a plain feed-forward, and others with q, k and v in one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, Names, RowOrder
from lightserve.model_files.gguf.fields import (
    LAYER_EPS,
    RMS_EPS,
    WINDOW,
    attention_fields,
    bad_value,
    count,
    flag,
    has_tensor,
    number,
    unsupported,
    window_fields,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import rope_fields


def layer_norm_fields(header: GgufHeader) -> dict[str, Any]:
    return attention_fields(header) | {"rms_norm_eps": number(header, LAYER_EPS)}


def rotary_layer_norm_fields(header: GgufHeader) -> dict[str, Any]:
    """A part of each head may rotate. Where none is named, all of it does."""
    fields = layer_norm_fields(header)
    rope = rope_fields(header, fields["head_dim"], can_be_partial=True)
    return {"partial_rotary_factor": 1.0, **fields, **rope}


def bloom_fields(header: GgufHeader) -> dict[str, Any]:
    return {
        "n_layer": number(header, "block_count"),
        "n_head": number(header, "attention.head_count"),
        "layer_norm_epsilon": number(header, LAYER_EPS),
        "tie_word_embeddings": True,  # Bloom has no separate head, but a converter may have written a copy
    }


def starcoder_fields(header: GgufHeader) -> dict[str, Any]:
    """The converter writes one KV head for every model; the rows of a layer tell whether that is true."""
    fields, hidden = layer_norm_fields(header), count(header, "embedding_length")
    qkv = header.tensors.get("blk.0.attn_qkv.weight")
    if qkv is not None and qkv.shape[0] != hidden + 2 * fields["head_dim"]:
        raise unsupported(
            header,
            f"tensor blk.0.attn_qkv.weight has {qkv.shape[0]} rows, which are not those of one KV head; "
            "use the model's Hugging Face folder",
        )
    return fields | {"multi_query": True}


def starcoder2_fields(header: GgufHeader) -> dict[str, Any]:
    fields = rotary_layer_norm_fields(header)
    return {**fields, **window_fields(header), "use_bias": fields["attention_bias"]}


def falcon_fields(header: GgufHeader) -> dict[str, Any]:
    """Falcon 40B has two norms and several KV heads, 11B one norm and several KV heads, 7B one of both."""
    fields = rotary_layer_norm_fields(header)
    has_two_norms = has_tensor(header, "attn_norm_2.weight")
    kv_heads = fields["num_key_value_heads"]
    return fields | {
        "new_decoder_architecture": has_two_norms or kv_heads != 1,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "ffn_hidden_size": count(header, "feed_forward_length"),
    }


def has_two_norms(header: GgufHeader) -> bool:
    return has_tensor(header, "attn_norm_2.weight")


def mpt_fields(header: GgufHeader) -> dict[str, Any]:
    fields, hidden = layer_norm_fields(header), count(header, "embedding_length")
    bias = number(header, "attention.max_alibi_bias")
    if bias <= 0:
        raise bad_value(header, "attention.max_alibi_bias", bias, "a positive number; learned positions are not read")
    ratio, rest = divmod(count(header, "feed_forward_length"), hidden)
    if rest:
        raise bad_value(header, "feed_forward_length", ratio * hidden + rest, f"a multiple of {hidden}")
    return fields | {
        "expansion_ratio": ratio,
        "alibi_bias_max": bias,
        "clip_qkv": number(header, "attention.clamp_kqv", 0) or None,
    }


def gpt_neox_fields(header: GgufHeader) -> dict[str, Any]:
    number(header, "rope.dimension_count")
    is_parallel = flag(header, "use_parallel_residual", True)
    has_bias = has_tensor(header, "attn_qkv.bias")
    return rotary_layer_norm_fields(header) | {"use_parallel_residual": is_parallel, "attention_bias": has_bias}


def phi3_fields(header: GgufHeader) -> dict[str, Any]:
    fields = attention_fields(header)
    rope = rope_fields(header, fields["head_dim"], can_be_partial=True)
    return {**fields, **rope, **window_fields(header), "hidden_act": "silu", "rms_norm_eps": number(header, RMS_EPS)}


def stablelm_fields(header: GgufHeader) -> dict[str, Any]:
    """Models with parallel halves have no second norm; the file's use_parallel_residual is true for others too."""
    fields = rotary_layer_norm_fields(header)
    return fields | {
        "use_qkv_bias": fields["attention_bias"],
        "use_parallel_residual": not has_tensor(header, "ffn_norm.weight"),
        "qk_layernorm": has_tensor(header, "attn_q_norm.weight"),
    }


_BLOOM_TENSORS: Names = {
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
_FALCON_TENSORS: Names = _BLOOM_TENSORS | {"output": "lm_head"}
_GPT_NEOX_TENSORS: Names = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_MPT_TENSORS: Names = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_PHI_TENSORS: Names = {
    **names.LLAMA,
    "output_norm": "model.final_layernorm",
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),  # of the first files
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_PHI3_TENSORS: Names = {**names.LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_STABLELM_TENSORS: Names = names.LLAMA | {
    "attn_q_norm": "self_attn.q_layernorm.norms.*",
    "attn_k_norm": "self_attn.k_layernorm.norms.*",
}
_QKV_BLOCKS = {"attn_qkv": RowOrder.QKV_BLOCKS}
_CONV1D = dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), RowOrder.TRANSPOSED)

_BLOOM = GgufArchitecture(
    "bloom",
    "BloomForCausalLM",
    bloom_fields,
    "transformer.h",
    _BLOOM_TENSORS,
    row_orders=_QKV_BLOCKS,
    copies=frozenset({"output"}),  # of the embedding
)
_GPT2 = GgufArchitecture("gpt2", "GPT2LMHeadModel", layer_norm_fields, "transformer.h", names.GPT2, row_orders=_CONV1D)
_FALCON = GgufArchitecture(
    "falcon", "FalconForCausalLM", falcon_fields, "transformer.h", _FALCON_TENSORS, row_orders=_QKV_BLOCKS
)
_MPT = GgufArchitecture(
    "mpt",
    "MPTForCausalLM",
    mpt_fields,
    "transformer.blocks",
    _MPT_TENSORS,
    options=frozenset({"attention.max_alibi_bias", "attention.clamp_kqv"}),
)

ARCHITECTURES = {
    "bloom": (_BLOOM,),
    "gpt2": (_GPT2,),
    "starcoder": (
        GgufArchitecture("gpt_bigcode", "GPTBigCodeForCausalLM", starcoder_fields, "transformer.h", names.GPT2),
    ),
    "starcoder2": (
        GgufArchitecture(
            "starcoder2",
            "Starcoder2ForCausalLM",
            starcoder2_fields,
            names.LAYERS,
            {**names.LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            options=frozenset({WINDOW}),
        ),
    ),
    "falcon": (
        replace(
            _FALCON,
            tensors=_FALCON_TENSORS | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
            applies=has_two_norms,
        ),
        _FALCON,
    ),
    "mpt": (_MPT,),
    "gptneox": (
        GgufArchitecture(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            gpt_neox_fields,
            "gpt_neox.layers",
            _GPT_NEOX_TENSORS,
            row_orders=_QKV_BLOCKS,
        ),
    ),
    "nemotron": (
        GgufArchitecture(
            "nemotron",
            "NemotronForCausalLM",
            rotary_layer_norm_fields,
            names.LAYERS,
            names.LLAMA,
            has_norms_plus_one=True,
        ),
    ),
    "phi2": (GgufArchitecture("phi", "PhiForCausalLM", rotary_layer_norm_fields, names.LAYERS, _PHI_TENSORS),),
    "phi3": (
        GgufArchitecture(
            "phi3", "Phi3ForCausalLM", phi3_fields, names.LAYERS, _PHI3_TENSORS, options=frozenset({WINDOW})
        ),
    ),
    "stablelm": (
        GgufArchitecture("stablelm", "StableLmForCausalLM", stablelm_fields, names.LAYERS, _STABLELM_TENSORS),
    ),
}
