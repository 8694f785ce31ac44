"""Unknown fields near a known one are named in a header and in the log, or refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anthropic.types.beta.message_create_params as anthropic_params
import httpx2
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as responses_params
import pytest

from lightserve.config import HttpConfig
from lightserve.httpserver.anthropic.request import MessagesBody
from lightserve.httpserver.app import build_app
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.generate.tgi.request import TgiParameters
from lightserve.httpserver.http import unknown_fields
from lightserve.httpserver.http.body import Body, validate
from lightserve.httpserver.http.unknown_fields import MAX_ITEMS, MAX_LOGGED, UnknownFields, near_misses, nearest_field
from lightserve.httpserver.ollama.request import ChatRequest
from lightserve.httpserver.openai.completions_request import CompletionBody
from lightserve.httpserver.openai.responses.request import ResponsesBody
from test.httpserver.fake_engine import engine, spell
from test.httpserver.pooling import test_routes
from test.real_model import smollm2_tokenizer as smol
from test.traced_memory import kept_bytes

MESSAGES = [{"role": "user", "content": "Hi"}]
STRICT = HttpConfig(strict_fields=True)
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
# path: a body with a misspelt field, and the misspelt and the right path of the field
MISSPELT: dict[str, tuple[dict[str, Any], str, str]] = {
    "/v1/chat/completions": ({"messages": MESSAGES, "max_token": 3}, "max_token", "max_tokens"),
    "/v1/chat/completions/render": ({"messages": MESSAGES, "max_token": 3}, "max_token", "max_tokens"),
    "/v1/completions": ({"prompt": "Hi", "temprature": 0}, "temprature", "temperature"),
    "/v1/responses": ({"input": "Hi", "max_tokens": 3}, "max_tokens", "max_output_tokens"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 3, "topP": 0.5}, "topP", "top_p"),
    "/v1/messages/count_tokens": ({"messages": MESSAGES, "sytem": "Be brief"}, "sytem", "system"),
    "/api/chat": ({"messages": MESSAGES, "num_predict": 3}, "num_predict", "options.num_predict"),
    "/api/generate": ({"prompt": "Hi", "options": {"num_predicts": 3}}, "options.num_predicts", "options.num_predict"),
    "/api/show": ({"modle": "tiny"}, "modle", "model"),
    "/api/pull": ({"modle": "tiny"}, "modle", "model"),
    "/generate": ({"inputs": "Hi", "max_new_tokens": 3}, "max_new_tokens", "parameters.max_new_tokens"),
    "/generate_stream": (
        {"inputs": "Hi", "parameters": {"max_tokens": 3}},
        "parameters.max_tokens",
        "parameters.max_new_tokens",
    ),
    "/": ({"inputs": "Hi", "parameters": {"typicalp": 0.5}}, "parameters.typicalp", "parameters.typical_p"),
    "/invocations": ({"messages": MESSAGES, "stops": ["a"]}, "stops", "stop"),
    "/tokenize": ({"prompt": "Hi", "add_special_token": False}, "add_special_token", "add_special_tokens"),
    "/chat_tokenize": ({"messages": MESSAGES, "tool": []}, "tool", "tools"),
    "/detokenize": ({"tokens": [1], "modell": "tiny"}, "modell", "model"),
    "/tokens": ({"text": "Hi", "parameter": {}}, "parameter", "parameters"),
    "/abort_request": ({"request_id": "a", "abortAll": True}, "abortAll", "abort_all"),
    "/v1/load_lora_adapter": (
        {"lora_name": "a", "lora_path": "a", "load_in_place": True},
        "load_in_place",
        "load_inplace",
    ),
    "/v1/unload_lora_adapter": ({"lora_name": "a", "lora_int_i": 1}, "lora_int_i", "lora_int_id"),
    "/start_profile": ({"max_second": 5}, "max_second", "max_seconds"),
}
BATCH_PATHS = {"/v1/files", "/v1/batches", "/v1/messages/batches"}  # need --batch_dir
AUDIO_PATHS = {"/v1/audio/transcriptions"}  # needs a model that hears: see test/api/test_audio.py
TGI_PATHS = ("/", "/chat_tokenize")  # their errors have TGI's status


def post(
    run_dir: Path, *requests: tuple[str, dict[str, Any]], config: HttpConfig | None = None
) -> list[httpx2.Response]:
    async def run() -> list[httpx2.Response]:
        async with engine(run_dir, spell("hi"), smol(), config) as (context, _):
            transport = httpx2.ASGITransport(build_app(context))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return [await http.post(path, json=body) for path, body in requests]

    return asyncio.run(run())


def openapi_paths(run_dir: Path) -> set[str]:
    """The paths whose body has fields."""

    async def run() -> set[str]:
        async with engine(run_dir, spell("hi"), None) as (context, _):
            paths = build_app(context).openapi()["paths"]
            return {path for path, operations in paths.items() if "requestBody" in operations.get("post", {})}

    return asyncio.run(run())


def test_every_endpoint_warns_of_a_misspelt_field(tmp_path: Path) -> None:
    responses = post(tmp_path, *((path, body) for path, (body, _, _) in MISSPELT.items()))

    elsewhere = set(test_routes.MISSPELT) | BATCH_PATHS | AUDIO_PATHS  # test_routes has a pooling model
    assert set(MISSPELT) | elsewhere == openapi_paths(tmp_path)
    for response, (path, (_, found, meant)) in zip(responses, MISSPELT.items(), strict=True):
        assert response.status_code == 200, (path, response.text)
        warning = f'199 lightserve "unknown field {found}; did you mean {meant}?"'
        assert response.headers.get("warning") == warning, path


def test_with_strict_fields_every_endpoint_refuses_a_misspelt_field(tmp_path: Path) -> None:
    responses = post(tmp_path, *((path, body) for path, (body, _, _) in MISSPELT.items()), config=STRICT)

    for response, (path, (_, found, meant)) in zip(responses, MISSPELT.items(), strict=True):
        assert response.status_code == (422 if path in TGI_PATHS else 400), path
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert f"unknown field {found}; did you mean {meant}? (--strict_fields refuses it)" in message, path


def test_an_error_of_strict_fields_names_the_field(tmp_path: Path) -> None:
    body = CHAT[1] | {"stream": True, "stream_options": {"include_usgae": True}}

    [response] = post(tmp_path, (CHAT[0], body), config=STRICT)

    assert response.json()["error"]["param"] == "stream_options.include_usgae"
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_fields_that_are_far_from_known_ones_or_null_are_accepted_in_silence(tmp_path: Path) -> None:
    body: dict[str, Any] = CHAT[1] | {"metadata": {}, "service_tier": "auto", "foo": 1, "max_token": None, "top_a": 0.1}

    silent, strict = post(tmp_path, (CHAT[0], body)), post(tmp_path, (CHAT[0], body), config=STRICT)

    assert [one.status_code for one in (*silent, *strict)] == [200, 200]
    assert all("warning" not in one.headers for one in (*silent, *strict))


def test_several_fields_are_warned_of_at_once_and_each_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = {"role": "user", "content": "Hi", "tool_cals": []}
    body = {"messages": [message, message], "max_token": 3, "temprature": 0}

    first, second = post(tmp_path, (CHAT[0], body), (CHAT[0], body))

    assert first.headers["warning"] == second.headers["warning"]
    assert [part.split('"')[1] for part in first.headers["warning"].split(", ")] == [
        "unknown field max_token; did you mean max_tokens?",
        "unknown field temprature; did you mean temperature?",
        "unknown field messages.0.tool_cals; did you mean messages.0.tool_calls?",
        "unknown field messages.1.tool_cals; did you mean messages.1.tool_calls?",
    ]
    logged = [record.getMessage() for record in caplog.records if record.name.endswith("unknown_fields")]
    assert [line.split(" ")[3].rstrip(";") for line in logged] == ["max_token", "temprature", "messages.0.tool_cals"]
    assert all(line.startswith(f"{CHAT[0]}: unknown field ") for line in logged)


def test_the_log_names_a_limited_number_of_spellings(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()

    for i in range(MAX_LOGGED + 5):
        body = ChatBody.model_validate({"messages": MESSAGES, f"max_tokens{i:04}": 3})
        unknown.check(body, is_strict=False, route=CHAT[0])

    assert len([record for record in caplog.records if record.name.endswith("unknown_fields")]) == MAX_LOGGED


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (ChatBody, chat_params.CompletionCreateParamsBase),
        (CompletionBody, completion_params.CompletionCreateParamsBase),
        (ResponsesBody, responses_params.ResponseCreateParamsBase),
        (MessagesBody, anthropic_params.MessageCreateParamsBase),
    ],
)
def test_no_field_of_an_official_client_is_taken_for_a_misspelt_one(model: type[Body], params: Any) -> None:
    names = params.__required_keys__ | params.__optional_keys__
    unknown = names - set(model.model_fields)

    assert unknown
    assert {name: nearest_field(model, name) for name in unknown if nearest_field(model, name)} == {}


@pytest.mark.parametrize(
    ("model", "name", "nearest"),
    [
        (ChatBody, "max_new_tokens", "max_tokens"),
        (ChatBody, "num_predict", "max_tokens"),
        (ChatBody, "max-tokens", "max_tokens"),
        (ChatBody, "modle", "model"),
        (ChatBody, "include_usage", "stream_options.include_usage"),
        (ChatRequest, "max_tokens", "options.num_predict"),
        (ChatRequest, "frequncy_penalty", "frequency_penalty"),  # a chat's field, which Ollama's API takes too
        (TgiParameters, "min_new_tokens", None),  # not the maximum
        (ChatBody, "top_a", None),  # another sampler
        (ChatBody, "lora_path", None),  # it is refused by name
        (ChatBody, "x" * 100_000, None),
        (ChatBody, "", None),
    ],
)
def test_the_nearest_field(model: type[Body], name: str, nearest: str | None) -> None:
    assert nearest_field(model, name) == nearest


def test_only_a_part_of_a_large_body_is_examined() -> None:
    message = {"role": "user", "content": "Hi"}
    messages = [message] * (MAX_ITEMS - 1) + [message | {"nam": "a"}, message | {"nme": "b"}]

    found = near_misses(validate(ChatBody, {"messages": messages}))

    assert [miss.path for miss in found] == [f"messages.{MAX_ITEMS - 1}.nam"]


def test_a_body_cannot_make_the_server_compare_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(unknown_fields, "nearest_field", lambda model, name: compared.append(name))
    message = {"role": "user", "content": "Hi"} | {f"x{i}": 1 for i in range(50)}

    near_misses(validate(ChatBody, {"messages": [message] * 100} | {f"y{i}": 1 for i in range(3)}))

    assert compared == ["y0", "y1", "y2", *(f"x{i}" for i in range(unknown_fields.MAX_NAMES - 3))]


def test_no_cache_keeps_long_names_of_a_client() -> None:
    size = 2**20

    def send_bodies() -> None:
        for letter in "abcdefgh":
            near_misses(validate(ChatBody, {"messages": MESSAGES, letter * size: 1}))

    assert kept_bytes(send_bodies) < size


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"message": MESSAGES}, "messages: Field required; found the unknown field message"),
        ({"mess\nages": MESSAGES}, "messages: Field required; found the unknown field mess?ages"),
        (
            {"messages": [{"rol": "user", "content": "Hi"}]},
            "messages.0.role: Field required; found the unknown field rol",
        ),
        ({"x": 1}, "messages: Field required"),
    ],
)
def test_a_missing_field_is_named_with_the_unknown_one_near_it(tmp_path: Path, body: Any, message: str) -> None:
    [response] = post(tmp_path, (CHAT[0], body))

    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
