"""/v1/messages: through the anthropic client, and as its events."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic_core import from_json

from lightserve.config import HttpConfig
from lightserve.messages.params import FinishReason
from test.httpserver.chat.tool_chats import ALL, THOUGHT, WEATHER, prompt
from test.httpserver.openai_server import CACHED, Server, fails, named_events, rows, running, with_template
from test.text.parsing.corpus import CORPUS, PARIS, cut
from test.waiting import DEADLINE_S

# what a template shows of a model that thinks and calls tools: <tool_call> </think>
SHOW = (
    "{{ {'messages': messages, 'tools': tools, 'thinks': enable_thinking | default(1), 'turn': add_generation_prompt}"
    " | tojson }}{# <tool_call> </think> #}"
)
TOOLS: list[Any] = [
    {"name": "weather", "description": "Rain?", "input_schema": WEATHER, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
]
USER: Any = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


def client_of(server: Server, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(server.http.base_url), api_key=key, max_retries=0, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def post(server: Server, **fields: Any) -> Any:
    return server.post("/v1/messages", {"messages": [USER], "max_tokens": 64} | fields)


def create(server: Server, **fields: Any) -> Any:
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def fold(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as the client puts it together."""
    first, ping, *rest, delta, stop = events
    assert [one["type"] for one in (first, ping, delta, stop)] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in rest:
        fold_block(blocks, inputs, event)
    for index, text in inputs.items():
        blocks[index]["input"] = from_json(text, allow_partial=True)
    message: dict[str, Any] = first["message"]
    return {**message, **delta["delta"], "content": blocks, "usage": message["usage"] | delta["usage"]}


def fold_block(blocks: list[dict[str, Any]], inputs: dict[int, str], event: dict[str, Any]) -> None:
    match event:
        case {"type": "content_block_start", "index": index, "content_block": block}:
            assert index == len(blocks)
            blocks.append(block)
        case {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}:
            blocks[index]["text"] += text
        case {"type": "content_block_delta", "index": index, "delta": {"type": "thinking_delta", "thinking": text}}:
            blocks[index]["thinking"] += text
        case {"type": "content_block_delta", "index": index, "delta": {"type": "signature_delta", "signature": text}}:
            blocks[index]["signature"] += text
        case {"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta"} as delta}:
            inputs[index] = inputs.get(index, "") + delta["partial_json"]
        case other:
            assert other == {"type": "content_block_stop", "index": len(blocks) - 1}


def unnamed(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from request to request."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": blocks}


def test_the_client_gets_text(server: Server, client: anthropic.Anthropic) -> None:
    server.engine.script = rows("Hel", "lo")

    response: Any = client.messages.create(model="tiny", max_tokens=64, messages=[USER], system="Be kind.")

    assert [(block.type, block.text) for block in response.content] == [("text", "Hello")]
    assert (response.role, response.model, response.stop_reason, response.stop_sequence) == (
        "assistant",
        "tiny",
        "end_turn",
        None,
    )
    n_prompt = len(server.engine.received[-1].prompt_ids)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (n_prompt - CACHED, 2)
    assert response.usage.cache_read_input_tokens == CACHED
    assert prompt(server)["messages"] == [{"role": "system", "content": "Be kind."}, USER]


def test_the_client_gets_text_in_a_stream(server: Server, client: anthropic.Anthropic) -> None:
    server.engine.script = rows("Hel", "lo")

    with client.messages.stream(model="tiny", max_tokens=64, messages=[USER]) as stream:
        texts = list(stream.text_stream)
        final: Any = stream.get_final_message()

    assert texts == ["Hel", "lo"]
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == ("Hello", "end_turn", 2)


def test_thinking_text_and_calls_are_blocks_in_their_order(server: Server, client: anthropic.Anthropic) -> None:
    server.engine.script = rows("<think>", ALL.removeprefix("<think>"))

    response: Any = client.messages.create(model="tiny", max_tokens=64, messages=[USER], tools=TOOLS)

    thought, text, weather, now = response.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Hm.", "Let me see.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", json.loads(PARIS))
    assert (now.name, now.input, response.stop_reason) == ("now", {}, "tool_use")
    assert weather.id != now.id
    assert response.usage.output_tokens_details.thinking_tokens == 2


def test_the_client_gets_calls_in_a_stream(server: Server, client: anthropic.Anthropic) -> None:
    server.engine.script = rows(*(ALL[at : at + 5] for at in range(0, len(ALL), 5)))

    with client.messages.stream(model="tiny", max_tokens=64, messages=[USER], tools=TOOLS) as stream:
        final: Any = stream.get_final_message()

    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content[2:]] == [json.loads(PARIS), {}]


