"""The language model in a checkpoint that reads images too."""

from __future__ import annotations

import pytest

from lightserve.errors import UnsupportedModelTypeError
from lightserve.model_files.config.text_part import TEXT_TYPES, is_of_other_part, text_name
from lightserve.models.registry import MODELS, read_model_config


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_tensor_has_the_name_of_the_language_model_alone(name: str, expected: str) -> None:
    assert not is_of_other_part(name)
    assert text_name(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "visual.blocks.0.norm1.weight",
        "model.visual.merger.norm.bias",
        "vision_tower.patch_embed.weight",
        "mm_projector.proj.0.bias",
    ],
)
def test_tensors_of_the_other_parts_are_known_by_their_names(name: str) -> None:
    assert is_of_other_part(name)


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_the_whole_model_is_registered_as_its_language_model(model_type: str) -> None:
    assert MODELS[model_type] == MODELS[TEXT_TYPES[model_type]]


def test_a_language_model_that_is_not_supported_is_named() -> None:
    hf = {"model_type": "mistral3", "text_config": {"model_type": "mistral9"}}

    with pytest.raises(UnsupportedModelTypeError, match="model_type 'mistral9' is not supported"):
        read_model_config(hf, None)


def test_sizes_that_llava_leaves_out_are_those_of_its_language_model() -> None:
    """As published: transformers takes them from the defaults of Llama."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32_064}
    hf = {"model_type": "llava", "image_token_index": 32_000, "text_config": text, "vocab_size": 32_000}

    config = read_model_config(hf, None)

    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, 11_008, 32)
    assert (config.num_heads, config.num_kv_heads, config.vocab_size) == (32, 32, 32_064)
    assert config.hf["max_position_embeddings"] == 4096


def test_sizes_of_the_whole_model_are_not_those_of_its_language_model() -> None:
    """PaliGemma 2 names a hidden_size beside its language model, which has another one."""
    text = {"model_type": "gemma2", "hidden_size": 3584, "use_bidirectional_attention": True}

    config = read_model_config({"model_type": "paligemma", "hidden_size": 2048, "text_config": text}, None)

    assert config.hidden_size == 3584
    assert not config.flag("use_bidirectional_attention")
