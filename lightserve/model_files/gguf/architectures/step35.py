"""Step 3.5: layers with a window have more heads and a rope of their own."""

from __future__ import annotations

import math
from typing import Any

from lightserve.model_files.gguf.architectures import names
from lightserve.model_files.gguf.architectures.architecture import GgufArchitecture, Names
from lightserve.model_files.gguf.architectures.experts import SHARED_LINEARS, SIGMOID, check_gating, expert_fields
from lightserve.model_files.gguf.fields import (
    RMS_EPS,
    WINDOW,
    bad_value,
    count,
    counts,
    flag,
    layer_count,
    number,
    window_fields,
)
from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.rope import ROPE_FACTORS, llama3_scaling

FULL, WINDOWED = "full_attention", "sliding_attention"


def step_fields(header: GgufHeader) -> dict[str, Any]:
    check_gating(header, SIGMOID, default=SIGMOID)
    layers, windows = layer_count(header), window_fields(header)
    if "layer_types" not in windows:
        raise bad_value(header, f"{WINDOW}_pattern", None, f"true or false for each of {layers} layers")
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in range(layers)]
    head_dim = count(header, "attention.key_length")
    return {
        **windows,
        **expert_fields(header),
        **_heads(header, windows["layer_types"], head_dim),
        "head_dim": head_dim,
        "rope_parameters": _ropes(header, head_dim),
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
        "share_expert_dim": count(header, "expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": number(header, "expert_weights_scale", 1.0),
        "norm_expert_weight": flag(header, "expert_weights_norm", True),
        "moe_router_activation": "sigmoid",
        "use_head_wise_attn_gate": True,
        "swiglu_limits": _limits(header, "swiglu_clamp_exp"),
        "swiglu_limits_shared": _limits(header, "swiglu_clamp_shexp"),
        "hidden_act": "silu",
        "rms_norm_eps": number(header, RMS_EPS),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _heads(header: GgufHeader, layer_types: list[str], head_dim: int) -> dict[str, Any]:
    by_layer = zip(*(_of_layers(header, f"attention.{key}") for key in ("head_count", "head_count_kv")), strict=True)
    kinds = set(zip(layer_types, by_layer, strict=True))
    full, windowed = ([heads for kind, heads in kinds if kind == wanted] for wanted in (FULL, WINDOWED))
    if len(full) > 1 or len(windowed) > 1:
        wanted = "layers of two kinds, with a window and without"
        raise bad_value(header, "attention.head_count", _of_layers(header, "attention.head_count"), wanted)
    heads, kv_heads = (full or windowed)[0]
    more_heads, more_kv_heads = (windowed or full)[0]
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "attention_other_setting": {
            "num_attention_heads": more_heads,
            "num_attention_groups": more_kv_heads,
            "head_dim": head_dim,
        },
    }


def _of_layers(header: GgufHeader, key: str) -> list[int]:
    values = counts(header, key)
    return values if isinstance(values, list) else [values] * layer_count(header)


def _ropes(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """llama.cpp rotates half of each head in layers without a window, and all of it in the others."""
    theta = number(header, "rope.freq_base")
    scaling = llama3_scaling(header, theta, head_dim // 2) if ROPE_FACTORS in header.tensors else None
    return {
        FULL: {"rope_theta": theta, "partial_rotary_factor": 0.5, **(scaling or {"rope_type": "default"})},
        WINDOWED: {
            "rope_type": "default",
            "rope_theta": number(header, "rope.freq_base_swa", theta),
            "partial_rotary_factor": 1.0,
        },
    }


def _limits(header: GgufHeader, key: str) -> list[float] | None:
    """0 is none. They are written for layers that predict more tokens, too."""
    values, layers = header.metadata.get(f"{header.architecture}.{key}"), layer_count(header)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) < layers:
        raise bad_value(header, key, values, f"a number for each of {layers} layers")
    return [value if math.isfinite(value) else 0.0 for value in values[:layers]]


_TENSORS: Names = {
    **names.QWEN3,
    "attn_gate": "self_attn.g_proj",
    "ffn_gate_inp": "moe.gate",
    "exp_probs_b.bias": "moe.router_bias",
    **{name.replace("_shexp", "_exps"): f"moe.experts.*.{linear}" for name, linear in SHARED_LINEARS.items()},
    **{name: f"share_expert.{linear}" for name, linear in SHARED_LINEARS.items()},
}

ARCHITECTURES = {
    "step35": (
        GgufArchitecture(
            "step3p5",
            "Step3p5ForCausalLM",
            step_fields,
            names.LAYERS,
            _TENSORS,
            has_norms_plus_one=True,
            options=frozenset({WINDOW, "expert_count"}),
        ),
    )
}