def is_json(text: str) -> bool:
    """An object, or the beginning of one: of what is neither the client makes nothing in a stream."""
    try:
        return isinstance(from_json(text or "{}", allow_partial=True, allow_inf_nan=False), dict)
    except ValueError:
        return False


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.sampled_from(
        [one.text for one in CORPUS["hermes"] if one.text and all(is_json(arguments) for _, arguments in one.calls)]
    ),
    thought=st.sampled_from(["", THOUGHT, "Hm.</think>"]),
    seed=st.integers(0, 2**32),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_folding_a_stream_gives_the_whole_response(
    server: Server, text: str, thought: str, seed: int, finish: FinishReason
) -> None:
    server.engine.script = rows(*cut(thought + text, random.Random(seed)), finish=finish)

    whole = create(server, tools=TOOLS)
    events = named_events(post(server, tools=TOOLS, stream=True))

    assert unnamed(fold(events)) == unnamed(whole)


@pytest.mark.parametrize(
    ("finish", "found", "reason", "sequence"),
    [
        (FinishReason.STOP, None, "end_turn", None),
        (FinishReason.STOP, 7, "end_turn", None),
        (FinishReason.STOP, "END", "stop_sequence", "END"),
        (FinishReason.LENGTH, None, "max_tokens", None),
    ],
)
def test_the_response_has_the_stop_reason(
    server: Server, finish: FinishReason, found: int | str | None, reason: str, sequence: str | None
) -> None:
    server.engine.script = rows("x", finish=finish, stop_reason=found)

    response = create(server, stop_sequences=["END"])

    assert server.engine.received[-1].params.text.stop == ("END",)
    assert (response["stop_reason"], response["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Par', {}),
        ('{"city": "Paris", "days": 3', {"city": "Paris", "days": 3}),
        ("{'city': 1}", {"arguments": "{'city': 1}"}),
    ],
)
def test_truncated_or_invalid_arguments_are_kept(server: Server, arguments: str, shown: Any) -> None:
    server.engine.script = rows(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}')

    [block] = create(server, tools=TOOLS)["content"]

    assert (block["type"], block["name"]) == ("tool_use", "weather")
    assert block["input"] == shown


def test_blocks_become_messages(server: Server) -> None:
    server.engine.script = rows("x")
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Rain"}, {"type": "text", "text": "now?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "wet"}]},
                {"type": "tool_result", "tool_use_id": "2", "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind.", "cache_control": {"type": "ephemeral"}}]

    create(server, messages=turns, system=system, tools=TOOLS)

    first, user, assistant, wet, failed, well = prompt(server)["messages"]
    assert first == {"role": "system", "content": "Be\nkind."}
    assert user == {"role": "user", "content": "Rain\nnow?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [one["function"] for one in assistant["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "now", "arguments": {}},
    ]
    assert wet == {"role": "tool", "content": "wet", "tool_call_id": "1"}
    assert (failed["tool_call_id"], failed["content"]) == ("2", "Error: the tool failed without a message")
    assert well == {"role": "user", "content": "Well?"}


def test_text_around_tool_results_keeps_its_place(server: Server) -> None:
    server.engine.script = rows("x")
    blocks = [
        {"type": "text", "text": "one"},
        {"type": "tool_result", "tool_use_id": "1", "content": "two"},
        {"type": "text", "text": "three"},
    ]

    create(server, messages=[{"role": "user", "content": blocks}])

    assert [one["content"] for one in prompt(server)["messages"]] == ["one", "two", "three"]


def test_a_response_can_be_sent_back_as_input(server: Server, client: anthropic.Anthropic) -> None:
    server.engine.script = rows(ALL)
    response = client.messages.create(model="tiny", max_tokens=64, messages=[USER], tools=TOOLS)
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "x"}
        for block in response.content
        if block.type == "tool_use"
    ]
    turns: Any = [USER, response.to_param(), {"role": "user", "content": results}]

    client.messages.create(model="tiny", max_tokens=64, messages=turns, tools=TOOLS)

    assert [one["role"] for one in prompt(server)["messages"]] == ["user", "assistant", "tool", "tool"]


def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    server.engine.script = rows("x")

    create(server, messages=[USER, {"role": "assistant", "content": "The answer is"}])

    text = server.context.tokenizer.decode(server.engine.received[-1].prompt_ids)
    assert text.endswith('"The answer is')


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, 1),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, 1),
    ],
)
def test_thinking_reaches_the_template(server: Server, thinking: Any, shown: Any) -> None:
    server.engine.script = rows(f"{THOUGHT}x")

    response = create(server, thinking=thinking)

    assert prompt(server)["thinks"] is shown
    assert [block["type"] for block in response["content"]] == ["thinking", "text"]


