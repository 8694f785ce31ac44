"""mcp_servers of /v1/messages: a real MCP server, and Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.config import HttpConfig
from test.httpserver.anthropic.test_messages import SHOW, USER, client_of, create, fold, post
from test.httpserver.chat.tool_chats import prompt
from test.httpserver.openai.test_responses_mcp import ADD, BROKEN, REMOVE, WEATHER, rounds
from test.httpserver.openai_server import Server, named_events, running, with_template
from test.mcp.real_server import RealServer, real_mcp_server

TOOLSET = {"type": "mcp_toolset", "mcp_server_name": "calc"}


@pytest.fixture(scope="module")
def mcp() -> Iterator[RealServer]:
    with real_mcp_server() as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = HttpConfig(mcp_private_hosts=["127.0.0.1"], allow_http_mcp=True, max_tool_rounds=2)
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW), config) as server:
        yield server


@pytest.fixture(autouse=True)
def forget(mcp: RealServer, server: Server) -> None:
    mcp.calls.clear()
    mcp.headers.clear()
    server.engine.received.clear()


def calc(mcp: RealServer, **fields: Any) -> dict[str, Any]:
    return {"type": "url", "name": "calc", "url": mcp.url} | fields


def offered(server: Server) -> list[str]:
    return [tool["function"]["name"] for tool in prompt(server)["tools"] or ()]


def test_the_client_gets_the_call_its_result_and_the_answer(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds("Let me see. " + ADD, "It is 5.")

    with client_of(server) as client:
        message = client.beta.messages.create(
            model="tiny",
            max_tokens=100,
            messages=[USER],
            mcp_servers=[calc(mcp, authorization_token="secret")],  # type: ignore[list-item]
            tools=[TOOLSET],  # type: ignore[list-item]
            betas=["mcp-client-2025-11-20"],
        )

    said, use, result, answer = message.content
    assert mcp.calls == [("add", (2, 3))]
    assert mcp.headers[0]["authorization"] == "Bearer secret"
    assert (use.type, said.type, answer.type) == ("mcp_tool_use", "text", "text")
    assert use.type == "mcp_tool_use"
    assert (use.name, use.server_name, use.input) == ("add", "calc", {"a": 2, "b": 3})
    assert result.type == "mcp_tool_result"
    assert (result.tool_use_id, result.is_error) == (use.id, False)
    assert not isinstance(result.content, str)
    assert [block.text for block in result.content] == ["5"]
    assert message.stop_reason == "end_turn"


def test_the_stream_has_the_same_blocks(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, "It is 5.")
    events = named_events(post(server, stream=True, mcp_servers=[calc(mcp)]))
    server.engine.script = rounds(ADD, "It is 5.")
    whole = create(server, mcp_servers=[calc(mcp)])

    streamed = fold(events)
    kinds = ["mcp_tool_use", "mcp_tool_result", "text"]
    assert [block["type"] for block in streamed["content"]] == kinds
    assert [block["type"] for block in whole["content"]] == kinds
    assert streamed["content"][1]["content"] == whole["content"][1]["content"] == [{"type": "text", "text": "5"}]
    assert streamed["stop_reason"] == "end_turn"


def test_the_model_sees_its_call_and_the_result_also_in_the_next_request(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, "It is 5.")
    message = create(server, mcp_servers=[calc(mcp)])
    shown = prompt(server)["messages"]
    history = [USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "And?"}]

    create(server, messages=history, mcp_servers=[calc(mcp)])

    assert shown[-2]["tool_calls"][0]["function"] == {"name": "calc__add", "arguments": {"a": 2, "b": 3}}
    assert (shown[-1]["role"], shown[-1]["content"]) == ("tool", "5")
    assert prompt(server)["messages"][: len(shown)] == shown


def test_only_enabled_tools_are_offered(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds("Hi")
    only_add: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        (calc(mcp, tool_configuration={"allowed_tools": ["add"]}), []),
        (calc(mcp), [TOOLSET | {"default_config": {"enabled": False}, "configs": {"add": {"enabled": True}}}]),
        (calc(mcp), [TOOLSET | {"configs": {"remove": {"enabled": False}, "broken": {"enabled": False}}}]),
        (calc(mcp, url="https://a.invalid/"), [TOOLSET | {"tools": [{"name": "add", "input_schema": {}}]}]),
    ]
    for definition, tools in only_add:
        create(server, mcp_servers=[definition], tools=tools)

        assert offered(server) == ["calc__add"]


def test_a_failed_call_is_an_error(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(BROKEN, "Sorry.")

    message = create(server, mcp_servers=[calc(mcp)])

    assert message["content"][1]["is_error"]
    assert "the disk is full" in json.dumps(message["content"][1])


def test_calls_of_the_client_end_the_message(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(REMOVE + WEATHER)

    weather = {"name": "weather", "input_schema": {"type": "object"}}
    message = create(server, mcp_servers=[calc(mcp)], tools=[weather])

    assert message["stop_reason"] == "tool_use"
    assert [block["type"] for block in message["content"]] == ["mcp_tool_use", "tool_use", "mcp_tool_result"]
    assert len(server.engine.received) == 1


def test_the_model_must_answer_after_the_last_round(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, ADD, "Enough.")

    message = create(server, mcp_servers=[calc(mcp)])

    assert len(mcp.calls) == 2
    assert offered(server) == []
    assert message["content"][-1] == {"type": "text", "text": "Enough."}


def test_a_toolset_needs_its_server(server: Server) -> None:
    response = post(server, tools=[TOOLSET])

    assert response.status_code == 400
    assert "needs that server in mcp_servers" in response.json()["error"]["message"]


def test_a_server_that_cannot_be_reached_is_an_error(server: Server, mcp: RealServer) -> None:
    response = post(server, mcp_servers=[calc(mcp, url="http://127.0.0.1:1/")])

    assert response.status_code == 424
    assert "'calc' cannot be listed: it cannot be reached" in response.json()["error"]["message"]
