"""Models with Mamba2: Granite 4, Bamba, Nemotron-H and Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import Form, GgufArchitecture, JoinedTensor, Names
from lightserve.model_files.gguf.architectures.experts import INPUT_LINEAR, deepseek_expert_fields, expert_fields
from lightserve.model_files.gguf.architectures.llama_like import SCALES
from lightserve.model_files.gguf.fields import (
    RMS_EPS,
    attention_fields,
    bad_value,
    count,
    flag,
    has_tensor,
    largest,
    layer_count,
    layer_types,
    number,
    rows_of,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import rope_fields


def _hybrid_fields(header: GgufHeader, *, has_partial_rope: bool = False) -> dict[str, Any]:
    fields = attention_fields(header)
    return {
        **fields,
        **rope_fields(header, fields["head_dim"], can_be_partial=has_partial_rope),
        "num_key_value_heads": largest(fields["num_key_value_heads"]),
        "layer_types": layer_types(header),
        "hidden_act": "silu",
        "rms_norm_eps": number(header, RMS_EPS),
    }


def _mamba_fields(header: GgufHeader) -> dict[str, Any]:
    heads, width, hidden = (count(header, key) for key in ("ssm.time_step_rank", "ssm.inner_size", "embedding_length"))
    if width % heads:
        raise bad_value(header, "ssm.inner_size", width, f"a multiple of ssm.time_step_rank, which is {heads}")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_expand": max(width // hidden, 1),
        "mamba_n_groups": count(header, "ssm.group_count"),
        "mamba_d_state": count(header, "ssm.state_size"),
        "mamba_d_conv": count(header, "ssm.conv_kernel"),
        "mamba_conv_bias": has_tensor(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_tensor(header, "ssm_in.bias"),
    }


def granite_hybrid_fields(header: GgufHeader) -> dict[str, Any]:
    fields = {**_hybrid_fields(header), **_mamba_fields(header)}
    has_experts = bool(number(header, "expert_count", 0))
    width = largest(number(header, "feed_forward_length"))
    shared = number(header, "expert_shared_feed_forward_length", width)
    return {
        **fields,
        **(expert_fields(header) if has_experts else {"num_local_experts": 0}),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if flag(header, "rope.scaling.finetuned", False) else "nope",
        "attention_multiplier": number(header, "attention.scale", 0) or fields["head_dim"] ** -0.5,
        "embedding_multiplier": number(header, "embedding_scale", 1.0),
        "residual_multiplier": number(header, "residual_scale", 1.0),
        "logits_scaling": number(header, "logit_scale", 1.0),
    }


def bamba_fields(header: GgufHeader) -> dict[str, Any]:
    fields = {**_hybrid_fields(header, has_partial_rope=True), **_mamba_fields(header)}
    attention = [i for i, kind in enumerate(fields["layer_types"]) if kind == "full_attention"]
    return {"partial_rotary_factor": 1.0, **fields, "attn_layer_indices": attention}


def has_rope(header: GgufHeader) -> bool:
    return flag(header, "rope.scaling.finetuned", False)


def falcon_h1_fields(header: GgufHeader) -> dict[str, Any]:
    """The converter multiplies weights with all factors but those of the config's defaults, which are 1 here."""
    fields = {**_hybrid_fields(header), **_mamba_fields(header)}
    factors = ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
    return {
        **fields,
        **{f"{factor}_multiplier": 1.0 for factor in factors},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
        "mamba_d_ssm": count(header, "ssm.inner_size"),
        "mamba_rms_norm": has_tensor(header, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes it
        "projectors_bias": has_tensor(header, "ssm_out.bias"),
    }


def nemotron_h_fields(header: GgufHeader) -> dict[str, Any]:
    """The kind of a layer shows in its tensors. Feed-forwards have no gate."""
    fields = attention_fields(header)
    mamba = _mamba_fields(header)
    eps = number(header, RMS_EPS)
    return {
        **fields,
        "num_key_value_heads": largest(fields["num_key_value_heads"]),
        "attention_bias": False,
        "intermediate_size": rows_of(header, "ffn_up.weight"),
        "layers_block_type": [_nemotron_kind(header, layer) for layer in range(layer_count(header))],
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": eps,
        "rms_norm_eps": eps,
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_bias": mamba["mamba_proj_bias"],
        "use_conv_bias": mamba["mamba_conv_bias"],
    }


def nemotron_h_moe_fields(header: GgufHeader) -> dict[str, Any]:
    fields = {**nemotron_h_fields(header), **deepseek_expert_fields(header)}
    return {
        **fields,
        "norm_topk_prob": flag(header, "expert_weights_norm", True),
        "moe_latent_size": rows_of(header, "ffn_latent_down.weight") or 0,
        "moe_shared_expert_intermediate_size": count(
            header, "expert_shared_feed_forward_length", rows_of(header, "ffn_up_shexp.weight")
        ),
    }


def _nemotron_kind(header: GgufHeader, layer: int) -> str:
    kinds = {"ssm_in": "mamba", "attn_q": "attention", "ffn_up_exps": "moe"}
    kinds_by_name = (kind for name, kind in kinds.items() if f"blk.{layer}.{name}.weight" in header.tensors)
    return next(kinds_by_name, "mlp")


def _mamba_names(prefix: str) -> Names:
    return {
        "ssm_in": f"{prefix}.in_proj",
        "ssm_conv1d": f"{prefix}.conv1d",
        "ssm_a": f"{prefix}.A_log",
        "ssm_dt.bias": f"{prefix}.dt_bias",
        "ssm_d": f"{prefix}.D",
        "ssm_norm": f"{prefix}.norm",
        "ssm_out": f"{prefix}.out_proj",
    }


_FORMS = {"ssm_a": Form.RATES, "ssm_d": Form.FLAT, "ssm_norm.weight": Form.FLAT, "ssm_conv1d.weight": Form.CONV}
_EXPERTS = frozenset({"expert_count"})
_GRANITE_TENSORS: Names = {
    **{name: value for name, value in names.LLAMA.items() if name not in ("ffn_gate", "ffn_up")},
    **_mamba_names("mamba"),
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_SHARED_LINEAR = tuple(
    JoinedTensor("shared_mlp.input_linear.weight", (f"ffn_gate{kind}.weight", f"ffn_up{kind}.weight"))
    for kind in ("", "_shexp")
)
_BAMBA_TENSORS: Names = {
    **names.LLAMA,
    **_mamba_names("mamba"),
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm.weight",  # llama.cpp leaves out .weight in Falcon-H1
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_NEMOTRON_TENSORS: Names = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    **_mamba_names("mixer"),
}
_NEMOTRON_EXPERTS: Names = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.*.up_proj",
    "ffn_down_exps": "mixer.experts.*.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}

_GRANITE_HYBRID = GgufArchitecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    granite_hybrid_fields,
    names.LAYERS,
    _GRANITE_TENSORS,
    row_orders=names.PERMUTED_QK,
    forms=_FORMS,
    joined=(INPUT_LINEAR, *_SHARED_LINEAR),
    options=SCALES | {"attention.scale"} | _EXPERTS,
)
_BAMBA = replace(
    _GRANITE_HYBRID,
    model_type="bamba",
    model_class="BambaForCausalLM",
    config_fields=bamba_fields,
    tensors=_BAMBA_TENSORS,
    joined=(),
    options=frozenset(),
    applies=has_rope,
)
_FALCON_H1 = GgufArchitecture(
    "falcon_h1", "FalconH1ForCausalLM", falcon_h1_fields, names.LAYERS, _BAMBA_TENSORS, forms=_FORMS
)
_NEMOTRON_H = GgufArchitecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    nemotron_h_fields,
    "backbone.layers",
    _NEMOTRON_TENSORS,
    row_orders=names.PERMUTED_QK,
    forms=_FORMS,
)
_NEMOTRON_H_MOE = replace(
    _NEMOTRON_H,
    config_fields=nemotron_h_moe_fields,
    tensors=_NEMOTRON_TENSORS | _NEMOTRON_EXPERTS,
    options=_EXPERTS,
)

ARCHITECTURES = {
    "granitehybrid": (_BAMBA, _GRANITE_HYBRID),
    "falcon-h1": (_FALCON_H1,),
    "nemotron_h": (_NEMOTRON_H,),
    "nemotron_h_moe": (_NEMOTRON_H_MOE,),
}