def test_thinking_can_be_left_out(server: Server) -> None:
    server.engine.script = rows(f"{THOUGHT}x")

    response = create(server, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})

    assert [block["type"] for block in response["content"]] == ["text"]


@pytest.mark.parametrize(
    ("choice", "is_forced", "n_calls"),
    [
        ({"type": "auto"}, False, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, 1),
        ({"type": "any"}, True, 2),
        ({"type": "tool", "name": "weather"}, True, 1),
        ({"type": "none"}, False, 0),
    ],
)
def test_tool_choice_has_an_effect(server: Server, choice: Any, is_forced: bool, n_calls: int) -> None:
    server.engine.script = rows(ALL)

    response = create(server, tools=TOOLS, tool_choice=choice)

    assert (server.engine.received[-1].params.sampling.grammar is not None) == is_forced
    assert len([block for block in response["content"] if block["type"] == "tool_use"]) == n_calls
    assert bool(prompt(server)["tools"]) == (choice["type"] != "none")


def test_tools_and_sampling_reach_the_template_and_the_engine(server: Server) -> None:
    server.engine.script = rows("{}")

    create(server, tools=TOOLS, temperature=0.5, top_p=0.25, top_k=3, seed=7, stop=["END"], metadata={"user_id": "x"})

    params = server.engine.received[-1].params
    sampling = params.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.seed, params.text.stop) == (7, ("END",))
    function = prompt(server)["tools"][0]["function"]
    assert function == {"name": "weather", "description": "Rain?", "parameters": WEATHER}


def test_a_schema_becomes_a_grammar(server: Server) -> None:
    server.engine.script = rows("{}")

    create(server, output_config={"format": {"type": "json_schema", "schema": WEATHER}, "effort": "low"})

    grammar = server.engine.received[-1].params.sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_the_client_counts_the_tokens_of_a_request(server: Server, client: anthropic.Anthropic) -> None:
    server.engine.script = rows("x")
    fields: Any = {"model": "tiny", "messages": [USER], "tools": TOOLS, "system": "Be kind."}

    counted = client.messages.count_tokens(**fields)
    client.messages.create(max_tokens=1, **fields)

    assert counted.input_tokens == len(server.engine.received[-1].prompt_ids)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"chat_template": "{{ 1 }}"}, "a request cannot set it"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "no content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "an image needs a source of type 'base64'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "a content block must be"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        "of the",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "of the user"),
    ({"system": 5}, "system"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice"),
    ({"thinking": {"type": "often"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
]


@pytest.mark.parametrize(("fields", "named"), BAD, ids=lambda value: str(value)[:60])
def test_a_bad_field_is_refused_by_name(server: Server, fields: dict[str, Any], named: str) -> None:
    server.engine.received.clear()

    response = post(server, **fields)

    assert server.engine.received == []
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]


def test_the_client_raises_its_own_errors(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=64, messages=[USER])
    server.engine.script = fails(429, "full")
    with pytest.raises(anthropic.RateLimitError) as full:
        client.messages.create(model="tiny", max_tokens=64, messages=[USER])

    assert (missing.value.type, full.value.type) == ("not_found_error", "rate_limit_error")
    assert full.value.response.headers["retry-after"] == "1"


def test_an_error_after_the_first_token_is_an_event(server: Server, client: anthropic.Anthropic) -> None:
    server.engine.script = fails(599, "secret", "Hel")

    last = named_events(post(server, stream=True))[-1]
    with (
        pytest.raises(anthropic.APIStatusError, match="failed to process"),
        client.messages.stream(model="tiny", max_tokens=64, messages=[USER]) as stream,
    ):
        list(stream)

    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in last["error"]["message"]


def test_every_error_below_the_path_has_anthropics_format(server: Server) -> None:
    method = server.http.get("/v1/messages")
    path = server.post("/v1/messages/unknown", {})
    media = server.http.post("/v1/messages", content=b"x")

    assert [one.status_code for one in (method, path, media)] == [405, 404, 415]
    kinds = ["invalid_request_error", "not_found_error", "invalid_request_error"]
    assert [one.json()["error"]["type"] for one in (method, path, media)] == kinds
    assert method.headers["allow"] == "POST"
    assert media.json()["request_id"] == media.headers["x-request-id"] == media.headers["request-id"]


def test_the_client_needs_the_key(tmp_path: Path) -> None:
    with running(tmp_path, with_template(SHOW), HttpConfig(api_key=["right"])) as server:
        server.engine.script = rows("Hello")
        with client_of(server, "right") as client:
            response: Any = client.messages.create(model="tiny", max_tokens=64, messages=[USER])
        with client_of(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(model="tiny", max_tokens=64, messages=[USER])

    assert response.content[0].text == "Hello"
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
