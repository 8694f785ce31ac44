"""LFM2: short convolutions in most layers, with and without experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import Form, GgufArchitecture, Names
from lightserve.model_files.gguf.architectures.experts import SIGMOID, check_gating, expert_fields
from lightserve.model_files.gguf.fields import (
    RMS_EPS,
    attention_fields,
    count,
    flag,
    has_tensor,
    largest,
    layer_types,
    number,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import rope_fields


def lfm2_fields(header: GgufHeader) -> dict[str, Any]:
    """feed_forward_length is the width as it is built."""
    fields = attention_fields(header)
    eps = number(header, RMS_EPS)
    return {
        **fields,
        **rope_fields(header, fields["head_dim"]),
        "num_key_value_heads": largest(fields["num_key_value_heads"]),
        "layer_types": layer_types(header, "conv"),
        "conv_L_cache": count(header, "shortconv.l_cache"),
        "conv_bias": has_tensor(header, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "hidden_act": "silu",
        "norm_eps": eps,
        "rms_norm_eps": eps,
    }


def lfm2_moe_fields(header: GgufHeader) -> dict[str, Any]:
    """llama.cpp renormalises the weights of experts."""
    check_gating(header, SIGMOID, default=SIGMOID)
    return {
        **lfm2_fields(header),
        **expert_fields(header),
        "num_dense_layers": int(number(header, "leading_dense_block_count", 0)),
        "norm_topk_prob": flag(header, "expert_weights_norm", True),
        "routed_scaling_factor": number(header, "expert_weights_scale", 1.0),
        "use_expert_bias": has_tensor(header, "exp_probs_b.bias"),
    }


_TENSORS: Names = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",  # of newer files
    "output": "lm_head",
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_EXPERTS: Names = {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.*.w1",
    "ffn_up_exps": "feed_forward.experts.*.w3",
    "ffn_down_exps": "feed_forward.experts.*.w2",
}
_LFM2 = GgufArchitecture(
    "lfm2", "Lfm2ForCausalLM", lfm2_fields, names.LAYERS, _TENSORS, forms={"shortconv.conv.weight": Form.CONV}
)
_LFM2_MOE = replace(
    _LFM2,
    model_type="lfm2_moe",
    model_class="Lfm2MoeForCausalLM",
    config_fields=lfm2_moe_fields,
    tensors=_TENSORS | _EXPERTS,
    options=frozenset({"expert_count"}),
)

ARCHITECTURES = {"lfm2": (_LFM2,), "lfm2moe": (_LFM2_MOE,)}
