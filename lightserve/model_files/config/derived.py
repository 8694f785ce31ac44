"""Fields of ``config.json`` that follow from other fields, for models whose files lack them.

Each function gets the fields under Llama's names and returns the ones that it adds or replaces. It trusts no type:
ModelConfig checks the values that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightserve.errors import ModelFilesError

Fields = Mapping[str, Any]
Derive = Callable[[Fields], dict[str, Any]]
BAICHUAN2_VOCAB = 125_696
MAX_FACTOR = 1e6  # infinity and NaN are no widths
BAICHUAN_13B = 5120, 40  # hidden_size, num_hidden_layers
INDEXED_LAYERS = ("indexed_attention", "deepseek_sparse_attention")


def windows_except_every(count: int) -> Derive:
    """layer_types: windows in all layers except every ``count``-th, unless sliding_window_pattern has another count."""

    return except_every(count, "sliding_window_pattern", "sliding_attention")


def windows_of_layers(is_windowed: Callable[[int, int], bool]) -> Derive:
    """layer_types of Qwen's files without them. ``is_windowed`` gets the number of a layer and max_window_layers."""

    def derive(hf: Fields) -> dict[str, Any]:
        bound: Any = 28 if hf.get("max_window_layers") is None else hf["max_window_layers"]
        layers: Any = hf.get("num_hidden_layers")
        if hf.get("layer_types") is not None or not (are_counts(layers) and isinstance(bound, int)):
            return {}
        has_windows = bool(hf.get("use_sliding_window")) and hf.get("sliding_window") is not None
        kinds = ("full_attention", "sliding_attention")
        return {"layer_types": [kinds[has_windows and is_windowed(i, bound)] for i in layer_numbers(layers)]}

    return derive


def except_every(count: int, field: str, kind: str) -> Derive:
    """layer_types: ``kind`` in all layers except every ``count``-th, unless ``field`` has another count."""

    def derive(hf: Fields) -> dict[str, Any]:
        interval: Any = hf.get(field) or count
        layers: Any = hf.get("num_hidden_layers")
        if hf.get("layer_types") is not None or not are_counts(interval, layers):
            return {}
        kinds = ("full_attention", kind)
        return {"layer_types": [kinds[bool((i + 1) % interval)] for i in layer_numbers(layers)]}

    return derive


def whole_rope(hf: Fields) -> dict[str, Any]:
    """transformers' Llama and its like rotate whole heads: a partial_rotary_factor is left over from another model."""
    tables = ((key, hf.get(key)) for key in ("rope_parameters", "rope_scaling"))
    without = {
        key: {name: value for name, value in table.items() if name != "partial_rotary_factor"}
        for key, table in tables
        if isinstance(table, dict)
    }
    return {"partial_rotary_factor": None, **without}


def all_of(*derives: Derive) -> Derive:
    """The fields of several functions."""
    return lambda hf: {name: value for derive in derives for name, value in derive(hf).items()}


def indexed_layers(hf: Fields) -> dict[str, Any]:
    """transformers gives all layers a type of their own, which says nothing else. Versions differ in its name."""
    types = hf.get("layer_types")
    is_of_layers = isinstance(types, list) and set(map(str, types)) in ({kind} for kind in INDEXED_LAYERS)
    return {"layer_types": None} if is_of_layers else {}


def llama4(hf: Fields) -> dict[str, Any]:
    """Layers with positions attend to chunks. A window of the same size says which tokens the KV cache keeps."""
    layers: Any = hf.get("num_hidden_layers")
    every: Any = hf.get("no_rope_layer_interval") or 4
    if not are_counts(layers, every):
        return {}
    flags = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in layer_numbers(layers)]
    if not isinstance(flags, list) or len(flags) < layers:
        raise ModelFilesError(f"config.json: no_rope_layers needs {layers} numbers; fetch it again")
    kinds = hf.get("layer_types") or ["chunked_attention" if flag else "full_attention" for flag in flags[:layers]]
    chunk = hf.get("attention_chunk_size")
    if isinstance(kinds, list):
        chunked = "full_attention" if chunk is None else "sliding_attention"
        kinds = [chunked if kind == "chunked_attention" else kind for kind in kinds]
    return {"no_rope_layers": flags, "layer_types": kinds, "sliding_window": chunk}


def minicpm(hf: Fields) -> dict[str, Any]:
    """dense_len: requests of so many tokens attend to all of them, longer ones sparsely."""
    sparse = hf.get("sparse_config")
    return {"dense_len": sparse.get("dense_len")} if isinstance(sparse, dict) else {}


