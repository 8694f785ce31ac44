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
