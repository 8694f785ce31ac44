"""The names that models give to the same fields of ``config.json``.

``ModelConfig`` reads transformers' names for Llama. A model with other names, or with other defaults for fields that
its config.json may lack, has an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# other name: Llama's name; for every model, where Llama's name is absent
COMMON_NAMES = {
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
    "model_max_length": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
    "layernorm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "norm_eps": "rms_norm_eps",
    "norm_epsilon": "rms_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
    "hidden_activation": "hidden_act",
}


@dataclass(frozen=True, slots=True)
class ConfigNames:
    """What is special in the config.json of one model_type."""

    names: Mapping[str, str] = field(default_factory=dict)  # other name: Llama's name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that the file may lack, by Llama's names


MODELS = {
    "bloom": ConfigNames(defaults={"tie_word_embeddings": True, "hidden_act": "gelu_new"}),
}


def with_common_names(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config with Llama's names beside its own. A field that is there under Llama's name stays."""
    model_type = hf.get("model_type")
    special = MODELS.get(model_type, ConfigNames()) if isinstance(model_type, str) else ConfigNames()
    common = dict(hf)
    for name, llama_name in ({**COMMON_NAMES, **special.names}).items():
        if common.get(llama_name) is None and hf.get(name) is not None:
            common[llama_name] = hf[name]
    for name, value in special.defaults.items():
        if common.get(name) is None:
            common[name] = value
    return common
