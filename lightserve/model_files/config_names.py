"""The names that models give to the same fields of ``config.json``.

``ModelConfig`` reads transformers' names for Llama. A model with other names, or with other defaults for fields that
its config.json may lack, has an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightserve.model_files.derived_fields import baichuan_fields, chatglm_fields, internlm_fields, qwen_fields
from lightserve.model_files.layer_shapes import layer_lists, nemotron_nas_fields

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
# null in the file is a value of these fields: no window, or as many KV heads as heads
NULL_IS_A_VALUE = {"num_key_value_heads", "sliding_window"}


@dataclass(frozen=True, slots=True)
class ConfigNames:
    """What is special in the config.json of one model_type."""

    names: Mapping[str, str] = field(default_factory=dict)  # other name: Llama's name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that the file may lack, by Llama's names
    # from the fields of the file to those that follow from them, by Llama's names; these have precedence
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: {}


_GLM = {
    "rms_norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_MISTRAL = {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096}

MODELS = {
    "baichuan": ConfigNames(defaults={"rms_norm_eps": 1e-6}, derived=baichuan_fields),
    "bloom": ConfigNames(defaults={"tie_word_embeddings": True, "hidden_act": "gelu_new"}),
    "chatglm": ConfigNames({"kv_channels": "head_dim"}, {"rms_norm_eps": 1e-5}, chatglm_fields),
    "exaone4": ConfigNames(defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096}),
    "glm": ConfigNames(defaults=_GLM),
    "glm4": ConfigNames(defaults=_GLM),
    "granite": ConfigNames(defaults={"rms_norm_eps": 1e-6}),
    "internlm": ConfigNames(defaults={"rms_norm_eps": 1e-6}, derived=internlm_fields),
    "internlm2": ConfigNames(defaults={"rms_norm_eps": 1e-6}),
    "minicpm": ConfigNames(defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "ministral": ConfigNames(defaults=_MISTRAL),
    "mistral": ConfigNames(defaults=_MISTRAL),
    "nemotron-nas": ConfigNames(defaults={"rms_norm_eps": 1e-6}, derived=nemotron_nas_fields),
    "olmo": ConfigNames(defaults={"rms_norm_eps": 1e-5}),
    "olmo2": ConfigNames(defaults={"rms_norm_eps": 1e-5}),
    "olmo3": ConfigNames(defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096}),
    "qwen": ConfigNames({"kv_channels": "head_dim"}, {"rms_norm_eps": 1e-6}, qwen_fields),
    "seed_oss": ConfigNames(defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128}),
    "smollm3": ConfigNames(
        defaults={
            "rms_norm_eps": 1e-6,
            "rope_theta": 2_000_000.0,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        }
    ),
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
        if name not in common or (common[name] is None and name not in NULL_IS_A_VALUE):
            common[name] = value
    return {**common, **layer_lists(hf), **special.derived(hf)}
