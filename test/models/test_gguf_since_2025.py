"""What GGUF files of models since 2025 leave out, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightserve.errors import ModelFilesError
from lightserve.model_files import resolve
from test.models.architectures.case import Json, build
from test.models.gguf_cases import GGUF_CASES
from test.models.gguf_converter import save


def config_of(name: str, path: Path, changes: Json) -> dict[str, Any]:
    one = GGUF_CASES[name]
    return resolve(str(save(one, build(one.case), path / "model.gguf", changes))).hf_config()


def test_a_glm_that_does_not_say_which_layers_have_indexers_has_them_in_all(tmp_path: Path) -> None:
    config = config_of("glm-dsa", tmp_path, {"attention.indexer.types": None})

    assert config["indexer_types"] == ["full"] * 4


def test_a_glm_with_a_context_of_a_million_has_indexers_where_glm_5_2_has_them(tmp_path: Path) -> None:
    changes = {"attention.indexer.types": None, "context_length": 1 << 20, "block_count": 11}

    config = config_of("glm-dsa", tmp_path, changes)

    assert [layer for layer, kind in enumerate(config["indexer_types"]) if kind == "full"] == [0, 1, 2, 6, 10]


def test_a_mimo_without_the_scale_of_its_values_has_that_of_the_first_one(tmp_path: Path) -> None:
    assert config_of("mimo2", tmp_path, {"attention.value_scale": None})["attention_value_scale"] == 0.707


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "glm-dsa",
            {"attention.indexer.types": [True]},
            r"indexer.types is \[True\].*wanted true or false for each of 4",
        ),
        ("glm-dsa", {"expert_gating_func": 1}, "expert_gating_func is 1, which is not supported; wanted 2"),
        ("deepseek32", {"attention.indexer.top_k": None}, "metadata deepseek32.attention.indexer.top_k is missing"),
        ("mimo2", {"attention.sliding_window_pattern": None}, "sliding_window_pattern is None.*for each of 3 layers"),
        ("mimo2", {"attention.head_count_kv": [1, 2, 4]}, r"head_count_kv is \[1, 2, 4\].*wanted layers of two kinds"),
        ("mimo2", {"attention.sliding_window": None}, "metadata mimo2.attention.sliding_window is missing"),
        ("step35", {"attention.sliding_window_pattern": None}, "sliding_window_pattern is None.*for each of 3 layers"),
        ("step35", {"attention.head_count": [4, 6, 5]}, r"head_count is \[4, 6, 5\].*wanted layers of two kinds"),
        ("step35", {"swiglu_clamp_exp": [1.0]}, r"swiglu_clamp_exp is \[1.0\].*wanted a number for each of 3 layers"),
        ("mistral4", {"expert_gating_func": 2}, "expert_gating_func is 2, which is not supported; wanted 1"),
        ("ernie4_5-moe", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0.*a positive integer"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(name: str, changes: Json, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=message):
        config_of(name, tmp_path, changes)
