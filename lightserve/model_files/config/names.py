"""The names that models give to the same fields of ``config.json``.

``ModelConfig`` reads transformers' names for Llama. A model with other names, or with other defaults for fields that
its config.json may lack, has an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightserve.model_files.config import derived as config_derived, derived_recurrent, derived_step, model_defaults
from lightserve.model_files.config.layer_shapes import layer_lists, nemotron_nas_fields
from lightserve.model_files.config.text_part import with_text_config

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
# null in the file is a value of these fields: no window, no inputs of layers, no factor, as many KV heads as heads
NULL_IS_A_VALUE = {"attention_value_scale", "hidden_size_per_layer_input", "num_key_value_heads", "sliding_window"}
# where one of the older fields is in the file, the newer one has no default
OLDER_FIELDS = {"rope_parameters": frozenset({"rope_theta", "rope_scaling"})}


@dataclass(frozen=True, slots=True)
class ConfigNames:
    """What is special in the config.json of one model_type."""

    names: Mapping[str, str] = field(default_factory=dict)  # other name: Llama's name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that the file may lack, by Llama's names
    # fields that follow from others, by Llama's names; they replace the fields of the file
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: {}


_GLM = {
    "rms_norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_MISTRAL = {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3 = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_GEMMA = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "head_dim": 256}
_GEMMA2 = {**_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA3 = {  # files of multimodal models leave out the values that transformers has as defaults
    **_GEMMA2,
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_QWEN_FIELDS = config_derived.all_of(
    config_derived.whole_rope, config_derived.windows_of_layers(lambda layer, bound: layer >= bound)
)
_SHARED_EXPERTS = {"num_shared_experts": "n_shared_experts"}
_KIMI_NAMES = {
    **_SHARED_EXPERTS,
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
}
_CWM = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 8192,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LFM2 = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "conv_L_cache": 3,
}
_MELLUM_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MINICPM3 = {
    "rms_norm_eps": 1e-5,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "rope_interleave": False,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
_MIMO = {
    "attention_value_scale": 0.707,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 129,
}
_ERNIE = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096}
_MAMBA2 = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
_QWEN3_HYBRID = ConfigNames(
    defaults={
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    derived=derived_recurrent.recurrent_except_every(4),
)
_LAYER_NORM = {"rms_norm_eps": 1e-5}
_BERT = {"tie_word_embeddings": True, "rms_norm_eps": 1e-12, "hidden_act": "gelu", "max_position_embeddings": 512}
_NOMIC_BERT = {"rms_norm_eps": 1e-12, "max_position_embeddings": 2048}
_MODERNBERT = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "max_position_embeddings": 8192,
    "sliding_window": 128,
}
_TIED = {**_LAYER_NORM, "tie_word_embeddings": True}

MODELS = {
    "afmoe": ConfigNames(
        {**_SHARED_EXPERTS, "num_dense_layers": "first_k_dense_replace", "route_scale": "routed_scaling_factor"},
        model_defaults.AFMOE,
        config_derived.except_every(4, "global_attn_every_n_layers", "sliding_attention"),
    ),
    "apertus": ConfigNames(defaults={"rms_norm_eps": 1e-5, "hidden_act": "xielu", "rope_parameters": _APERTUS_ROPE}),
    "arcee": ConfigNames(defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"}),
    "axk1": ConfigNames({"qk_rope_head_dim": "head_dim"}, model_defaults.AXK1),
    # the length under its own name, since its absence under Llama's name tells 13B
    "baichuan": ConfigNames({"model_max_length": "model_max_length"}, {"rms_norm_eps": 1e-6}, config_derived.baichuan),
    "bailing_hybrid": ConfigNames(
        _KIMI_NAMES,
        model_defaults.LING3,
        config_derived.all_of(config_derived.whole_rope, derived_recurrent.bailing_hybrid),
    ),
    "bailing_moe": ConfigNames(_SHARED_EXPERTS),
    "bailing_moe_v2": ConfigNames(_SHARED_EXPERTS, {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1}),
    "bamba": ConfigNames(
        defaults={**_MAMBA2, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
        derived=derived_recurrent.bamba,
    ),
    "bert": ConfigNames(defaults=_BERT),
    "bitnet": ConfigNames(
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 5, "hidden_act": "relu2", "rope_theta": 500_000.0}
    ),
    "bloom": ConfigNames(defaults={"tie_word_embeddings": True, "hidden_act": "gelu_new"}),
    "camembert": ConfigNames(defaults=_BERT, derived=config_derived.roberta),
    "chatglm": ConfigNames({"kv_channels": "head_dim"}, {"rms_norm_eps": 1e-5}, config_derived.chatglm),
    "cohere": ConfigNames(defaults={**_TIED, "logit_scale": 0.0625, "rope_theta": 500_000.0}),
    "cohere2": ConfigNames(
        defaults={**_TIED, "logit_scale": 0.0625, "sliding_window": 4096},
        derived=config_derived.windows_except_every(4),
    ),
    "cwm": ConfigNames(defaults=_CWM, derived=config_derived.cwm),
    "deepseek_v32": ConfigNames(
        {"qk_rope_head_dim": "head_dim"}, model_defaults.DEEPSEEK_V32, config_derived.indexed_layers
    ),
    "dots1": ConfigNames(
        defaults={"use_sliding_window": True, "max_window_layers": 62},
        derived=config_derived.windows_of_layers(lambda layer, bound: layer >= bound),
    ),
    "ernie4_5": ConfigNames(defaults={**_ERNIE, "num_key_value_heads": 2, "head_dim": 128}),
    "ernie4_5_moe": ConfigNames(
        {"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"}, {**_ERNIE, "moe_num_shared_experts": 2}
    ),
    "exaone4": ConfigNames(defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096}),
    "exaone_moe": ConfigNames(
        _SHARED_EXPERTS,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    ),
    "falcon": ConfigNames({"activation": "hidden_act"}, {**_TIED, "hidden_act": "gelu"}, config_derived.falcon),
    "falcon_h1": ConfigNames(
        defaults={**_MAMBA2, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}, derived=derived_recurrent.falcon_h1
    ),
    "flex_olmo": ConfigNames(defaults={"rms_norm_eps": 1e-6, "rope_theta": 500_000.0}),
    "gemma": ConfigNames(defaults=_GEMMA, derived=config_derived.gemma),
    "gemma2": ConfigNames(defaults=_GEMMA2, derived=config_derived.gemma2),
    "gemma3_text": ConfigNames(defaults=_GEMMA3, derived=config_derived.gemma3),
    "gemma4_text": ConfigNames(
        {"top_k_experts": "num_experts_per_tok"},
        {**model_defaults.GEMMA4, "hidden_size_per_layer_input": 256},
        config_derived.gemma4,
    ),
    "gemma4_unified_text": ConfigNames(
        defaults={
            **model_defaults.GEMMA4,
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        },
        derived=config_derived.gemma4,
    ),
    "glm": ConfigNames(defaults=_GLM),
    "glm4": ConfigNames(defaults=_GLM),
    # heads of any number: hidden_size need not divide among them
    "glm4_moe_lite": ConfigNames({"qk_rope_head_dim": "head_dim"}, {"first_k_dense_replace": 1}),
    "glm4v": ConfigNames(defaults=model_defaults.GLM4V),
    "glm4v_moe": ConfigNames(defaults=model_defaults.GLM4V_MOE),
    "glm_moe_dsa": ConfigNames({"qk_rope_head_dim": "head_dim"}, model_defaults.GLM_DSA, config_derived.indexed_layers),
    "gpt2": ConfigNames(defaults={**_TIED, "hidden_act": "gelu_new", "max_position_embeddings": 1024}),
    "gpt_bigcode": ConfigNames(
        defaults={**_TIED, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 1024},
        derived=config_derived.gpt_bigcode,
    ),
    "gpt_neox": ConfigNames(defaults={**_LAYER_NORM, "hidden_act": "gelu", "partial_rotary_factor": 0.25}),
    "gptj": ConfigNames(defaults={**_LAYER_NORM, "hidden_act": "gelu_new"}, derived=config_derived.gptj),
    "granite": ConfigNames(defaults={"rms_norm_eps": 1e-6}),
    "granite_swa": ConfigNames(
        defaults={"num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True},
        derived=config_derived.cwm,
    ),
    "granitemoe_swa": ConfigNames(
        defaults={"rms_norm_eps": 1e-6, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
        derived=config_derived.cwm,
    ),
    "granitemoeshared": ConfigNames(defaults={"rms_norm_eps": 1e-6, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "granitemoehybrid": ConfigNames(
        defaults={
            **_MAMBA2,
            "rms_norm_eps": 1e-6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
        derived=derived_recurrent.granite_hybrid,
    ),
    "helium": ConfigNames(
        defaults={"rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128, "rope_theta": 100_000.0}
    ),
    "hunyuan_v1_dense": ConfigNames({"attention_head_dim": "head_dim"}, derived=config_derived.hunyuan),
    "hunyuan_v1_moe": ConfigNames(
        {"attention_head_dim": "head_dim", "moe_topk": "num_experts_per_tok"}, derived=config_derived.hunyuan
    ),
    "hy_v3": ConfigNames(
        {**_SHARED_EXPERTS, "router_scaling_factor": "routed_scaling_factor"},
        {
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.826,
            "rope_theta": 11_158_840.0,
        },
    ),
    "hyperclovax": ConfigNames(defaults={"rms_norm_eps": 1e-6}),
    "internlm": ConfigNames(defaults={"rms_norm_eps": 1e-6}, derived=config_derived.internlm),
    "internlm2": ConfigNames(defaults={"rms_norm_eps": 1e-6}),
    "jais2": ConfigNames(defaults={**_LAYER_NORM, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}),
    "kimi_linear": ConfigNames(
        _KIMI_NAMES,
        model_defaults.KIMI_LINEAR,
        derived_recurrent.kimi_linear,
    ),
    "lfm2": ConfigNames(defaults=_LFM2, derived=derived_recurrent.lfm2),
    "lfm2_moe": ConfigNames(
        defaults={
            **_LFM2,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
        },
        derived=derived_recurrent.lfm2_moe,
    ),
    "llama": ConfigNames(derived=config_derived.whole_rope),
    "mellum": ConfigNames(
        defaults={"norm_topk_prob": True, "sliding_window": 1024, "rope_parameters": _MELLUM_ROPE},
        derived=config_derived.windows_of_layers(lambda layer, bound: False),
    ),
    "mimo_v2": ConfigNames(defaults=_MIMO, derived=config_derived.mimo_v2),
    "mimo_v2_flash": ConfigNames(defaults=_MIMO, derived=config_derived.mimo),
    "minicpm": ConfigNames(
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True}, derived=config_derived.minicpm
    ),
    "llama4_text": ConfigNames(defaults=model_defaults.LLAMA4, derived=config_derived.llama4),
    "minicpm3": ConfigNames({"qk_rope_head_dim": "head_dim"}, _MINICPM3, config_derived.minicpm3),
    **dict.fromkeys(
        ("minimax", "minimax_m1", "minimax_text_01"),
        ConfigNames(defaults=model_defaults.MINIMAX, derived=derived_recurrent.minimax),
    ),
    "ministral": ConfigNames(defaults=_MISTRAL),
    "ministral3": ConfigNames(defaults=_MINISTRAL3),
    "mistral": ConfigNames(defaults=_MISTRAL, derived=config_derived.whole_rope),
    "mixtral": ConfigNames(derived=config_derived.whole_rope),
    "modernbert": ConfigNames(defaults=_MODERNBERT, derived=config_derived.modernbert),
    "mpt": ConfigNames(defaults={**_TIED, "hidden_act": "gelu"}, derived=config_derived.mpt),
    "nemotron": ConfigNames(defaults={**_LAYER_NORM, "hidden_act": "relu2", "partial_rotary_factor": 0.5}),
    "nemotron_h": ConfigNames(
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
        },
        derived=derived_recurrent.nemotron_h,
    ),
    "nemotron-nas": ConfigNames(defaults={"rms_norm_eps": 1e-6}, derived=nemotron_nas_fields),
    "nomic_bert": ConfigNames(defaults=_NOMIC_BERT, derived=config_derived.nomic_bert),
    "olmo": ConfigNames(defaults={"rms_norm_eps": 1e-5}),
    "olmo2": ConfigNames(defaults={"rms_norm_eps": 1e-5}),
    "olmo3": ConfigNames(defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096}),
    "olmo_hybrid": ConfigNames(
        defaults={"rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4}, derived=derived_recurrent.olmo_hybrid
    ),
    "opt": ConfigNames(defaults={**_TIED, "hidden_act": "relu"}),
    "phi": ConfigNames(defaults={**_LAYER_NORM, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5}),
    "phi3": ConfigNames(defaults={"rms_norm_eps": 1e-5}),
    "qwen": ConfigNames({"kv_channels": "head_dim"}, {"rms_norm_eps": 1e-6}, config_derived.qwen),
    "qwen2": ConfigNames(defaults=_QWEN, derived=_QWEN_FIELDS),
    "qwen2_moe": ConfigNames(
        defaults=_QWEN,
        derived=config_derived.all_of(
            config_derived.whole_rope,
            config_derived.windows_of_layers(lambda layer, bound: layer % 2 == 0 and layer < bound),
        ),
    ),
    "qwen3": ConfigNames(defaults=_QWEN, derived=_QWEN_FIELDS),
    # transformers gives all layers the window, whatever layer_types says
    "qwen3_moe": ConfigNames(
        defaults=_QWEN, derived=config_derived.all_of(config_derived.whole_rope, lambda hf: {"layer_types": None})
    ),
    "qwen3_5_moe_text": _QWEN3_HYBRID,
    "qwen3_5_text": replace(_QWEN3_HYBRID, defaults={**_QWEN3_HYBRID.defaults, "num_key_value_heads": 4}),
    "qwen3_next": _QWEN3_HYBRID,
    "roberta": ConfigNames(defaults=_BERT, derived=config_derived.roberta),
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
    "stablelm": ConfigNames(defaults={**_LAYER_NORM, "partial_rotary_factor": 0.25}),
    "starcoder2": ConfigNames(defaults={**_TIED, "hidden_act": "gelu_pytorch_tanh"}),
    "step3p5": ConfigNames(derived_step.NAMES, model_defaults.STEP3P5, derived_step.step3p5),
    "vaultgemma": ConfigNames(defaults={**_GEMMA2, "num_key_value_heads": 4}, derived=config_derived.gemma2),
    "xlm-roberta": ConfigNames(defaults=_BERT, derived=config_derived.roberta),
    "youtu": ConfigNames({"qk_rope_head_dim": "head_dim"}, {"tie_word_embeddings": True}),
}


def with_common_names(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The config with Llama's names beside its own. A field that is there under Llama's name stays."""
    hf = with_text_config(config_json)
    special = _special(hf)
    common = dict(hf)
    for name, llama_name in ({**COMMON_NAMES, **special.names}).items():
        if common.get(llama_name) is None and hf.get(name) is not None:
            common[llama_name] = hf[name]
    for name, value in special.defaults.items():
        is_absent = name not in common or (common[name] is None and name not in NULL_IS_A_VALUE)
        if is_absent and hf.keys().isdisjoint(OLDER_FIELDS.get(name, ())):
            common[name] = value
    return {**common, **layer_lists(hf), **special.derived(common)}


def _special(hf: Mapping[str, Any]) -> ConfigNames:
    model_type = hf.get("model_type")
    return MODELS.get(model_type, ConfigNames()) if isinstance(model_type, str) else ConfigNames()
