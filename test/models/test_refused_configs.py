"""A config.json with an option that a model's code does not implement is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.common.basemodel import ModelConfig
from lightserve.errors import ModelFilesError
from lightserve.model_files.config.text_part import TEXT_TYPES
from lightserve.models.registry import MODELS
from test.models.tiny import build_model

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
# models whose config.json is refused earlier, because they need fields that TINY lacks
NEED_MORE_FIELDS = {
    "deepseek_v2",
    "deepseek_v3",
    "flex_olmo",
    "glm4_moe_lite",
    "gptj",
    "granitemoe",
    "hunyuan_v1_moe",
    "kimi_k2",
    "kimi_k25",
    "mimo_v2",
    "mimo_v2_flash",
    "minicpm3",
    "mistral4",
    "mixtral",
    "nemotron-nas",
    "olmoe",
    "youtu",
}


def refuse(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        build_model({**TINY, **fields}, iter(()))


@pytest.mark.parametrize("model_type", sorted(set(MODELS) - NEED_MORE_FIELDS))
def test_an_unknown_activation_is_refused(model_type: str) -> None:
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    refuse(
        {"model_type": model_type, "hidden_act": "mish", **heads},
        f"hidden_act 'mish' is not supported .*{TEXT_TYPES.get(model_type, model_type)}",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bitnet", "mlp_bias": True}, "mlp_bias True is not supported for bitnet; supported: False"),
        (
            {"model_type": "bitnet", "quantization_config": {"quant_method": "bitnet"}},
            "quant_method 'bitnet' is not supported",
        ),
        ({"model_type": "chatglm", "position_encoding_2d": True}, "ChatGLM 1 .* is not supported; use ChatGLM 2 or 3"),
        ({"model_type": "chatglm", "rmsnorm": False}, "rmsnorm False is not supported for chatglm; supported: True"),
        ({"model_type": "chatglm", "post_layer_norm": False}, "post_layer_norm False is not supported for chatglm"),
        (
            {"model_type": "chatglm", "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm True is not supported for chatglm",
        ),
        ({"model_type": "chatglm", "rope_ratio": "fast"}, "rope_theta is 'fast', wanted a positive number"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLX"}, "sliding_window_pattern 'LLX' is not supported"),
        ({"model_type": "exaone4", "sliding_window_pattern": 0}, "sliding_window_pattern 0 is not supported"),
        ({"model_type": "granite", "residual_multiplier": -1}, "residual_multiplier is -1, wanted a positive number"),
        ({"model_type": "internlm", "rotary": {"type": "spiral"}}, "rope type 'spiral' is not supported"),
        ({"model_type": "internlm", "bias": "all"}, "bias is 'all', wanted true or false"),
        ({"model_type": "internlm2", "rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope type 'spiral'"),
        (
            {"model_type": "minicpm", "num_experts": 8},
            "num_experts is set, .* without experts only",
        ),
        ({"model_type": "minicpm", "sparse_config": {"topk": 64}}, "sparse_config is set, .* without sparse attention"),
        ({"model_type": "minicpm", "hidden_act": "fatrelu"}, "hidden_act 'fatrelu' is not supported for minicpm"),
        ({"model_type": "olmo", "clip_qkv": 0}, "clip_qkv is 0, wanted a positive number"),
        ({"model_type": "qwen", "scale_attn_weights": False}, "scale_attn_weights False is not supported for qwen"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers is .1, 0., wanted 0 or 1 for each of 3"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 2]}, "no_rope_layers is .*, wanted 0 or 1 for each"),
        ({"model_type": "smollm3", "no_rope_layers": [1, [], 0]}, "no_rope_layers is .*, wanted 0 or 1 for each"),
    ],
)
def test_an_option_that_is_not_implemented_is_refused(fields: dict[str, Any], message: str) -> None:
    refuse({"num_key_value_heads": 2, "head_dim": 8, **fields}, message)


def test_requests_of_qwen_end_at_the_trained_length() -> None:
    """Past seq_length the model scales queries and angles, which is not implemented."""
    fields = {**TINY, "model_type": "qwen", "seq_length": 100, "kv_channels": 8}

    with pytest.raises(ModelFilesError, match="max_req_total_len=128, but the model supports 100 tokens"):
        ModelConfig.from_hf(fields).request_len(128)


def test_requests_of_minicpm4_end_where_its_attention_becomes_sparse() -> None:
    """They may be longer if the file has no sparse_config."""
    fields = {**TINY, "model_type": "minicpm", "num_key_value_heads": 2, "head_dim": 8}
    sparse = {**fields, "sparse_config": {"topk": 64, "dense_len": 100}}

    assert ModelConfig.from_hf(sparse).request_len(None) == 100
    assert ModelConfig.from_hf(fields).request_len(None) == 256
    with pytest.raises(ModelFilesError, match="max_req_total_len=128, but the model supports 100 tokens"):
        ModelConfig.from_hf(sparse).request_len(128)
    refuse(sparse, "sparse_config is set, .* at most its dense_len, 100")


def test_requests_of_qwen_are_longer_if_nothing_is_scaled() -> None:
    scaling = {"use_dynamic_ntk": False, "use_logn_attn": False}
    fields = {**TINY, "model_type": "qwen", "seq_length": 100, "kv_channels": 8, **scaling}

    assert ModelConfig.from_hf(fields).request_len(None) == 256


ATTENTION, FFN = {"n_heads_in_group": 3, "no_op": False}, {"ffn_mult": 2.0, "no_op": False}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": [2, 2]}, "num_key_value_heads_per_layer is .2, 2., wanted a list of 3 numbers"),
        ({"num_key_value_heads": [2, 2, "4"]}, "num_key_value_heads is .2, 2, '4'., wanted a positive integer"),
        ({"num_key_value_heads": [2, 2, 4]}, "4 KV heads do not divide 6 heads"),
        ({"num_attention_heads": [6, 6, 4], "num_key_value_heads": 2}, "but no head_dim; add it"),
        ({"intermediate_size": [64, 64, -1]}, "intermediate_size_per_layer is -1, wanted a positive integer"),
        ({"model_type": "nemotron-nas"}, "block_configs is None, wanted a list"),
        (
            {"model_type": "nemotron-nas", "block_configs": [{"attention": None, "ffn": FFN}] * 3},
            "attention None, wanted",
        ),
        (
            {"model_type": "nemotron-nas", "block_configs": [{"attention": ATTENTION, "ffn": FFN}] * 2},
            "wanted a list of 3 numbers",
        ),
        (
            {
                "model_type": "nemotron-nas",
                "block_configs": [{"attention": {"n_heads_in_group": 12}, "ffn": FFN}] * 3,
            },
            "attention .*12.*, which gives no number of KV heads",
        ),
        (
            {
                "model_type": "nemotron-nas",
                "block_configs": [{"attention": ATTENTION, "ffn": {"ffn_mult": float("inf")}}] * 3,
            },
            "block_configs has ffn .*inf.*, which gives no width",
        ),
        (
            {
                "model_type": "nemotron-nas",
                "block_configs": [{"attention": {"replace_with_linear": True}, "ffn": FFN}] * 3,
            },
            "block_configs has attention replace_with_linear True, which is not supported; supported: n_heads_in_group",
        ),
        (
            {
                "model_type": "nemotron-nas",
                "block_configs": [{"attention": {**ATTENTION, "window_length": 512}, "ffn": FFN}] * 3,
            },
            "attention window_length 512, which is not supported",
        ),
    ],
)
def test_shapes_of_layers_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    refuse({"model_type": "llama", **fields}, message)


def test_layers_without_a_half_cannot_be_parallel() -> None:
    fields = {"model_type": "phi", "intermediate_size": [64, 0, 64], "layer_norm_eps": 1e-5}

    refuse(fields, "layer 1 lacks a half, but the halves are parallel")
