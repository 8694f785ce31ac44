"""The sampling parameters that a model's files recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightserve.errors import ModelFilesError
from lightserve.model_files import resolve
from lightserve.model_files.config.sampling_defaults import SamplingDefaults, read_sampling_defaults
from lightserve.model_files.hub.default_model import DEFAULT_MODEL, shipped_generation_config
from lightserve.model_files.source import ModelSource
from test.model_files.files import save_as_gguf, tiny_model

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


def source_with(folder: Path, **fields: Any) -> ModelSource:
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **fields}))
    return resolve(str(folder), needs_weights=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingDefaults()),
        (QWEN, SamplingDefaults({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1})),
        ({"temperature": None, "top_k": 0}, SamplingDefaults({"top_k": 0})),
        (
            {"min_p": 0.1, "typical_p": 0.9, "max_new_tokens": 2048},
            SamplingDefaults({"min_p": 0.1, "typical_p": 0.9}, 2048),
        ),
        (QWEN | {"do_sample": False}, SamplingDefaults({"temperature": 0.0, "repetition_penalty": 1.1})),
    ],
)
def test_the_values_of_generation_config_are_defaults(
    tmp_path: Path, fields: dict[str, Any], expected: SamplingDefaults
) -> None:
    assert read_sampling_defaults(source_with(tmp_path, **fields)) == expected


def test_a_folder_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    source = source_with(tmp_path)
    (tmp_path / "generation_config.json").unlink()

    assert read_sampling_defaults(source) == SamplingDefaults()


def test_a_gguf_recommends_values_in_its_metadata(tmp_path: Path) -> None:
    metadata = {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.8,
        "general.sampling.min_p": 0.05,
        "general.sampling.penalty_repeat": 1.05,
    }
    source = resolve(str(save_as_gguf(tiny_model("llama"), tmp_path / "model.gguf", metadata)))

    found = read_sampling_defaults(source)

    expected = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert found == SamplingDefaults(expected)


def test_the_flag_turns_the_defaults_off_or_names_another_file(tmp_path: Path) -> None:
    source = source_with(tmp_path, **QWEN)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.2}))

    assert read_sampling_defaults(source, "none") == SamplingDefaults()
    assert read_sampling_defaults(source, "vllm") == SamplingDefaults()
    for path in (other, other / "generation_config.json"):
        assert read_sampling_defaults(source, str(path)) == SamplingDefaults({"temperature": 0.2})
    with pytest.raises(ModelFilesError, match="missing: no such file"):
        read_sampling_defaults(source, "missing")


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": "0.8"}, {"top_k": [1]}, {"max_new_tokens": 0}])
def test_a_value_that_no_request_could_have_is_refused_with_the_remedy(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelFilesError, match=next(iter(fields))) as refused:
        read_sampling_defaults(source_with(tmp_path, **fields))
    assert "--generation_config none" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}),
        ({"top_p": 1.0}, {"temperature": 0.7, "top_p": 1.0, "top_k": 20, "repetition_penalty": 1.1}),
        ({"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.1}),  # greedy
        (
            {"seed": 3, "repetition_penalty": 1.0, "temperature": 0},
            {"seed": 3, "repetition_penalty": 1.0, "temperature": 0},
        ),
    ],
)
def test_a_request_keeps_its_own_values(tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_sampling_defaults(source_with(tmp_path, **QWEN)).fill(given) == expected


def test_a_model_that_does_not_sample_is_greedy_unless_a_request_sets_a_temperature(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(source_with(tmp_path, do_sample=False, temperature=0.7))

    assert defaults.fill({}) == {"temperature": 0.0}
    assert defaults.fill({"temperature": 0.5}) == {"temperature": 0.5}
    assert SamplingDefaults().fill({}) == {}


def test_the_default_model_has_defaults_that_its_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / Path(DEFAULT_MODEL.member).name
    with path.open("wb") as file:
        file.truncate(DEFAULT_MODEL.file.size)  # no disk space is used

    assert shipped_generation_config(path) == {"temperature": 0.2, "top_p": 0.9}
    assert shipped_generation_config(path.rename(tmp_path / "other.gguf")) == {}