def minicpm3(hf: Fields) -> dict[str, Any]:
    """Files that lack v_head_dim share hidden_size among the heads."""
    hidden: Any = hf.get("hidden_size")
    heads: Any = hf.get("num_attention_heads")
    if hf.get("v_head_dim") is not None or not are_counts(hidden, heads):
        return {}
    return {"v_head_dim": hidden // heads}


def gemma(hf: Fields) -> dict[str, Any]:
    """The first files say gelu and mean its tanh form."""
    return {"hidden_act": "gelu_pytorch_tanh"} if hf.get("hidden_act") == "gelu" else {}


def gemma2(hf: Fields) -> dict[str, Any]:
    """A null turns a soft cap off; only an absent field has the default."""
    softcaps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {key: hf.get(key, cap) for key, cap in softcaps.items()} | windows_except_every(2)(hf)


def gemma3(hf: Fields) -> dict[str, Any]:
    """Older files have the rotary bases of the two kinds of layers in fields of their own."""
    given = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or {}
    tables = [given, scaling, *given.values()] if isinstance(given, dict) else [given]
    if not all(isinstance(table, dict | None) for table in tables):
        return {}  # RopeConfig refuses it
    full = {"rope_theta": hf.get("rope_theta") or 1_000_000.0, **scaling, **(given.get("full_attention") or {})}
    local = {"rope_theta": hf.get("rope_local_base_freq") or 10_000.0, **(given.get("sliding_attention") or {})}
    rope = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    return rope | windows_except_every(6)(hf)


def gemma4(hf: Fields) -> dict[str, Any]:
    """Layers that see all tokens have other heads, and layers without keys and values may be twice as wide.

    Published files have fields for these heads, and files that transformers saves today a table for each such layer.
    """
    types = hf.get("layer_types") or windows_except_every(6)(hf).get("layer_types")
    if not isinstance(types, list) or not types:
        return {}  # ModelConfig refuses it
    if hf.get("layer_types") is None:
        types[-1] = "full_attention"
    shapes = [_gemma4_shape(hf, layer, kind) for layer, kind in enumerate(types)]
    width, readers = hf.get("intermediate_size"), hf.get("num_kv_shared_layers")
    widths = [width] * len(types)
    if hf.get("use_double_wide_mlp") and isinstance(width, int) and isinstance(readers, int) and readers < len(types):
        widths[len(types) - readers :] = [2 * width] * readers
    return {
        "layer_types": types,
        "rope_parameters": hf.get("rope_parameters") or _GEMMA4_ROPE,
        "num_experts": hf.get("num_experts") if hf.get("enable_moe_block") else None,
        "head_dim_per_layer": [head_dim for head_dim, _ in shapes],
        "num_key_value_heads_per_layer": [kv_heads for _, kv_heads in shapes],
        "intermediate_size_per_layer": widths,
    }


_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _gemma4_shape(hf: Fields, layer: int, kind: Any) -> tuple[Any, Any]:
    """The size of a head, and the number of KV heads."""
    head_dim, kv_heads = hf.get("head_dim"), hf.get("num_key_value_heads")
    tables = hf.get("per_layer_config")
    if isinstance(tables, dict):
        table = tables.get(str(layer))
        table = table if isinstance(table, dict) else {}
        return table.get("head_dim", head_dim), table.get("num_key_value_heads", kv_heads)
    if kind != "full_attention":
        return head_dim, kv_heads
    global_heads = hf.get("num_global_key_value_heads") if hf.get("attention_k_eq_v") else None
    return hf.get("global_head_dim") or 512, global_heads or kv_heads


def gpt_bigcode(hf: Fields) -> dict[str, Any]:
    return {"num_key_value_heads": 1 if hf.get("multi_query", True) else hf.get("num_attention_heads")}


def falcon(hf: Fields) -> dict[str, Any]:
    """num_kv_heads counts in the new architecture only."""
    heads = hf.get("num_attention_heads")
    if hf.get("new_decoder_architecture"):
        return {"num_key_value_heads": hf.get("num_kv_heads") or heads}
    return {"num_key_value_heads": 1 if hf.get("multi_query", True) else heads}


def mpt(hf: Fields) -> dict[str, Any]:
    """The fields of attn_config, beside the others."""
    attention = hf.get("attn_config")
    ratio, hidden = hf.get("expansion_ratio", 4), hf.get("hidden_size")
    fields = {key: value for key, value in attention.items() if key not in hf} if isinstance(attention, dict) else {}
    return fields | ({"intermediate_size": ratio * hidden} if are_counts(ratio, hidden) else {})


def gptj(hf: Fields) -> dict[str, Any]:
    """rotary_dim is a number of dimensions instead of a part of the head."""
    rotary, hidden, heads = hf.get("rotary_dim", 64), hf.get("hidden_size"), hf.get("num_attention_heads")
    if not are_counts(rotary, hidden, heads):
        return {"rotary_dim": rotary}
    # rounded up, so that head_dim times it is not less than rotary_dim
    return {"rotary_dim": rotary, "partial_rotary_factor": math.nextafter(rotary * heads / hidden, 1.0)}


def baichuan(hf: Fields) -> dict[str, Any]:
    """The 13B models have ALiBi, and model_max_length without max_position_embeddings in their files."""
    max_len, shape = hf.get("max_position_embeddings"), (hf.get("hidden_size"), hf.get("num_hidden_layers"))
    return {
        "uses_alibi": max_len is None or shape == BAICHUAN_13B,
        "normalizes_head": hf.get("vocab_size") == BAICHUAN2_VOCAB,
        "max_position_embeddings": hf.get("model_max_length") if max_len is None else max_len,
    }


def chatglm(hf: Fields) -> dict[str, Any]:
    """Half of each head rotates, and rope_ratio multiplies the base."""
    is_grouped = hf.get("multi_query_attention", False)
    ratio = hf.get("rope_ratio", 1)
    fields = {
        "vocab_size": hf.get("padded_vocab_size", hf.get("vocab_size")),
        "num_key_value_heads": hf.get("multi_query_group_num", 1) if is_grouped else None,
        "partial_rotary_factor": 0.5,
    }
    return fields if "rope_theta" in hf else {**fields, "rope_theta": _product(10_000, ratio)}


def cwm(hf: Fields) -> dict[str, Any]:
    """layer_types: the first of every four layers sees all tokens."""
    layers: Any = hf.get("num_hidden_layers")
    if hf.get("layer_types") is not None or not are_counts(layers):
        return {}
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[bool(i % 4)] for i in layer_numbers(layers)]}


