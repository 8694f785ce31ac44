"""Real models that call tools, through the openai client.

LIGHTSERVE_TEST_TOOL_MODEL names the folder or file of one that was taught to, such as Qwen2.5-Coder-1.5B-Instruct.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from test.api.server import running_server

MODEL_DIR = os.environ.get("LIGHTSERVE_TEST_TOOL_MODEL")
pytestmark = pytest.mark.slow

QUESTION: Any = {"role": "user", "content": "What is the weather in Paris today, in celsius? Use the tool."}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "name of the city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ARGUMENTS = {"city": "Paris", "unit": "celsius"}


needs_a_tool_model = pytest.mark.skipif(MODEL_DIR is None, reason="LIGHTSERVE_TEST_TOOL_MODEL is not set")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with serving(tmp_path_factory, "--model_dir", str(MODEL_DIR)) as client:
        yield client


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The default model, which has never heard of tools."""
    with serving(tmp_path_factory, "--tool_call_parser", "hermes") as client:
        yield client


@contextmanager
def serving(tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, *flags, "--model_name", "coder", "--max_total_token_num", "8192") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def ask(client: openai.OpenAI, *messages: Any, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(model="coder", messages=list(messages), tools=[TOOL], temperature=0, max_tokens=128, **fields)


@needs_a_tool_model
def test_a_tool_is_called_and_its_result_is_used(client: openai.OpenAI) -> None:
    [choice] = ask(client, QUESTION).choices

    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 23, "sky": "clear"}'}
    answer = ask(client, QUESTION, choice.message.model_dump(exclude_none=True), result)

    assert answer.choices[0].finish_reason == "stop"
    assert "23" in answer.choices[0].message.content


@needs_a_tool_model
def test_a_stream_calls_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, QUESTION).choices[0].message.tool_calls[0].function
    pieces = [
        call
        for chunk in ask(client, QUESTION, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]

    assert pieces[0].function.name == whole.name
    assert len(pieces) > 2
    assert "".join(piece.function.arguments for piece in pieces) == whole.arguments


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_is_forced_on_a_model_that_knows_no_tools(small: openai.OpenAI, choice: Any, is_stream: bool) -> None:
    answer = ask(small, QUESTION, tool_choice=choice, parallel_tool_calls=False, stream=is_stream, n=2, seed=1)

    texts = ["", ""]
    for one in answer if is_stream else [answer]:
        for part in one.choices:
            message = part.delta if is_stream else part.message
            assert not message.content
            texts[part.index] += "".join(call.function.arguments for call in message.tool_calls or ())
            assert part.finish_reason in (None, "tool_calls")
    for text in texts:
        arguments = json.loads(text)
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("celsius", "fahrenheit")


@needs_a_tool_model
def test_no_tool_is_called_where_none_is_wanted(client: openai.OpenAI) -> None:
    [choice] = ask(client, QUESTION, tool_choice="none").choices

    assert choice.message.tool_calls is None
    assert choice.message.content
