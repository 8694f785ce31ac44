"""Fields of the ``config.json`` of Step 3.5 that follow from others. See `derived`."""

from __future__ import annotations

from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.config.derived import Fields, are_counts, layer_numbers, table_of

WINDOWED, FULL = "sliding_attention", "full_attention"
NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
FIRST_SPARSE = 3


def step3p5(hf: Fields) -> dict[str, Any]:
    """The hub's files have lists with numbers of all layers, and behind them those of the layers for drafts."""
    layers: Any = hf.get("num_hidden_layers")
    if not are_counts(layers):
        return {}
    given = hf.get("layer_types") or [FULL] * len(layer_numbers(layers))
    if not isinstance(given, list):
        return {}  # ModelConfig refuses it
    kinds = given[:layers]
    return {
        "layer_types": kinds,
        "mlp_layer_types": hf.get("mlp_layer_types") or _ffn_kinds(hf, layers),
        "rope_parameters": _ropes(hf, kinds),
        **_heads(hf, kinds),
    }


def _ffn_kinds(hf: Fields, layers: int) -> list[str]:
    """``moe_layers_enum`` names the layers with experts: "3,4,5"."""
    listed = hf.get("moe_layers_enum")
    if listed is None:
        sparse = {str(layer) for layer in range(FIRST_SPARSE, layers)}
    else:
        sparse = {str(item).strip() for item in (listed.split(",") if isinstance(listed, str) else listed)}
    return [("dense", "sparse")[str(layer) in sparse] for layer in layer_numbers(layers)]


def _heads(hf: Fields, kinds: list[Any]) -> dict[str, Any]:
    """Windowed layers have numbers of their own, which transformers saves in a field or in a table for each layer."""
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    others, tables = table_of(hf.get("attention_other_setting")), table_of(hf.get("per_layer_config"))
    if others.get("head_dim", hf.get("head_dim")) != hf.get("head_dim"):
        raise ModelFilesError(
            f"config.json: attention_other_setting has head_dim {others['head_dim']}, and the other layers have "
            f"{hf.get('head_dim')}; this is not supported"
        )
    windowed = others.get("num_attention_heads") or hf.get("num_sliding_attention_heads") or heads
    shapes = [
        (windowed, others.get("num_attention_groups") or kv_heads) if kind == WINDOWED else (heads, kv_heads)
        for kind in kinds
    ]
    of_layers = [
        (table_of(tables.get(str(layer))).get("num_attention_heads", count), kv_count)
        for layer, (count, kv_count) in enumerate(shapes)
    ]
    columns = dict(zip(("num_attention_heads", "num_key_value_heads"), zip(*of_layers, strict=True), strict=True))
    if not all(are_counts(*values) for values in columns.values()):
        return {}  # ModelConfig refuses it
    largest: dict[str, Any] = {name: max(values) for name, values in columns.items()}
    return largest | {f"{name}_per_layer": list(values) for name, values in columns.items()}


def _ropes(hf: Fields, kinds: list[Any]) -> dict[str, Any]:
    """A table for each kind of layer. Only layers of ``yarn_only_types`` have scaled positions."""
    given, scaling = table_of(hf.get("rope_parameters")), table_of(hf.get("rope_scaling"))
    scaled = hf.get("yarn_only_types") or [FULL]
    ropes = {}
    for kind in dict.fromkeys(map(str, kinds)):
        rope = {"rope_theta": _of_kind(hf, "rope_theta", kind, kinds)}
        share = _of_kind(hf, "partial_rotary_factors", kind, kinds)
        rope |= {} if share is None else {"partial_rotary_factor": share}
        ropes[kind] = given.get(kind) or {**rope, **(scaling if kind in scaled else {})}
    return ropes


def _of_kind(hf: Fields, field: str, kind: str, kinds: list[Any]) -> Any:
    """The value of all layers of a kind; a list has one for each layer."""
    values = hf.get(field)
    if not isinstance(values, list):
        return values
    of_kind = [value for value, layer_kind in zip(values, kinds, strict=False) if layer_kind == kind]
    if not of_kind or of_kind.count(of_kind[0]) != len(of_kind):
        raise ModelFilesError(f"config.json: {field} differs among layers of {kind}, which is not supported")
    return of_kind[0]
