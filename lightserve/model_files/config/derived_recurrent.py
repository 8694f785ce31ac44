"""Fields of ``config.json`` that follow from other fields, for models with recurrent layers."""

from __future__ import annotations

from typing import Any

from lightserve.model_files.config.derived import (
    MAX_FACTOR,
    Derive,
    Fields,
    are_counts,
    except_every,
    layer_numbers,
    table_of,
)
from lightserve.model_files.config.layer_shapes import layer_lists


def recurrent_except_every(count: int) -> Derive:
    """layer_types: recurrent layers except every ``full_attention_interval``-th, which is ``count`` by default."""

    return except_every(count, "full_attention_interval", "linear_attention")


def granite_hybrid(hf: Fields) -> dict[str, Any]:
    """layer_types under transformers' names. Published files have others."""
    kinds = {"mamba": "linear_attention", "attention": "full_attention"}
    types = hf.get("layer_types", hf.get("layers_block_type"))
    layers: Any = hf.get("num_hidden_layers")
    if isinstance(types, list):
        return {"layer_types": [kinds.get(kind, kind) if isinstance(kind, str) else kind for kind in types]}
    return {"layer_types": ["linear_attention"] * len(layer_numbers(layers)) if are_counts(layers) else types}


def nemotron_h(hf: Fields) -> dict[str, Any]:
    """The halves of each layer, from a letter for each or from a list: a layer is a mixer or a feed-forward.

    Files without layers of experts have fields of experts too.
    """
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    kinds |= {"mamba": "linear_attention", "attention": "full_attention"}
    listed = hf.get("layer_types") or hf.get("layers_block_type") or hf.get("hybrid_override_pattern") or "ME*-"
    if not isinstance(listed, list | str):
        return {"layer_types": listed}  # ModelConfig refuses it
    types = [kinds.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]

    def where(kind: str, value: Any) -> list[Any]:
        return [value if layer_type == kind else 0 for layer_type in types]

    widths = {"mlp": hf.get("intermediate_size"), "moe": hf.get("moe_intermediate_size")}
    shapes = {
        "num_attention_heads": where("full_attention", hf.get("num_attention_heads")),
        "num_key_value_heads": where("full_attention", hf.get("num_key_value_heads")),
        "intermediate_size": [widths.get(layer_type, 0) if isinstance(layer_type, str) else 0 for layer_type in types],
    }
    return {
        "layer_types": ["full_attention" if layer_type in ("mlp", "moe") else layer_type for layer_type in types],
        "mlp_layer_types": ["sparse" if layer_type == "moe" else "dense" for layer_type in types],
        "num_hidden_layers": len(types),
        "n_routed_experts": hf.get("n_routed_experts") if "moe" in types else None,
        **layer_lists(shapes),
    }


def lfm2(hf: Fields) -> dict[str, Any]:
    """The width of the feed-forward as it is built, and layer_types from the numbers of the layers with attention."""
    fields = {"tie_word_embeddings": hf.get("tie_embedding", hf.get("tie_word_embeddings"))}
    width: Any = hf.get("block_ff_dim", hf.get("intermediate_size"))
    layers: Any = hf.get("num_hidden_layers")
    factor, multiple = hf.get("block_ffn_dim_multiplier", 1.0), hf.get("block_multiple_of", 256)
    if are_counts(width) and hf.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if isinstance(factor, int | float) and 0 < factor < MAX_FACTOR and are_counts(multiple):
            width = -(-int(factor * width) // multiple) * multiple
    attention = hf.get("full_attn_idxs")
    if hf.get("layer_types") is None and isinstance(attention, list) and are_counts(layers):
        kinds = ("conv", "full_attention")
        fields["layer_types"] = [kinds[i in attention] for i in layer_numbers(layers)]
    return {**fields, "intermediate_size": width}


def lfm2_moe(hf: Fields) -> dict[str, Any]:
    """Dense layers are as wide as the file says."""
    return lfm2({**hf, "block_auto_adjust_ff_dim": False})


def bamba(hf: Fields) -> dict[str, Any]:
    """layer_types from the numbers of the layers with attention."""
    layers: Any = hf.get("num_hidden_layers")
    attention = hf.get("attn_layer_indices") or []
    if not isinstance(attention, list) or not are_counts(layers):
        return {"layer_types": attention}  # ModelConfig refuses it
    kinds = ("linear_attention", "full_attention")
    return {"layer_types": [kinds[i in attention] for i in layer_numbers(layers)]}


def falcon_h1(hf: Fields) -> dict[str, Any]:
    """layer_types, which are all the same. A null as the width of Mamba2 is a value."""
    layers: Any = hf.get("num_hidden_layers")
    types = ["hybrid"] * len(layer_numbers(layers)) if are_counts(layers) else None
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
        numbers = layer_numbers(layers)
        is_listed = isinstance(attention, list) and are_counts(*attention)
        with_attention = [i - 1 for i in attention] if is_listed else [*numbers[4::4]]
        types = [("linear_attention", "full_attention")[i in with_attention] for i in numbers]
    return {**fields, "layer_types": types, "head_dim": hf.get("qk_rope_head_dim"), "num_key_value_heads": None}


def bailing_hybrid(hf: Fields) -> dict[str, Any]:
    """Recurrent layers have as many heads as the others. head_dim is the size of theirs, and partial_rotary_factor the
    share of it that queries and keys of the others have for positions: all of that rotates.

    The last layer of each group has attention, and so has each one behind the last whole group.
    """
    layers: Any = hf.get("num_hidden_layers")
    group: Any = hf.get("layer_group_size") or 6
    types = hf.get("layer_types")
    if types is None and are_counts(layers, group):
        grouped = layers // group * group
        kinds = ("linear_attention", "full_attention")
        types = [kinds[i >= grouped or (i + 1) % group == 0] for i in layer_numbers(layers)]
    of_layers = {
        "linear_head_dim": hf.get("head_dim") or 128,
        "linear_num_heads": hf.get("num_attention_heads"),
        "linear_conv_kernel_dim": hf.get("short_conv_kernel_size") or 4,
    }
    return {**of_layers, "layer_types": types, "head_dim": hf.get("qk_rope_head_dim"), "num_key_value_heads": None}


def minimax(hf: Fields) -> dict[str, Any]:
    """layer_types, and the factors of hidden states under the names of transformers. MiniMax's files have others."""
    layers: Any = hf.get("num_hidden_layers")
    numbers, types = hf.get("attn_type_list"), hf.get("layer_types")
    if types is None and numbers is not None:
        is_listed = isinstance(numbers, list)  # else ModelConfig refuses it
        types = [("full_attention", "linear_attention")[i == 0] for i in numbers] if is_listed else numbers
    elif types is None and are_counts(layers):
        types = [("full_attention", "linear_attention")[i % 2] for i in layer_numbers(layers)]
    halves = {"full_attention": "full_attn", "linear_attention": "linear_attn", "mlp": "mlp"}
    names = {
        f"layernorm_{half}_{factor}": f"{ours}_{factor}_factor"
        for half, ours in halves.items()
        for factor in ("alpha", "beta")
    }
    return {"layer_types": types} | {ours: hf[name] for name, ours in names.items() if name in hf}


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
