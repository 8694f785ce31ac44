"""A request without sampling parameters gets those of the model, on every API."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lightserve.config import HttpConfig
from lightserve.httpserver.app import build_app
from lightserve.messages.params import GenerationParams
from lightserve.model_files.config.sampling_defaults import SamplingDefaults
from test.httpserver.fake_engine import engine, spell
from test.real_model import smollm2_tokenizer as smol

DEFAULTS = SamplingDefaults({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}, 100)
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
COMPLETION = ("/v1/completions", {"prompt": "Hi"})
RESPONSE = ("/v1/responses", {"input": "Hi"})
MESSAGE = ("/v1/messages", {"messages": MESSAGES, "max_tokens": 10})
SAMPLED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.1}


def sent_params(run_dir: Path, path: str, body: dict[str, Any], config: HttpConfig | None = None) -> GenerationParams:
    """The parameters with which the server sends a request to the engine."""

    async def post() -> GenerationParams:
        async with engine(run_dir, spell("hi"), smol(), config) as (context, fake):
            transport = httpx2.ASGITransport(build_app(replace(context, sampling_defaults=DEFAULTS)))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                response = await http.post(path, json=body)
                assert fake.received, response.text
                return fake.received[0].params

    return asyncio.run(post())


def generate(**parameters: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"inputs": "Hi", "parameters": parameters}


@pytest.mark.parametrize(
    ("request_", "fields", "expected"),
    [
        *((one, {}, SAMPLED) for one in (CHAT, COMPLETION, RESPONSE, MESSAGE)),
        *(
            (one, {"temperature": 0.5, "top_p": 1.0}, SAMPLED | {"temperature": 0.5, "top_p": 1.0})
            for one in (CHAT, RESPONSE)
        ),
        (CHAT, {"temperature": None}, SAMPLED),
        (CHAT, {"temperature": 0}, GREEDY),
        (CHAT, {"repetition_penalty": 1.0, "top_k": -1}, SAMPLED | {"repetition_penalty": 1.0, "top_k": -1}),
        (generate(do_sample=True, ignore_eos=False), {}, SAMPLED),  # LightLLM's
        (generate(ignore_eos=False), {}, GREEDY),
        (generate(do_sample=True, details=True), {}, SAMPLED),  # TGI's
        (generate(temperature=0.5, details=True), {}, SAMPLED | {"temperature": 0.5}),
        (generate(details=True), {}, GREEDY),
    ],
)
def test_absent_fields_have_the_models_values(
    tmp_path: Path, request_: tuple[str, dict[str, Any]], fields: dict[str, Any], expected: dict[str, float]
) -> None:
    path, body = request_

    sampling = sent_params(tmp_path, path, body | fields).sampling

    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [(CHAT, 100), (COMPLETION, 16), (RESPONSE, 100), (MESSAGE, 10), (generate(details=True), 100)],
)
def test_max_new_tokens_of_the_model_limits_outputs_without_a_limit(
    tmp_path: Path, request_: tuple[str, dict[str, Any]], expected: int
) -> None:
    assert sent_params(tmp_path, *request_).stopping.max_new_tokens == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (CHAT, 7),
        (COMPLETION, 7),
        (RESPONSE, 7),
        (("/api/chat", {"messages": MESSAGES, "options": {"num_predict": -1}}), 7),
        (generate(ignore_eos=False), 7),  # LightLLM's
        (generate(details=True), 7),  # TGI's
        (MESSAGE, 10),  # it names a maximum
        ((CHAT[0], CHAT[1] | {"max_tokens": 50}), 50),
    ],
)
def test_default_max_tokens_bounds_requests_that_name_no_maximum(
    tmp_path: Path, request_: tuple[str, dict[str, Any]], expected: int
) -> None:
    config = HttpConfig(default_max_tokens=7)

    assert sent_params(tmp_path, *request_, config).stopping.max_new_tokens == expected


def test_a_beam_search_takes_no_defaults(tmp_path: Path) -> None:
    params = sent_params(tmp_path, "/v1/completions", {"prompt": "Hi", "num_beams": 2, "max_tokens": 1})

    assert params.sampling.repetition_penalty == 1.0
