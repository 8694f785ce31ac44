"""Models whose layers differ in heads or width, since parts of them were removed after the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lightserve.errors import ModelFilesError

# lists in config.json: other names, beside a list under the field's own name
OTHER_NAMES = {
    "num_attention_heads": ("num_attention_heads_per_layer",),
    "num_key_value_heads": ("num_key_value_heads_per_layer",),
    "intermediate_size": ("intermediate_size_per_layer", "intermediate_sizes"),
}
MAX_FFN_MULT = 1e6  # infinity and NaN are no widths
KNOWN_ATTENTION = {"no_op", "n_heads_in_group", "num_key_value_heads"}
KNOWN_FFN = {"no_op", "ffn_mult", "intermediate_size"}


class LayerShape(NamedTuple):
    num_heads: int  # 0: the layer has no attention
    num_kv_heads: int
    intermediate_size: int  # 0: the layer has no feed-forward

    def without_attention(self) -> LayerShape:
        return self._replace(num_heads=0, num_kv_heads=0)

    def check_heads(self) -> None:
        if bool(self.num_heads) != bool(self.num_kv_heads) or (self.num_heads and self.num_heads % self.num_kv_heads):
            raise ModelFilesError(f"config.json: {self.num_kv_heads} KV heads do not divide {self.num_heads} heads")

    def check_tp(self, size: int) -> None:
        """Check that ``size`` ranks can split the layer."""
        for what, count in (("attention heads", self.num_heads), ("FFN rows", self.intermediate_size)):
            if count % size:
                raise ModelFilesError(
                    f"{count} {what} do not divide among tp={size} ranks; choose a tp that divides them"
                )
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise ModelFilesError(f"{self.num_kv_heads} KV heads and tp={size}: one must divide the other")


def per_layer(field: str) -> str:
    """Where `layer_lists` puts the values of all layers."""
    return f"{field}_per_layer"


def layer_lists(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The lists of a config.json under one name each. The field itself becomes the largest value."""
    fields: dict[str, Any] = {}
    for field, names in OTHER_NAMES.items():
        values = next((hf[name] for name in (field, *names) if isinstance(hf.get(name), list)), None)
        if values and all(isinstance(value, int) for value in values):
            fields |= {field: max(values), per_layer(field): values}
    return fields


def nemotron_nas_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """``block_configs`` says for each layer how many query heads share a KV head and how wide the feed-forward is."""
    blocks = hf.get("block_configs")
    if not isinstance(blocks, list):
        raise ModelFilesError(f"config.json: block_configs is {blocks!r}, wanted a list with an object for each layer")
    attentions = [_table(block, "attention", KNOWN_ATTENTION) for block in blocks]
    kv_heads = [_kv_heads(attention, hf) for attention in attentions]
    return layer_lists(
        {
            "num_attention_heads": [hf.get("num_attention_heads") if count else 0 for count in kv_heads],
            "num_key_value_heads": kv_heads,
            "intermediate_size": [_width(_table(block, "ffn", KNOWN_FFN), hf) for block in blocks],
        }
    )


def _table(block: Any, key: str, known: set[str]) -> dict[str, Any]:
    table = block.get(key) if isinstance(block, dict) else None
    if not isinstance(table, dict):
        raise ModelFilesError(f"config.json: block_configs has {key} {table!r}, wanted an object")
    for name, value in table.items():
        if name not in known and value not in (None, False):
            raise ModelFilesError(
                f"config.json: block_configs has {key} {name} {value!r}, which is not supported; "
                f"supported: {', '.join(sorted(known))}"
            )
    return table


def _kv_heads(attention: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    if attention.get("no_op"):
        return 0
    group, heads = attention.get("n_heads_in_group"), hf.get("num_attention_heads")
    if isinstance(group, int) and isinstance(heads, int) and 0 < group <= heads and heads % group == 0:
        return heads // group
    given = attention.get("num_key_value_heads")
    if group is None and isinstance(given, int):
        return given
    raise ModelFilesError(f"config.json: block_configs has attention {attention!r}, which gives no number of KV heads")


def _width(ffn: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Two thirds of ``ffn_mult`` times the hidden size, rounded up to a multiple of 256."""
    if ffn.get("no_op"):
        return 0
    factor, hidden = ffn.get("ffn_mult"), hf.get("hidden_size")
    if isinstance(factor, int | float) and 0 < factor < MAX_FFN_MULT and isinstance(hidden, int):
        return -(-int(2 * factor * hidden / 3) // 256) * 256
    given = ffn.get("intermediate_size")
    if factor is None and isinstance(given, int):
        return given
    raise ModelFilesError(f"config.json: block_configs has ffn {ffn!r}, which gives no width")