def hunyuan(hf: Fields) -> dict[str, Any]:
    """A dynamic rope with a fixed alpha is a default one with a larger base. Lists have one number for all layers."""
    names = ("num_experts_per_tok", "num_shared_expert", "moe_intermediate_size")
    fields = {name: _same_in_all(hf[name]) for name in names if name in hf}
    rope = {**(table_of(hf.get("rope_scaling"))), **table_of(hf.get("rope_parameters"))}
    alpha, base = rope.get("alpha"), rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0
    hidden: Any = hf.get("hidden_size")
    heads: Any = hf.get("num_attention_heads")
    dim: Any = hf.get("head_dim") or (hidden // heads if are_counts(hidden, heads) else None)
    if not alpha or not isinstance(alpha, int | float) or not isinstance(base, int | float) or not are_counts(dim):
        return fields
    scaled = base * alpha ** (dim / max(dim - 2, 1))
    return {**fields, "rope_parameters": None, "rope_scaling": None, "rope_theta": scaled}


def table_of(value: Any) -> Fields:
    return value if isinstance(value, dict) else {}


def _same_in_all(value: Any) -> Any:
    """A list that differs by layer stays, and is refused where it is read."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def mimo(hf: Fields) -> dict[str, Any]:
    """The hub's files list windows and experts as 0 and 1, and have fields of their own for windowed layers."""
    layers: Any = hf.get("num_hidden_layers")
    if not are_counts(layers):
        return {}
    numbers, before = layer_numbers(layers), hf.get("sliding_window_size")
    windows = hf.get("hybrid_layer_pattern") or [int(i > 0 and (i + 1) % 6 > 0) for i in numbers]
    kinds = hf.get("layer_types") or _named(windows, "full_attention", "sliding_attention")
    sparse = hf.get("moe_layer_freq") or [int(i > 0) for i in numbers]
    return {
        "layer_types": kinds,
        "mlp_layer_types": hf.get("mlp_layer_types") or _named(sparse, "dense", "sparse"),
        "sliding_window": before + 1 if isinstance(before, int) else hf.get("sliding_window"),
        "rope_parameters": hf.get("rope_parameters") or _mimo_rope(hf),
        **_mimo_kv_heads(hf, kinds),
    }


def mimo_v2(hf: Fields) -> dict[str, Any]:
    """q, k and v in one tensor are read as floats, whatever the format of the others is."""
    layers: Any = hf.get("num_hidden_layers")
    table = table_of(hf.get("quantization_config"))
    if hf.get("attention_projection_layout") != "fused_qkv" or not table or not are_counts(layers):
        return mimo(hf)
    given = table.get("ignored_layers") or []
    floats = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in layer_numbers(layers) for name in "qkv"]
    ignored = [*given, *floats] if isinstance(given, list) else given
    return {**mimo(hf), "quantization_config": {**table, "ignored_layers": ignored}}


