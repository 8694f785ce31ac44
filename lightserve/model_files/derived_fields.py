"""Fields of ``config.json`` that follow from other fields in the files of one model_type, by Llama's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BAICHUAN2_VOCAB = 125_696
BAICHUAN_13B = 5120, 40  # hidden_size, num_hidden_layers


def baichuan_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The 13B models have ALiBi, and model_max_length without max_position_embeddings in their files."""
    is_13b = hf.get("max_position_embeddings") is None or _shape(hf) == BAICHUAN_13B
    return {"uses_alibi": is_13b, "normalizes_head": hf.get("vocab_size") == BAICHUAN2_VOCAB}


def chatglm_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Half of each head rotates, and rope_ratio multiplies the base."""
    is_grouped = hf.get("multi_query_attention", False)
    ratio = hf.get("rope_ratio", 1)
    fields = {
        "vocab_size": hf.get("padded_vocab_size", hf.get("vocab_size")),
        "num_key_value_heads": hf.get("multi_query_group_num", 1) if is_grouped else None,
        "partial_rotary_factor": 0.5,
    }
    return fields if "rope_theta" in hf else {**fields, "rope_theta": _product(10_000, ratio)}


def internlm_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """``rotary`` has the base, and a type that is "origin" or the name of a scaling."""
    rotary = hf.get("rotary")
    if not isinstance(rotary, dict):
        return {}
    theta = {"rope_theta": rotary.get("base", hf.get("rope_theta"))}
    if rotary.get("type", "origin") == "origin":
        return theta
    return {**theta, "rope_scaling": {"rope_type": rotary["type"], "factor": rotary.get("scaling_factor", 1.0)}}


def qwen_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """intermediate_size counts the rows of gate and up together.

    Past seq_length the model scales queries (use_logn_attn) and the rotary base (use_dynamic_ntk) by the length of the
    request. This is not implemented, so requests end there.
    """
    size = hf.get("intermediate_size", hf.get("ffn_hidden_size"))
    fields: dict[str, Any] = {"intermediate_size": size // 2} if isinstance(size, int) else {}
    if hf.get("seq_length") and (hf.get("use_dynamic_ntk", True) or hf.get("use_logn_attn", True)):
        fields["max_position_embeddings"] = hf["seq_length"]
    return fields


def _shape(hf: Mapping[str, Any]) -> tuple[Any, Any]:
    return hf.get("hidden_size"), hf.get("num_hidden_layers")


def _product(base: int, ratio: Any) -> Any:
    """A ratio that is not a number is refused where it is read."""
    return base * ratio if isinstance(ratio, int | float) else ratio
