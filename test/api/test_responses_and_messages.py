"""The openai client's responses and the anthropic client's messages, from the real default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from test.api.server import RESPONSE_S, ServerProcess, running_server

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
TURNS: Any = [{"role": "user", "content": QUESTION}]
MODEL = "SmolLM2-135M-Instruct"
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
GREEDY: Any = {"temperature": 0}  # the anthropic client has no argument for it


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The default model was not trained on tools: --tool_call_parser sets the format of its calls."""
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, "--tool_call_parser", "hermes", "--max_total_token_num", "8192") as server:
        yield server


@pytest.fixture(scope="module")
def gpt(tool_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0, timeout=RESPONSE_S)


@pytest.fixture(scope="module")
def claude(tool_server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0, timeout=RESPONSE_S)


def test_the_openai_client_gets_a_response(gpt: openai.OpenAI) -> None:
    response = gpt.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=32)

    assert (response.status, response.output_text) == ("completed", ANSWER)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (37, 8)


def test_the_openai_client_gets_the_same_in_a_stream(gpt: openai.OpenAI) -> None:
    events = list(gpt.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=32, stream=True))

    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(pieces) > 4
    assert "".join(pieces) == ANSWER
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == ANSWER


def test_the_openai_client_gets_the_reason_of_an_incomplete_response(gpt: openai.OpenAI) -> None:
    response = gpt.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=2)

    assert (response.status, response.output_text) == ("incomplete", "The capital")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_the_openai_client_gets_json(gpt: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}

    response = gpt.responses.create(model=MODEL, input=QUESTION, temperature=0, text=form)

    assert set(json.loads(response.output_text)) == {"city", "unit"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_openai_client_gets_a_forced_call(gpt: openai.OpenAI, is_stream: bool) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    fields: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}

    if is_stream:
        with gpt.responses.stream(model=MODEL, input=QUESTION, **fields) as stream:
            response: Any = stream.get_final_response()
    else:
        response = gpt.responses.create(model=MODEL, input=QUESTION, **fields)

    [call] = response.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert set(json.loads(call.arguments)) == {"city", "unit"}


def test_the_anthropic_client_gets_a_message(claude: anthropic.Anthropic) -> None:
    response: Any = claude.messages.create(model=MODEL, messages=TURNS, max_tokens=32, extra_body=GREEDY)
    counted = claude.messages.count_tokens(model=MODEL, messages=TURNS)

    assert [block.text for block in response.content] == [ANSWER]
    assert response.stop_reason == "end_turn"
    assert response._request_id
    assert response.usage.input_tokens + response.usage.cache_read_input_tokens == counted.input_tokens == 37
    assert response.usage.output_tokens == 8


def test_the_anthropic_client_gets_the_same_in_a_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL, messages=TURNS, max_tokens=32, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()

    assert len(pieces) > 4
    assert "".join(pieces) == ANSWER
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 8)


def test_the_anthropic_client_gets_the_stop_reason(claude: anthropic.Anthropic) -> None:
    cut = claude.messages.create(model=MODEL, messages=TURNS, max_tokens=2, extra_body=GREEDY)
    stopped: Any = claude.messages.create(
        model=MODEL, messages=TURNS, max_tokens=32, stop_sequences=[" Paris"], extra_body=GREEDY
    )

    assert cut.stop_reason == "max_tokens"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " Paris")
    assert stopped.content[0].text == "The capital of France is"


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_anthropic_client_gets_a_forced_call(claude: anthropic.Anthropic, is_stream: bool) -> None:
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    choice: Any = {"type": "tool", "name": "weather"}
    fields: Any = {"messages": TURNS, "tools": [tool], "tool_choice": choice, "max_tokens": 128, "extra_body": GREEDY}

    if is_stream:
        with claude.messages.stream(model=MODEL, **fields) as stream:
            response: Any = stream.get_final_message()
    else:
        response = claude.messages.create(model=MODEL, **fields)

    [block] = response.content
    assert (block.type, block.name, response.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(block.input) == {"city", "unit"}


def test_the_anthropic_client_raises_its_usual_exceptions(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="claude", messages=TURNS, max_tokens=32)
    turns: Any = [{"role": "user", "content": "word " * 10_000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as long:
        claude.messages.create(model=MODEL, messages=turns, max_tokens=32)

    assert missing.value.type == "not_found_error"
    assert long.value.type == "invalid_request_error"
