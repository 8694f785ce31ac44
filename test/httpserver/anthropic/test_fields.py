"""Fields of /v1/messages: limits of the context, structured output, what agents send beside the conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from lightserve.httpserver.http.sse import EventStream
from lightserve.messages.params import FinishReason
from test.httpserver.anthropic.test_messages import SHOW, USER, client_of, create, post
from test.httpserver.chat.tool_chats import WEATHER, prompt
from test.httpserver.fake_engine import LIMITS
from test.httpserver.openai_server import Server, fails, named_events, rows, running, with_template

LIMIT = LIMITS.max_req_total_len
FORMAT: Any = {"type": "json_schema", "schema": WEATHER}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


@pytest.mark.parametrize("is_stream", [False, True])
def test_max_tokens_beyond_the_context_is_the_rest_of_it(server: Server, is_stream: bool) -> None:
    server.engine.script = rows("x", finish=FinishReason.LENGTH)

    response = post(server, max_tokens=32_000, stream=is_stream)

    req = server.engine.received[-1]
    assert len(req.prompt_ids) + req.params.stopping.max_new_tokens == LIMIT
    last = named_events(response)[-2]["delta"] if is_stream else response.json()
    assert last["stop_reason"] == "model_context_window_exceeded"


def test_an_output_that_ends_by_itself_has_its_own_stop_reason_beyond_the_context(server: Server) -> None:
    server.engine.script = rows("x")

    assert create(server, max_tokens=32_000)["stop_reason"] == "end_turn"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(server: Server, path: str) -> None:
    long = {"role": "user", "content": "word " * 200_000}

    response = server.post(path, {"messages": [long], "max_tokens": 10})

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(f" tokens > {LIMIT - 1} maximum")


def test_a_prompt_that_fills_the_context_is_refused_with_its_length(
    server: Server, client: anthropic.Anthropic
) -> None:
    turns: Any = [{"role": "user", "content": "word " * LIMIT}]
    counted = client.messages.count_tokens(model="tiny", messages=turns).input_tokens

    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {counted} tokens > {LIMIT - 1} maximum"):
        client.messages.create(model="tiny", max_tokens=10, messages=turns)


@pytest.mark.parametrize("fields", [{"output_format": FORMAT}, {"output_config": {"format": FORMAT}}])
def test_an_output_format_constrains_the_output(server: Server, fields: Any) -> None:
    server.engine.script = rows("{}")

    create(server, **fields)

    grammar = server.engine.received[-1].params.sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_the_client_parses_structured_output(server: Server, client: anthropic.Anthropic) -> None:
    class Place(BaseModel):
        city: str

    server.engine.script = rows('{"city": "Paris"}')

    response = client.messages.parse(model="tiny", max_tokens=64, messages=[USER], output_format=Place)

    assert response.parsed_output == Place(city="Paris")
    assert server.engine.received[-1].params.sampling.grammar is not None


# the fields that Claude Code sends beside the conversation
AGENT_FIELDS: Any = {
    "metadata": {"user_id": '{"device_id":"6bf9","account_uuid":"","session_id":"8930"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "service_tier": "auto",
    "betas": ["interleaved-thinking-2025-05-14"],
    "mcp_servers": [],
    "container": None,
    "speed": None,
}


def test_fields_of_agents_are_accepted_and_the_context_stays_as_it_is(server: Server) -> None:
    server.engine.script = rows("x")

    whole = create(server, **AGENT_FIELDS)
    delta = named_events(post(server, stream=True, **AGENT_FIELDS))[-2]

    assert whole["context_management"] == delta["context_management"] == {"applied_edits": []}
    assert "context_management" not in create(server)


def test_the_query_of_beta_clients_is_accepted(server: Server, client: anthropic.Anthropic) -> None:
    server.engine.script = rows("x")

    response: Any = client.beta.messages.create(model="tiny", max_tokens=8, messages=[USER], betas=["a-b"])

    assert response.content[0].text == "x"


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation(server: Server, thread: Any) -> None:
    response = post(server, thread=thread)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "send the whole conversation" in error["message"]
    assert response.json()["request_id"] == response.headers["request-id"]


def test_the_server_refuses_with_the_header_that_tells_when_to_retry(
    server: Server, client: anthropic.Anthropic
) -> None:
    for status, kind in ((429, "rate_limit_error"), (503, "overloaded_error")):
        server.engine.script = fails(status, "full")
        with pytest.raises(anthropic.APIStatusError) as refused:
            client.messages.create(model="tiny", max_tokens=64, messages=[USER])

        assert (refused.value.status_code, refused.value.type) == (status, kind)
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert refused.value.request_id == refused.value.response.headers["request-id"]


def test_tokens_are_counted_with_every_kind_of_block(server: Server) -> None:
    server.engine.script = rows("x")
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Be brief."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "a"}},
                {"type": "web_search_tool_result", "tool_use_id": "1", "content": []},
                {"type": "tool_use", "id": "2", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2", "content": "a", "is_error": True}]},
    ]
    tools = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be kind."}]
    fields = {"messages": turns, "tools": tools, "system": system, "thinking": {"type": "adaptive"}}

    counted = server.post("/v1/messages/count_tokens", fields)
    create(server, **fields)

    assert counted.json() == {"input_tokens": len(server.engine.received[-1].prompt_ids)}
    assert len(prompt(server)["messages"]) == 7


def test_a_stream_that_waits_sends_pings_which_the_client_ignores(
    server: Server, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventStream, "keep_alive_s", 0.01)
    server.engine.script = rows("Hel", "lo")
    server.hold()
    body = {"messages": [USER], "max_tokens": 64, "stream": True}
    names = []
    with server.http.stream("POST", "/v1/messages", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            if names.count("ping") == 3:
                server.release()

    assert names.count("ping") >= 3
    assert next(name for name in names if name != "ping") == "message_start"
    assert names[-1] == "message_stop"
    with client.messages.stream(model="tiny", max_tokens=64, messages=[USER]) as stream:
        assert stream.get_final_text() == "Hello"
