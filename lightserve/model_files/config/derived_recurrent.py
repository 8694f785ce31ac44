"""Fields of ``config.json`` that follow from other fields, for models with Mamba2 or Kimi Delta Attention."""

from __future__ import annotations

from typing import Any

from lightserve.model_files.config.derived import Fields, are_counts, recurrent_except_every, table_of


def bamba(hf: Fields) -> dict[str, Any]:
    """layer_types from the numbers of the layers with attention."""
    layers: Any = hf.get("num_hidden_layers")
    attention = hf.get("attn_layer_indices") or []
    if not isinstance(attention, list) or not are_counts(layers):
        return {"layer_types": attention}  # ModelConfig refuses it
    kinds = ("linear_attention", "full_attention")
    return {"layer_types": [kinds[i in attention] for i in range(min(layers, 10_000))]}


def falcon_h1(hf: Fields) -> dict[str, Any]:
    """layer_types, which are all the same. A null as the width of Mamba2 is a value."""
    layers: Any = hf.get("num_hidden_layers")
    types = ["hybrid"] * min(layers, 10_000) if are_counts(layers) else None
    return {"layer_types": types, "mamba_d_ssm": hf.get("mamba_d_ssm", 1024)}


def kimi_linear(hf: Fields) -> dict[str, Any]:
    """layer_types and the sizes of recurrent layers from the table of the hub's files, which counts layers from 1."""
    table = table_of(hf.get("linear_attn_config"))
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    fields = {ours: table[name] for name, ours in names.items() if name in table}
    layers: Any = hf.get("num_hidden_layers")
    attention: Any = table.get("full_attn_layers")
    types = hf.get("layer_types")
    if types is None and are_counts(layers):
        numbers = range(min(layers, 10_000))
        is_listed = isinstance(attention, list) and are_counts(*attention)
        with_attention = [i - 1 for i in attention] if is_listed else [*numbers[4::4]]
        types = [("linear_attention", "full_attention")[i in with_attention] for i in numbers]
    return {**fields, "layer_types": types, "head_dim": hf.get("qk_rope_head_dim"), "num_key_value_heads": None}


def olmo_hybrid(hf: Fields) -> dict[str, Any]:
    """layer_types and the sizes of recurrent layers. A rope without a base is none."""
    hidden: Any = hf.get("hidden_size")
    keys: Any = hf.get("linear_num_key_heads") or hf.get("num_attention_heads")
    values = hf.get("linear_num_value_heads") or hf.get("num_attention_heads")
    fields = {**recurrent_except_every(4)(hf), "linear_num_key_heads": keys, "linear_num_value_heads": values}
    if fields.get("layer_types") and "full_attention" not in fields["layer_types"]:
        fields["layer_types"][-1] = "full_attention"
    key_dim: Any = hf.get("linear_key_head_dim")
    if key_dim is None and are_counts(hidden, keys):
        key_dim = int(0.75 * hidden / keys)
    if are_counts(key_dim):
        sizes = {"linear_key_head_dim": key_dim, "linear_value_head_dim": 2 * key_dim}
        fields |= {name: size for name, size in sizes.items() if hf.get(name) is None}
    given = hf.get("rope_parameters")
    rope = {"rope_theta": hf.get("rope_theta", 10_000.0)} if given is None else given
    has_base = not isinstance(rope, dict) or rope.get("rope_theta") is not None
    return {**fields, "rope_parameters": rope if has_base else None}
