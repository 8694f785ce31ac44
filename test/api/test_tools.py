"""Real models that call tools and think, through the openai client.

LIGHTSERVE_TEST_TOOL_MODEL names the folder or file of one that was taught to, such as Qwen2.5-Coder-1.5B-Instruct.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from test.api.server import ServerProcess, running_server

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
    """The default model, which was trained on neither tools nor reasoning."""
    with serving(tmp_path_factory, "--tool_call_parser", "hermes", "--reasoning_parser", "qwen3") as client:
        yield client


@contextmanager
def serving(tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, *flags, "--model_name", "coder", "--max_total_token_num", "8192") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def ask(client: openai.OpenAI, *messages: Any, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    defaults = {"tools": [TOOL], "temperature": 0, "max_tokens": 128}
    return create(model="coder", messages=list(messages), **defaults | fields)


@needs_a_tool_model
def test_a_tool_is_called_and_its_result_is_used(client: openai.OpenAI) -> None:
    [choice] = ask(client, QUESTION).choices

    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 23, "sky": "clear"}'}
    response = ask(client, QUESTION, choice.message.model_dump(exclude_none=True), result)

    assert response.choices[0].finish_reason == "stop"
    assert "23" in response.choices[0].message.content


@needs_a_tool_model
def test_a_stream_contains_the_same_call(client: openai.OpenAI) -> None:
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
def test_a_call_can_be_forced_on_any_model(small: openai.OpenAI, choice: Any, is_stream: bool) -> None:
    response = ask(small, QUESTION, tool_choice=choice, parallel_tool_calls=False, stream=is_stream, n=2, seed=1)

    texts = ["", ""]
    for one in response if is_stream else [response]:
        for part in one.choices:
            message = part.delta if is_stream else part.message
            assert not message.content
            texts[part.index] += "".join(call.function.arguments for call in message.tool_calls or ())
            assert part.finish_reason in (None, "tool_calls")
    for text in texts:
        arguments = json.loads(text)
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("celsius", "fahrenheit")


PLAIN_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_a_model_that_must_call_a_tool_may_end_after_the_call(small: openai.OpenAI) -> None:
    """It writes a line break after the call. The schema of the arguments does not mention others."""
    question = {"role": "user", "content": "What is the weather in Paris?"}

    response = ask(small, question, tools=[PLAIN_TOOL], tool_choice="required")

    (choice,) = response.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["city"]


SCHEMA = {
    "type": "object",
    "properties": {"celsius": {"type": "integer"}, "sky": {"enum": ["clear", "cloudy"]}},
    "required": ["celsius", "sky"],
    "additionalProperties": False,
}
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA}}


@needs_a_tool_model
def test_a_tool_is_called_first_and_the_answer_then_fits_the_schema(client: openai.OpenAI) -> None:
    """The first call is required: left to itself, the model answers in the schema at once."""
    [choice] = ask(client, QUESTION, response_format=FORMAT, **ONE_CALL).choices

    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 23, "sky": "clear"}'}
    asked = {"role": "user", "content": "Report the weather as a JSON object with celsius and sky."}
    response = ask(
        client, QUESTION, choice.message.model_dump(exclude_none=True), result, asked, response_format=FORMAT
    )

    assert json.loads(response.choices[0].message.content) == {"celsius": 23, "sky": "clear"}


def test_any_model_calls_a_tool_or_answers_in_the_schema(small: openai.OpenAI) -> None:
    create: Any = small.chat.completions.create
    response = create(
        model="coder", messages=[QUESTION], tools=[TOOL], response_format=FORMAT, n=4, seed=1, max_tokens=48
    )

    ended = [choice for choice in response.choices if choice.finish_reason != "length"]
    assert ended
    for choice in ended:
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            assert all(isinstance(json.loads(one.function.arguments), dict) for one in choice.message.tool_calls)
        else:
            answer = json.loads(choice.message.content)
            assert isinstance(answer["celsius"], int)
            assert answer["sky"] in ("clear", "cloudy")


def test_strict_tools_leave_text_free(small: openai.OpenAI) -> None:
    strict = TOOL | {"function": TOOL["function"] | {"strict": True}}
    create: Any = small.chat.completions.create
    response = create(model="coder", messages=[QUESTION], tools=[strict], temperature=0, max_tokens=16)

    assert response.choices[0].message.content


@needs_a_tool_model
def test_tool_choice_none_prevents_calls(client: openai.OpenAI) -> None:
    [choice] = ask(client, QUESTION, tool_choice="none").choices

    assert choice.message.tool_calls is None
    assert choice.message.content


BEGUN: Any = [
    {"role": "user", "content": "Which number is larger, 3 or 5?"},
    {"role": "assistant", "content": "<think>"},
]
BUDGET = 12
MAX_TAG = 6  # tokens


def think(client: openai.OpenAI, is_stream: bool = False, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    extra = {"continue_final_message": True, "thinking_token_budget": BUDGET, **fields.pop("extra_body", {})}
    return create(model="coder", messages=BEGUN, max_tokens=32, seed=3, extra_body=extra, **options, **fields)


def test_reasoning_ends_after_its_budget_and_content_follows(small: openai.OpenAI) -> None:
    whole = think(small)
    chunks = list(think(small, is_stream=True))

    message, usage = whole.choices[0].message, whole.usage.completion_tokens_details
    assert message.content
    assert BUDGET < usage.reasoning_tokens <= BUDGET + MAX_TAG
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert chunks[-1].usage.completion_tokens_details == usage


def test_content_after_reasoning_matches_its_grammar(small: openai.OpenAI) -> None:
    response = think(small, n=2, extra_body={"guided_regex": "[35] is (larger|smaller)"})

    for choice in response.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.reasoning_content
        assert re.fullmatch("[35] is (larger|smaller)", choice.message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_can_be_forced_without_a_tool_call_parser(server: ServerProcess, choice: Any) -> None:
    """The chat template of the default model says nothing of tools."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
    create: Any = client.chat.completions.create

    (answer,) = create(model="SmolLM2-135M-Instruct", messages=[QUESTION], tools=[TOOL], tool_choice=choice).choices

    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    for call in answer.message.tool_calls:
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city", "unit"}
