"""Fields that a config.json lacks have the values of transformers' class, which the author of the file relied on."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from lightserve.errors import ModelFilesError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.config.text_part import TEXT_TYPES
from lightserve.models.registry import MODELS
from test.model_files.test_config_defaults import SHAPES

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
# models that name their sizes differently, or have them in an object; test_config_defaults.py has the other ones
OTHER_SIZES = {"bloom", *TEXT_TYPES, *SHAPES}
MODEL_TYPES = sorted(MODELS.keys() & set(CONFIG_MAPPING) - OTHER_SIZES)


def defaults_of(config: ModelConfig) -> dict[str, Any]:
    fields = ("num_kv_heads", "head_dim", "norm_eps", "tie_word_embeddings", "rope", "window")
    return {field: getattr(config, field) for field in fields}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_absent_fields_have_the_values_of_transformers_or_are_asked_for(model_type: str) -> None:
    whole = AutoConfig.for_model(model_type).to_dict()
    short = {key: whole[key] for key in ("model_type", *SIZES)}

    assert read(short) in (read(whole), "config.json has no rms_norm_eps; fetch it again")


def read(config_json: dict[str, Any]) -> dict[str, Any] | str:
    """What is read, or why it is refused."""
    try:
        return defaults_of(ModelConfig.from_hf(config_json))
    except ModelFilesError as error:
        return str(error)


def test_null_turns_the_window_of_mistral_off() -> None:
    whole = AutoConfig.for_model("mistral", sliding_window=None).to_dict()

    config = ModelConfig.from_hf({**whole, "num_key_value_heads": None})

    assert config.window is None
    assert config.num_kv_heads == config.num_heads
