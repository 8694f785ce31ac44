"""Fields that a config.json lacks have the values of transformers' class, which the author of the file relied on."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from lightserve.model_files.model_config import ModelConfig

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
MODEL_TYPES = [
    "exaone4",
    "glm",
    "glm4",
    "granite",
    "ministral",
    "ministral3",
    "mistral",
    "olmo",
    "olmo2",
    "olmo3",
    "seed_oss",
    "smollm3",
]


def defaults_of(config: ModelConfig) -> dict[str, Any]:
    fields = ("num_kv_heads", "head_dim", "norm_eps", "tie_word_embeddings", "rope", "window")
    return {field: getattr(config, field) for field in fields}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_absent_fields_have_the_values_of_transformers(model_type: str) -> None:
    whole = AutoConfig.for_model(model_type).to_dict()
    short = {key: whole[key] for key in ("model_type", *SIZES)}

    assert defaults_of(ModelConfig.from_hf(short)) == defaults_of(ModelConfig.from_hf(whole))


def test_null_turns_the_window_of_mistral_off() -> None:
    whole = AutoConfig.for_model("mistral", sliding_window=None).to_dict()

    config = ModelConfig.from_hf({**whole, "num_key_value_heads": None})

    assert config.window is None
    assert config.num_kv_heads == config.num_heads