def _mimo_kv_heads(hf: Fields, kinds: Any) -> dict[str, Any]:
    """Windowed layers have a number of their own."""
    heads: Any = hf.get("num_key_value_heads")
    if not are_counts(heads) or not isinstance(kinds, list):
        return {}
    windowed: Any = hf.get("swa_num_key_value_heads") or 2 * heads
    of_layers = [windowed if kind == "sliding_attention" else heads for kind in kinds]
    largest = max(of_layers) if are_counts(*of_layers) else windowed
    return {"num_key_value_heads": largest, "num_key_value_heads_per_layer": of_layers}


def _mimo_rope(hf: Fields) -> dict[str, Any]:
    rotary_share = hf.get("partial_rotary_factor") or 0.334
    bases = {"full_attention": hf.get("rope_theta") or 5e6, "sliding_attention": hf.get("swa_rope_theta") or 1e4}
    return {kind: {"rope_theta": base, "partial_rotary_factor": rotary_share} for kind, base in bases.items()}


def _named(flags: Any, zero_name: str, one_name: str) -> Any:
    """Values that are not a list of 0 and 1 stay, and are refused where they are read."""
    is_list = isinstance(flags, list) and all(flag in (0, 1) for flag in flags)
    return [one_name if flag else zero_name for flag in flags] if is_list else flags


def internlm(hf: Fields) -> dict[str, Any]:
    """``rotary`` has the base, and a type that is "origin" or the name of a scaling."""
    rotary = hf.get("rotary")
    if not isinstance(rotary, dict):
        return {}
    theta = {"rope_theta": rotary.get("base", hf.get("rope_theta"))}
    if rotary.get("type", "origin") == "origin":
        return theta
    return {**theta, "rope_scaling": {"rope_type": rotary["type"], "factor": rotary.get("scaling_factor", 1.0)}}


def qwen(hf: Fields) -> dict[str, Any]:
    """intermediate_size counts the rows of gate and up together.

    Past seq_length the model scales queries (use_logn_attn) and the rotary base (use_dynamic_ntk) by the length of the
    request. This is not implemented, so requests end there.
    """
    size = hf.get("intermediate_size")
    fields: dict[str, Any] = {"intermediate_size": size // 2} if isinstance(size, int) else {}
    if hf.get("seq_length") and (hf.get("use_dynamic_ntk", True) or hf.get("use_logn_attn", True)):
        fields["max_position_embeddings"] = hf["seq_length"]
    return fields


def roberta(hf: Fields) -> dict[str, Any]:
    """The table of positions begins with those of the padding token and before, which no token has."""
    positions: Any = hf.get("max_position_embeddings")
    padding: Any = hf.get("pad_token_id", 1)
    if not are_counts(positions) or not isinstance(padding, int):
        return {}
    return {"pad_token_id": padding, "max_position_embeddings": positions - padding - 1}


def nomic_bert(hf: Fields) -> dict[str, Any]:
    """The files of the hub name GPT-2's fields. Positions past the trained ones would need a scaled rope."""
    positions: Any = hf.get("max_position_embeddings")
    trained: Any = hf.get("max_trained_positions")
    fields: dict[str, Any] = {"hidden_act": "silu"} if hf.get("hidden_act") in ("swiglu", None) else {}
    if are_counts(positions, trained):
        fields["max_position_embeddings"] = min(positions, trained)
    if hf.get("rope_theta") is None and hf.get("rope_parameters") is None:
        fields["rope_theta"] = 1000.0
    return fields


def modernbert(hf: Fields) -> dict[str, Any]:
    """Every third layer sees all tokens, the others ``local_attention``; each kind has a rotary base of its own."""
    every: Any = hf.get("global_attn_every_n_layers") or 3
    layers: Any = hf.get("num_hidden_layers")
    given = hf.get("rope_parameters") or {}
    fields: dict[str, Any] = {"sliding_window": hf.get("local_attention") or hf.get("sliding_window")}
    if hf.get("layer_types") is None and are_counts(every, layers):
        kinds = ("full_attention", "sliding_attention")
        fields["layer_types"] = [kinds[bool(i % every)] for i in layer_numbers(layers)]
    if not isinstance(given, dict) or not all(isinstance(table, dict | None) for table in given.values()):
        return fields  # RopeConfig refuses it
    bases = {
        "full_attention": hf.get("global_rope_theta") or 160_000.0,
        "sliding_attention": hf.get("local_rope_theta") or 10_000.0,
    }
    tables = {kind: {"rope_theta": base, **(given.get(kind) or {})} for kind, base in bases.items()}
    return {**fields, "rope_parameters": tables}


def _product(base: int, ratio: Any) -> Any:
    """A ratio that is not a number is refused where it is read."""
    return base * ratio if isinstance(ratio, int | float) else ratio


def layer_numbers(count: int) -> range:
    """A damaged file may name any number of layers. ModelConfig refuses too many."""
    return range(min(count, 10_000))


def are_counts(*values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)
