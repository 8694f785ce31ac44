"""Models with a gated delta rule: Qwen3-Next and its successors, and Kimi Linear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import (
    Form,
    GgufArchitecture,
    Join,
    JoinedTensor,
    Names,
    RowOrder,
)
from lightserve.model_files.gguf.architectures.experts import (
    DEEPSEEK_ATTENTION,
    KV_B,
    SHARED_EXPERT,
    deepseek_expert_fields,
    expert_fields,
    latent_fields,
)
from lightserve.model_files.gguf.fields import (
    RMS_EPS,
    attention_fields,
    bad_value,
    count,
    flag,
    has_tensor,
    largest,
    layer_types,
    number,
    rows_of,
    unsupported,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import rope_fields


def qwen3_hybrid_fields(header: GgufHeader) -> dict[str, Any]:
    fields = attention_fields(header)
    return {
        "partial_rotary_factor": 1.0,
        **fields,
        **rope_fields(header, fields["head_dim"], can_be_partial=True),
        **_delta_fields(header),
        "num_key_value_heads": largest(fields["num_key_value_heads"]),
        "layer_types": layer_types(header),
        "hidden_act": "silu",
        "rms_norm_eps": number(header, RMS_EPS),
    }


def _delta_fields(header: GgufHeader) -> dict[str, Any]:
    values, width = count(header, "ssm.time_step_rank"), count(header, "ssm.inner_size")
    if width % values:
        raise bad_value(header, "ssm.inner_size", width, f"a multiple of ssm.time_step_rank, which is {values}")
    return {
        "linear_num_key_heads": count(header, "ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": count(header, "ssm.state_size"),
        "linear_value_head_dim": width // values,
        "linear_conv_kernel_dim": count(header, "ssm.conv_kernel"),
    }


def qwen3_hybrid_moe_fields(header: GgufHeader) -> dict[str, Any]:
    """The weights of experts are renormalised in all published models, and in llama.cpp."""
    fields = qwen3_hybrid_fields(header) | expert_fields(header)
    layers = range(len(fields["layer_types"]))
    return {
        **fields,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in header.tensors],
        "norm_topk_prob": flag(header, "expert_weights_norm", True),
        "shared_expert_intermediate_size": rows_of(header, "ffn_gate_shexp.weight"),
    }


def kimi_linear_fields(header: GgufHeader) -> dict[str, Any]:
    heads = rows_of(header, "ssm_beta.weight")
    if heads is None:
        raise unsupported(header, "no layer has a tensor ssm_beta.weight; convert the model again")
    types, experts = layer_types(header), deepseek_expert_fields(header)
    dense = experts["first_k_dense_replace"]
    return {
        **latent_fields(header),
        **experts,
        "norm_topk_prob": flag(header, "expert_weights_norm", True),
        "layer_types": types,
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(len(types))],
        "linear_num_heads": heads,
        "linear_head_dim": count(header, "kda.head_dim"),
        "linear_conv_kernel_dim": count(header, "ssm.conv_kernel"),
        "q_lora_rank": count(header, "attention.q_lora_rank") if has_tensor(header, "attn_q_a.weight") else None,
    }


_QWEN_TENSORS: Names = {
    **names.QWEN3,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_APART: Names = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
_TILED = {
    **dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"), RowOrder.TILED_VALUES),
    **dict.fromkeys(("attn_qkv", "ssm_conv1d"), RowOrder.TILED_LAST_VALUES),
    "ssm_out": RowOrder.TILED_VALUE_COLUMNS,
}
_QKVZ = JoinedTensor("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), Join.KEY_HEADS)
_EXPERTS = frozenset({"expert_count"})
_KIMI_TENSORS: Names = {
    **names.LLAMA,
    **names.MIXTRAL_EXPERTS,
    **DEEPSEEK_ATTENTION,
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}

_QWEN3_NEXT = GgufArchitecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    qwen3_hybrid_moe_fields,
    names.LAYERS,
    {**_QWEN_TENSORS, **names.EXPERTS, **SHARED_EXPERT, "ssm_ba": "linear_attn.in_proj_ba"},
    forms={"ssm_a": Form.RATES, "ssm_conv1d.weight": Form.CONV},
    joined=(_QKVZ,),
    has_norms_plus_one=True,
    options=_EXPERTS,
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    model_type="qwen3_5_text",
    model_class="Qwen3_5ForCausalLM",
    config_fields=qwen3_hybrid_fields,
    tensors=_QWEN_TENSORS | _APART,
    row_orders=_TILED,
    joined=(),
    options=frozenset(),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe_text",
    model_class="Qwen3_5MoeForCausalLM",
    config_fields=qwen3_hybrid_moe_fields,
    tensors={**_QWEN_TENSORS, **_APART, **names.EXPERTS, **SHARED_EXPERT},
    options=_EXPERTS,
)
_KIMI_LINEAR = GgufArchitecture(
    "kimi_linear",
    "KimiLinearForCausalLM",
    kimi_linear_fields,
    names.LAYERS,
    _KIMI_TENSORS,
    forms={
        "ssm_a": Form.RATES_4D,
        **dict.fromkeys((f"ssm_conv1d_{qkv}.weight" for qkv in "qkv"), Form.CONV),
    },
    joined=(KV_B,),
    options=_EXPERTS,
)

ARCHITECTURES = {
    "qwen3next": (_QWEN3_NEXT,),
    "qwen35": (_QWEN3_5,),
    "qwen35moe": (_QWEN3_5_MOE,),
    "kimi-linear": (_KIMI_LINEAR,),
}
