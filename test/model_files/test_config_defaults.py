"""Fields that a config.json lacks have the values that transformers gives them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from lightserve.errors import ModelFilesError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.config.text_part import with_text_config

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
}
GPT = {"vocab_size": 96, "n_embd": 64, "n_layer": 7, "n_head": 4, "n_positions": 128}
WITHOUT_KV_HEADS = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
WITH_EPS = {**SHAPE, "rms_norm_eps": 1e-6}
SHAPES: dict[str, dict[str, Any]] = {
    "arcee": SHAPE,
    "bailing_hybrid": {**WITHOUT_KV_HEADS, "num_hidden_layers": 6},  # one whole group
    "bamba": WITHOUT_KV_HEADS | {"num_attention_heads": 8, "mamba_n_heads": 8},
    "bitnet": SHAPE,
    "cohere": SHAPE,
    "cohere2": SHAPE,
    "falcon": {**WITHOUT_KV_HEADS, "ffn_hidden_size": 80},
    "falcon_h1": WITHOUT_KV_HEADS | {"num_attention_heads": 8},
    "gemma": SHAPE,
    "gemma2": SHAPE,
    "gemma3_text": SHAPE,
    "gemma4_text": SHAPE,
    "gemma4_unified_text": SHAPE,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": WITHOUT_KV_HEADS,
    "gptj": {**GPT, "n_embd": 512},
    "kimi_linear": WITHOUT_KV_HEADS,
    "mpt": {"vocab_size": 96, "d_model": 64, "n_layers": 7, "n_heads": 4, "max_seq_len": 128},
    "nemotron": {**SHAPE, "head_dim": 16},
    "nemotron_h": {**SHAPE, "num_hidden_layers": 4},  # a layer of each kind, where the file names none
    "opt": WITHOUT_KV_HEADS,
    "phi": SHAPE,
    "qwen2": WITH_EPS,
    "qwen2_moe": WITH_EPS,
    "qwen3": {**WITH_EPS, "head_dim": 16},
    "phi3": {**SHAPE, "pad_token_id": 0},
    "stablelm": SHAPE,
    "starcoder2": SHAPE,
}


def saved(model_type: str, **fields: Any) -> dict[str, Any]:
    """The config.json that transformers writes."""
    config: dict[str, Any] = AutoConfig.for_model(model_type, **fields).to_dict()
    return config


def activation(config: ModelConfig) -> str:
    return str(config.hf.get("hidden_activation") or config.hf.get("hidden_act", "silu"))


def same_fields(config: ModelConfig) -> ModelConfig:
    """Without what transformers writes only sometimes."""
    rope = replace(config.rope, factor=1.0, original_max_position=1)
    return replace(config, hf={}, rope=rope)


@pytest.mark.parametrize("model_type", SHAPES)
def test_a_file_with_only_the_shape_is_read_like_a_complete_one(model_type: str) -> None:
    shape = SHAPES[model_type]

    short = ModelConfig.from_hf({"model_type": model_type, **shape})
    whole = ModelConfig.from_hf(saved(model_type, **shape))

    assert same_fields(short) == same_fields(whole)
    assert activation(short) == activation(whole)


def test_gemmas_first_files_mean_the_tanh_form_of_gelu() -> None:
    assert (
        ModelConfig.from_hf({"model_type": "gemma", **SHAPE, "hidden_act": "gelu"}).hf["hidden_act"]
        == (saved("gemma", **SHAPE, hidden_act="gelu")["hidden_act"])
    )


@pytest.mark.parametrize(("fields", "expected"), [({}, 50.0), ({"attn_logit_softcapping": None}, None)])
def test_null_turns_gemma2s_soft_cap_off(fields: dict[str, Any], expected: float | None) -> None:
    config = ModelConfig.from_hf({"model_type": "gemma2", **SHAPE, **fields})

    assert config.optional_number("attn_logit_softcapping") == expected


def test_a_multimodal_gemma3_has_the_shape_of_its_text_model() -> None:
    """The file of Gemma 3 4B."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    hf = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {"hidden_size": 1152}}

    config = ModelConfig.from_hf(hf)
    whole = ModelConfig.from_hf(saved("gemma3_text", **{k: v for k, v in text.items() if k != "model_type"}))

    assert same_fields(config) == replace(same_fields(whole), multimodal_type="gemma3")
    assert config.rope.factor == 8.0
    assert with_text_config(hf)["eos_token_id"] == [1, 106]


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_layers_with_an_indexer_are_read_under_the_names_of_every_version(model_type: str, kind: str) -> None:
    config = saved(model_type)

    read = ModelConfig.from_hf(config | {"layer_types": [kind] * config["num_hidden_layers"]})

    assert same_fields(read) == same_fields(ModelConfig.from_hf(config))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3"])
