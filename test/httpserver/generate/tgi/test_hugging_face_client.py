"""Hugging Face's InferenceClient with its defaults, unchanged, against a server with default flags."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from text_generation import Client

from lightserve.messages.params import FinishReason
from test.httpserver.openai_server import Server, rows, running, with_template

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of text_generation

PROMPT = "The capital of France is"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = "{{ messages[0].content }}{# <tool_call> #}"
    with running(tmp_path_factory.mktemp("run"), with_template(template)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> InferenceClient:
    server.engine.script = rows(" Par", "is", finish=FinishReason.LENGTH)
    return InferenceClient(model=str(server.http.base_url).rstrip("/"))


def test_text_generation_returns_the_text(client: InferenceClient) -> None:
    assert client.text_generation(PROMPT) == " Paris"
    assert client.text_generation(PROMPT, max_new_tokens=2, temperature=0.5) == " Paris"


def test_text_generation_streams_tokens(client: InferenceClient) -> None:
    assert list(client.text_generation(PROMPT, stream=True)) == [" Par", "is"]


def test_text_generation_has_details(client: InferenceClient) -> None:
    whole = client.text_generation(PROMPT, details=True)
    *_, last = client.text_generation(PROMPT, details=True, stream=True)

    assert whole.details is not None
    assert whole.details.finish_reason == "length"
    assert [token.text for token in whole.details.tokens] == [" Par", "is"]
    assert last.details is not None
    assert (last.generated_text, last.details.generated_tokens) == (" Paris", 2)


def test_a_lightllm_body_at_the_root_path_stays_lightllms(server: Server) -> None:
    server.engine.script = rows("Paris")

    response = server.post("/", {"inputs": PROMPT, "parameters": {"ignore_eos": True}})

    assert response.json()["generated_text"] == ["Paris"]


def test_chat_completion_needs_no_model_name(client: InferenceClient) -> None:
    whole = client.chat_completion(MESSAGES, max_tokens=2)
    stream = client.chat_completion(MESSAGES, max_tokens=2, stream=True)

    assert whole.choices[0].message.content == " Paris"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == " Paris"


def test_chat_completion_calls_tools(server: Server, client: InferenceClient) -> None:
    server.engine.script = rows(*CALL)

    message = client.chat_completion(MESSAGES, tools=TOOLS, tool_choice="auto").choices[0].message

    assert message.tool_calls is not None
    assert message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
    ],
    ids=lambda value: str(value["type"]),
)
def test_chat_completion_takes_a_schema(server: Server, client: InferenceClient, response_format: Any) -> None:
    client.chat_completion(MESSAGES, response_format=response_format)

    grammar = server.engine.received[-1].params.sampling.grammar
    assert grammar is not None
    assert '"city"' in grammar.text


def test_the_chat_of_tgis_own_client_works(server: Server, tmp_path: Path) -> None:
    server.engine.script = rows("Paris")

    response = Client(str(server.http.base_url)).chat(MESSAGES, max_tokens=4)

    assert response.choices[0].message.content == "Paris"


@pytest.mark.parametrize("name", ["gpt-4", "TGI", "dummy2"])
def test_any_other_name_is_still_unknown(server: Server, name: str) -> None:
    assert server.chat(model=name).status_code == 404
