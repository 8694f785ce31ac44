"""Models with experts, and those with latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, Join, JoinedTensor, Names, RowOrder
from lightserve.model_files.gguf.architectures.llama_like import GRANITE, LLAMA, granite_fields, rotary_decoder_fields
from lightserve.model_files.gguf.fields import (
    RMS_EPS,
    WINDOW,
    attention_fields,
    bad_value,
    count,
    flag,
    has_tensor,
    number,
    number_or_none,
    window_fields,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import rope_fields, with_mscale

SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
# by number of experts, for files that are older than the keys: DeepSeek V3 and V2
EXPERT_GROUPS = {256: (8, 4), 160: (8, 3)}


def has_experts(header: GgufHeader) -> bool:
    return bool(number(header, "expert_count", 0))


def expert_fields(header: GgufHeader) -> dict[str, Any]:
    """Of every architecture with experts."""
    fields: dict[str, Any] = {"num_experts_per_tok": count(header, "expert_used_count")}
    fields |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count(header, "expert_count"))
    width = _rows(header, "ffn_gate_exps.weight", axis=1)
    if width or number_or_none(header, "expert_feed_forward_length"):
        fields["moe_intermediate_size"] = count(header, "expert_feed_forward_length", width)
    return fields


def moe_fields(header: GgufHeader) -> dict[str, Any]:
    """Of rotary decoders with experts. Older files do not say whether the weights of experts are renormalised."""
    fields = rotary_decoder_fields(header) | window_fields(header) | expert_fields(header)
    fields["norm_topk_prob"] = flag(header, "expert_weights_norm", header.architecture in ("qwen3moe", "qwen3vlmoe"))
    fields["qkv_bias"] = fields["attention_bias"]
    shared = _rows(header, "ffn_gate_shexp.weight")
    return fields if shared is None else {**fields, "shared_expert_intermediate_size": shared}


def _rows(header: GgufHeader, name: str, axis: int = 0) -> int | None:
    entry = header.tensors.get(f"blk.0.{name}")
    return None if entry is None else entry.shape[axis]


def granitemoe_fields(header: GgufHeader) -> dict[str, Any]:
    return granite_fields(header) | expert_fields(header)


def gpt_oss_fields(header: GgufHeader) -> dict[str, Any]:
    """Windows are in every other layer. The file does not say that the bounds of yarn are not rounded."""
    number(header, WINDOW)
    fields = rotary_decoder_fields(header) | window_fields(header) | expert_fields(header)
    fields["intermediate_size"] = fields["moe_intermediate_size"]
    if fields["rope_scaling"] is not None:
        fields["rope_scaling"]["truncate"] = False
    return fields


def minimax_m2_fields(header: GgufHeader) -> dict[str, Any]:
    fields = attention_fields(header)
    rope = rope_fields(header, fields["head_dim"], can_be_partial=True)
    check_gating(header, SIGMOID, default=SIGMOID)
    return {
        **fields,
        **rope,
        **expert_fields(header),
        "hidden_act": "silu",
        "rms_norm_eps": number(header, RMS_EPS),
        "rotary_dim": number(header, "rope.dimension_count"),
    }


def glm4_moe_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SIGMOID, default=SIGMOID)
    fields = attention_fields(header)
    rope = rope_fields(header, fields["head_dim"], can_be_partial=True)
    return {
        "partial_rotary_factor": 1.0,
        **fields,
        **rope,
        **deepseek_expert_fields(header),
        "norm_topk_prob": flag(header, "expert_weights_norm", True),
        "hidden_act": "silu",
        "rms_norm_eps": number(header, RMS_EPS),
        "use_qk_norm": has_tensor(header, "attn_q_norm.weight"),
    }


def deepseek_expert_fields(header: GgufHeader) -> dict[str, Any]:
    fields = expert_fields(header)
    groups, top_groups = (
        EXPERT_GROUPS.get(fields["num_experts"], (1, 1)) if header.architecture == "deepseek2" else (1, 1)
    )
    return {
        **fields,
        "n_shared_experts": int(number(header, "expert_shared_count", 0)),
        "first_k_dense_replace": int(number(header, "leading_dense_block_count", 0)),
        "routed_scaling_factor": number(header, "expert_weights_scale", 1.0),
        "norm_topk_prob": flag(header, "expert_weights_norm", False),
        "n_group": count(header, "expert_group_count", groups),
        "topk_group": count(header, "expert_group_used_count", top_groups),
    }


def latent_fields(header: GgufHeader) -> dict[str, Any]:
    """Older files have the sizes of the expanded heads in key_length, newer ones in key_length_mla."""
    rope_dim, heads = count(header, "rope.dimension_count"), count(header, "attention.head_count")
    key_dim = count(header, "attention.key_length_mla", number_or_none(header, "attention.key_length"))
    value_dim = count(header, "attention.value_length_mla", number_or_none(header, "attention.value_length"))
    if key_dim <= rope_dim:
        raise bad_value(header, "attention.key_length_mla", key_dim, f"more than rope.dimension_count, {rope_dim}")
    rope = rope_fields(header, rope_dim)
    log_multiplier = number_or_none(header, "rope.scaling.yarn_log_multiplier")  # a tenth of mscale_all_dim
    mscale = None if log_multiplier is None else round(10 * log_multiplier, 6)
    return {
        **rope,
        "rope_scaling": with_mscale(rope["rope_scaling"], mscale),
        "num_key_value_heads": heads,
        "head_dim": rope_dim,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
        "kv_lora_rank": count(header, "attention.kv_lora_rank"),
        "q_lora_rank": count(header, "attention.q_lora_rank") if has_tensor(header, "attn_q_a.weight") else None,
        "hidden_act": "silu",
        "rms_norm_eps": number(header, RMS_EPS),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def deepseek_v2_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SOFTMAX, default=SOFTMAX)
    fields = latent_fields(header) | deepseek_expert_fields(header)
    return fields | {"topk_method": "group_limited_greedy" if fields["n_group"] > 1 else "greedy"}


def deepseek_v3_fields(header: GgufHeader) -> dict[str, Any]:
    return latent_fields(header) | deepseek_expert_fields(header)


def is_sigmoid(header: GgufHeader) -> bool:
    """GLM-4.7-Flash may not say so; only experts that are chosen so have a bias for the choice."""
    default = SIGMOID if has_tensor(header, "exp_probs_b.bias") else SOFTMAX
    return bool(number(header, "expert_gating_func", default) == SIGMOID)


def check_gating(header: GgufHeader, wanted: int, default: int) -> None:
    gating = number(header, "expert_gating_func", default)
    if gating not in (0, wanted):
        raise bad_value(header, "expert_gating_func", gating, str(wanted))


SHARED_LINEARS = {"ffn_gate_shexp": "gate_proj", "ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}
SHARED_EXPERT: Names = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{name: f"mlp.shared_expert.{linear}" for name, linear in SHARED_LINEARS.items()},
}
DEEPSEEK_EXPERTS: Names = {
    **names.EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{name: f"mlp.shared_experts.{linear}" for name, linear in SHARED_LINEARS.items()},
}
DEEPSEEK_ATTENTION: Names = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of older files
}
DEEPSEEK_TENSORS: Names = {**names.LLAMA, **DEEPSEEK_EXPERTS, **DEEPSEEK_ATTENTION}
_GPT_OSS_TENSORS: Names = {
    **names.LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_GATE_UP = (
    JoinedTensor("mlp.experts.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), Join.ALTERNATING),
    JoinedTensor("mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), Join.ALTERNATING),
)
INPUT_LINEAR = JoinedTensor(
    "block_sparse_moe.input_linear.weight", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), Join.EXPERT_ROWS
)
KV_B = JoinedTensor("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), Join.LATENT)
_EXPERTS = frozenset({"expert_count"})

MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    config_fields=moe_fields,
    tensors=names.LLAMA | names.MIXTRAL_EXPERTS,
    options=_EXPERTS | {WINDOW},
    applies=has_experts,
)
_QWEN3_MOE = GgufArchitecture(
    "qwen3_moe", "Qwen3MoeForCausalLM", moe_fields, names.LAYERS, names.QWEN3 | names.EXPERTS, options=_EXPERTS
)
_QWEN2_MOE = replace(
    _QWEN3_MOE,
    model_type="qwen2_moe",
    model_class="Qwen2MoeForCausalLM",
    tensors=names.LLAMA | names.EXPERTS | SHARED_EXPERT,
)
_GRANITEMOE = replace(
    GRANITE,
    model_type="granitemoe",
    model_class="GraniteMoeForCausalLM",
    config_fields=granitemoe_fields,
    tensors=names.LLAMA
    | {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_exps": "block_sparse_moe.output_linear"},
    joined=(INPUT_LINEAR,),
    options=GRANITE.options | _EXPERTS,
)
_GPT_OSS = GgufArchitecture(
    "gpt_oss",
    "GptOssForCausalLM",
    gpt_oss_fields,
    names.LAYERS,
    _GPT_OSS_TENSORS,
    row_orders={"ffn_down_exps": RowOrder.TRANSPOSED},
    joined=_GATE_UP,
    options=_EXPERTS | {WINDOW},
)
_MINIMAX_M2 = GgufArchitecture(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    minimax_m2_fields,
    names.LAYERS,
    names.QWEN3 | names.MIXTRAL_EXPERTS | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    options=_EXPERTS,
)
_GLM4_MOE = GgufArchitecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    glm4_moe_fields,
    names.LAYERS,
    {**names.QWEN3, **DEEPSEEK_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
    options=_EXPERTS,
)
_DEEPSEEK_V2 = GgufArchitecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    deepseek_v2_fields,
    names.LAYERS,
    DEEPSEEK_TENSORS,
    joined=(KV_B,),
    options=_EXPERTS,
)
DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    model_type="deepseek_v3",
    model_class="DeepseekV3ForCausalLM",
    config_fields=deepseek_v3_fields,
    applies=is_sigmoid,
)

ARCHITECTURES = {
    "qwen2moe": (_QWEN2_MOE,),
    "qwen3moe": (_QWEN3_MOE,),
    "qwen3vlmoe": (_QWEN3_MOE,),  # without the vision part, which is a file of its own
    "olmoe": (replace(_QWEN3_MOE, model_type="olmoe", model_class="OlmoeForCausalLM"),),
    "granitemoe": (_GRANITEMOE,),
    "gpt-oss": (_GPT_OSS,),
    "minimax-m2": (_MINIMAX_M2,),
    "glm4moe": (_GLM4_MOE,),
    "deepseek2": (DEEPSEEK_V3, _DEEPSEEK_V2),
}