@pytest.mark.parametrize("first", [None, 0, 3, 7])
def test_qwens_layers_without_types_have_the_windows_of_transformers(model_type: str, first: int | None) -> None:
    fields = {**WITH_EPS, "use_sliding_window": True, "sliding_window": 8}
    fields |= {} if first is None else {"max_window_layers": first}

    config = ModelConfig.from_hf({"model_type": model_type, **fields})

    assert config.layer_types == tuple(saved(model_type, **fields)["layer_types"])


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    ],
)
def test_llama_and_its_like_rotate_whole_heads(model_type: str, fields: dict[str, Any]) -> None:
    assert ModelConfig.from_hf({"model_type": model_type, **WITH_EPS, **fields}).rope.partial_rotary_factor == 1.0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("fields", [{}, {"rope_theta": 5e5, "rope_scaling": YARN}, {"rope_scaling": YARN}])
def test_older_rope_fields_replace_the_default_table_of_ministral3(fields: dict[str, Any]) -> None:
    whole = ModelConfig.from_hf(saved("ministral3", **SHAPE, **fields))

    assert ModelConfig.from_hf({"model_type": "ministral3", **SHAPE, **fields}).rope == whole.rope


def test_null_turns_the_rope_scaling_of_ministral3_off() -> None:
    rope = ModelConfig.from_hf({"model_type": "ministral3", **SHAPE, "rope_theta": 5e5, "rope_scaling": None}).rope

    assert (rope.rope_type, rope.theta, rope.query_beta) == ("default", 5e5, None)


@pytest.mark.parametrize("heads", [{"multi_query": True}, {"multi_query": False}])
def test_falcons_number_of_kv_heads_counts_only_in_the_new_architecture(heads: dict[str, bool]) -> None:
    falcon = {"model_type": "falcon", **WITHOUT_KV_HEADS, "num_kv_heads": 2, **heads}

    old = ModelConfig.from_hf(falcon)
    new = ModelConfig.from_hf({**falcon, "new_decoder_architecture": True})

    assert old.num_kv_heads == (1 if heads["multi_query"] else 4)
    assert new.num_kv_heads == 2


def test_a_value_without_support_is_named_with_those_that_have_it() -> None:
    config = ModelConfig.from_hf({"model_type": "gpt2", **GPT, "add_cross_attention": True})

    with pytest.raises(ModelFilesError, match="add_cross_attention True is not supported for gpt2; supported: False"):
        config.check_value("add_cross_attention", False)
    config.check_value("absent", 1)


JUNK = (None, True, -1, 2.5, "x", [1], {"a": 1}, {"full_attention": 5})


@pytest.mark.parametrize("model_type", SHAPES)
def test_a_field_of_any_type_is_read_or_refused(model_type: str) -> None:
    complete = saved(model_type, **SHAPES[model_type])
    extra = dict.fromkeys(("sliding_window_pattern", "rope_scaling", "rope_local_base_freq", "rope_theta"))

    for name in {**complete, **extra}:
        for value in JUNK:
            with contextlib.suppress(ModelFilesError):
                ModelConfig.from_hf({**complete, "model_type": model_type, name: value})


@pytest.mark.parametrize(
    ("model_type", "theirs", "ours"),
    [
        ("mimo_v2_flash", "attention_value_scale", "attention_value_scale"),
        ("hy_v3", "router_scaling_factor", "routed_scaling_factor"),
        ("ernie4_5_moe", "moe_num_shared_experts", "moe_num_shared_experts"),
    ],
)
def test_an_absent_factor_or_number_of_experts_is_that_of_transformers(model_type: str, theirs: str, ours: str) -> None:
    config = ModelConfig.from_hf({**SHAPE, "model_type": model_type})

    assert config.number(ours) == getattr(AutoConfig.for_model(model_type), theirs)


def test_no_factor_of_values_is_a_value() -> None:
    config = ModelConfig.from_hf({**SHAPE, "model_type": "mimo_v2_flash", "attention_value_scale": None})

    assert config.number("attention_value_scale", default=1.0) == 1.0
