"""Whose body it is."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.generate.routes import Schema, schema_of

LIGHTLLM, TGI = Schema.LIGHTLLM, Schema.TGI


@pytest.mark.parametrize("default", list(Schema))
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"inputs": "x", "parameters": {"ignore_eos": True}}, LIGHTLLM),
        ({"inputs": "x", "parameters": {"ignore_eos": False, "max_new_tokens": 1}}, LIGHTLLM),
        ({"inputs": "x", "parameters": {"stop_sequences": []}}, LIGHTLLM),
        ({"inputs": "x", "parameters": {"return_details": True, "seed": 1}}, LIGHTLLM),
        ({"inputs": [1, 2]}, LIGHTLLM),
        ({"inputs": [1, 2], "parameters": {"seed": 3}}, LIGHTLLM),
        ({"inputs": "x", "multimodal_params": {}}, LIGHTLLM),
        ({"inputs": "x", "parameters": {"image_max_patch_num": -1}}, LIGHTLLM),
        ({"inputs": "x", "parameters": {"group_request_id": 7}}, LIGHTLLM),
        ({"inputs": "x", "parameters": {"details": True}}, TGI),
        ({"inputs": "x", "parameters": {"details": False}}, TGI),
        ({"inputs": "x", "parameters": {"seed": 0}}, TGI),
        ({"inputs": "x", "parameters": {"stop": [], "ignore_eos": None}}, TGI),
        ({"inputs": "x", "parameters": {"typical_p": 0.9, "temperature": 0.5}}, TGI),
    ],
)
def test_a_parameter_that_only_one_api_has_selects_it(body: dict[str, Any], expected: Schema, default: Schema) -> None:
    assert schema_of(body, default) is expected


@pytest.mark.parametrize("default", list(Schema))
@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "x"},
        {"inputs": "x", "parameters": None},
        {"inputs": "x", "parameters": {}},
        {"inputs": "x", "parameters": {"max_new_tokens": 5, "do_sample": True, "temperature": 0.5, "best_of": 2}},
        {"inputs": "x", "parameters": {"details": None, "ignore_eos": None}},
        {"inputs": "x", "parameters": {"token_healing": True, "repetition_penalty": 1.1}},
        {"inputs": "x", "parameters": [1]},
        {"inputs": "x", "stream": True},
        {},
    ],
)
def test_without_such_a_parameter_the_flag_decides(body: dict[str, Any], default: Schema) -> None:
    assert schema_of(body, default) is default


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "x", "parameters": {"ignore_eos": True, "stop": ["a"]}},
        {"inputs": "x", "parameters": {"return_details": True, "details": True, "seed": 1}},
        {"inputs": [1], "parameters": {"truncate": 5}},
    ],
)
def test_a_body_with_parameters_of_both_apis_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"LightLLM's schema .* TGI's"):
        schema_of(body, LIGHTLLM)
