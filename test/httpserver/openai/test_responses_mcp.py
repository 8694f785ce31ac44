"""MCP tools of /v1/responses: a real MCP server, the openai client, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve.config import HttpConfig
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed
from test.httpserver.chat.tool_chats import prompt
from test.httpserver.fake_engine import Script
from test.httpserver.openai.test_responses import SHOW, create, refused, stream
from test.httpserver.openai_server import Server, named_events, rows, running, with_template
from test.mcp.real_server import RealServer, real_mcp_server
from test.media.fetch.image_host import answer, image_host_in_thread
from test.waiting import wait_until

CONFIG = HttpConfig(mcp_private_hosts=["127.0.0.1"], allow_http_mcp=True, max_tool_rounds=3)
ADD = '<tool_call>\n{"name": "calc__add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
REMOVE = '<tool_call>\n{"name": "calc__remove", "arguments": {"path": "/a"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "calc__broken", "arguments": {}}\n</tool_call>'
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def mcp() -> Iterator[RealServer]:
    with real_mcp_server() as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mcp: RealServer) -> Iterator[Server]:
    config = HttpConfig(
        mcp_private_hosts=["127.0.0.1"], allow_http_mcp=True, max_tool_rounds=3, tool_server=[f"web_search={mcp.url}"]
    )
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW), config) as server:
        yield server


@pytest.fixture(autouse=True)
def forget(mcp: RealServer, server: Server) -> None:
    mcp.calls.clear()
    mcp.headers.clear()
    server.engine.received.clear()


def tool(mcp: RealServer, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "calc", "server_url": mcp.url, "require_approval": "never"} | fields


def rounds(*texts: str, finish: FinishReason = FinishReason.STOP) -> Script:
    """The outputs of one response after the other; the last one is repeated."""
    left = list(texts)

    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        text = left.pop(0) if len(left) > 1 else left[0]
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
        return list(rows(*pieces, finish=finish if text is texts[-1] else FinishReason.STOP)(req))  # type: ignore[arg-type]

    return script


def kinds(response: Any) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_the_client_gets_the_answer_after_the_call(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds("Let me see. " + ADD, "It is 5.")

    response = server.openai.responses.create(model="tiny", input="2 + 3?", tools=[tool(mcp)])  # type: ignore[list-item]

    listed, said, call, answer = response.output
    assert mcp.calls == [("add", (2, 3))]
    assert listed.type == "mcp_list_tools"
    assert [one.name for one in listed.tools] == ["add", "remove", "broken"]
    assert said.type == "message"
    assert call.type == "mcp_call"
    assert (call.name, call.server_label, call.output, call.error) == ("add", "calc", "5", None)
    assert json.loads(call.arguments) == {"a": 2, "b": 3}
    assert answer.type == "message"
    assert response.output_text.endswith("It is 5.")
    assert response.usage is not None
    assert response.usage.input_tokens == sum(len(req.prompt_ids) for req in server.engine.received)


def test_the_model_sees_its_call_and_the_result(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, "It is 5.")

    create(server, tools=[tool(mcp)])

    shown = prompt(server)
    assert [one["function"]["name"] for one in shown["tools"]] == ["calc__add", "calc__remove", "calc__broken"]
    *_, call, result = shown["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "calc__add", "arguments": {"a": 2, "b": 3}}
    assert (result["role"], result["content"]) == ("tool", "5")


def test_the_events_are_those_of_openai(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, "5.")

    events = stream(server, tools=[tool(mcp)])

    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.mcp_call_arguments.delta"]
    assert [name for at, name in enumerate(names) if name != names[at - 1]] == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert json.loads("".join(deltas)) == {"a": 2, "b": 3}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_the_openai_client_understands_the_stream(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, "It is 5.")

    with server.openai.responses.stream(model="tiny", input="Hi", tools=[tool(mcp)]) as events:  # type: ignore[list-item]
        seen = {event.type for event in events}
        final = events.get_final_response()

    assert {"response.mcp_call.completed", "response.mcp_list_tools.completed"} <= seen
    assert final.output_text == "It is 5."


def test_a_call_that_needs_approval_waits_for_it(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(REMOVE)
    first = create(server, tools=[tool(mcp, require_approval="always")])
    request = first["output"][-1]

    server.engine.script = rounds("Done.")
    reply = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    second = create(
        server, tools=[tool(mcp, require_approval="always")], input=[reply], previous_response_id=first["id"]
    )

    assert (request["type"], request["name"], request["server_label"]) == ("mcp_approval_request", "remove", "calc")
    assert json.loads(request["arguments"]) == {"path": "/a"}
    assert mcp.calls == [("remove", "/a")]
    assert kinds(second) == ["mcp_call", "message"]  # the list of tools is known
    assert (second["output"][0]["approval_request_id"], second["output"][0]["output"]) == (request["id"], "removed /a")
    assert prompt(server)["messages"][-1]["content"] == "removed /a"

    create(server, tools=[tool(mcp)], input="And?", previous_response_id=second["id"])
    assert mcp.calls == [("remove", "/a")]  # not once more


def test_an_approval_request_is_one_whole_item_of_a_stream(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(REMOVE)

    events = stream(server, tools=[tool(mcp, require_approval={"never": {"tool_names": ["add"]}})])

    items = [event for event in events if event.get("output_index") == 1]
    assert [event["type"] for event in items] == ["response.output_item.added", "response.output_item.done"]
    assert items[0]["item"] == items[1]["item"] == events[-1]["response"]["output"][1]
    assert mcp.calls == []


def test_a_refused_call_is_told_to_the_model(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(REMOVE)
    first = create(server, tools=[tool(mcp, require_approval="always")])
    reply = {
        "type": "mcp_approval_response",
        "approval_request_id": first["output"][-1]["id"],
        "approve": False,
        "reason": "not that one",
    }

    server.engine.script = rounds("I see.")
    create(server, tools=[tool(mcp)], input=[*first["output"], reply])

    assert mcp.calls == []
    assert prompt(server)["messages"][-1]["content"] == "The user did not approve this call: not that one"


def test_a_failed_call_is_an_error_of_the_item_and_a_text_for_the_model(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(BROKEN, "Sorry.")

    response = create(server, tools=[tool(mcp)])

    call = response["output"][1]
    assert (call["status"], call["output"], call["error"]["type"]) == ("failed", None, "mcp_tool_execution_error")
    assert "the disk is full" in prompt(server)["messages"][-1]["content"]


def test_only_allowed_tools_are_offered(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds("Hi")

    for allowed in (["add"], {"tool_names": ["add"]}, {"read_only": True}):
        response = create(server, tools=[tool(mcp, allowed_tools=allowed)])

        assert [one["function"]["name"] for one in prompt(server)["tools"]] == ["calc__add"]
        assert [one["name"] for one in response["output"][0]["tools"]] == ["add"]


def test_allowed_tools_that_the_server_does_not_have_are_refused_with_those_that_it_has(
    server: Server, mcp: RealServer
) -> None:
    body = {"model": "tiny", "input": "Hi", "tools": [tool(mcp, allowed_tools=["ad", "plus"])]}

    response = server.http.post("/v1/responses", json=body)

    assert response.status_code == 400
    assert "the MCP server 'calc' has no tool 'ad', 'plus'; it has 'add', " in response.json()["error"]["message"]
    assert server.engine.received == []


def test_secrets_reach_the_server_and_nobody_else(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, "5.")

    response = create(server, tools=[tool(mcp, headers={"X-Tenant": "blue"}, authorization="secret")])

    assert mcp.headers[0]["x-tenant"] == "blue"
    assert mcp.headers[0]["authorization"] == "Bearer secret"
    assert response["tools"] == [tool(mcp)]
    assert "secret" not in json.dumps(response)


def test_the_model_must_answer_after_the_last_round(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, ADD, ADD, "Enough.")

    response = create(server, tools=[tool(mcp)])

    assert len(mcp.calls) == CONFIG.max_tool_rounds
    assert prompt(server)["tools"] is None
    assert kinds(response)[-1] == "message"


def test_max_tool_calls_ends_the_calls(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD + ADD, "Enough.")

    response = create(server, tools=[tool(mcp)], max_tool_calls=1)

    assert len(mcp.calls) == 1
    assert [item["status"] for item in response["output"][1:3]] == ["completed", "failed"]
    assert "max_tool_calls is 1" in response["output"][2]["error"]["message"]
    assert prompt(server)["tools"] is None


def test_calls_of_the_client_end_the_response(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD + WEATHER)
    function = {"type": "function", "name": "weather", "parameters": {"type": "object"}}

    response = create(server, tools=[tool(mcp), function])

    assert kinds(response) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response["output"][1]["output"] == "5"
    assert len(server.engine.received) == 1


def test_a_call_that_the_limit_cut_is_not_made(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD[:-22], finish=FinishReason.LENGTH)

    events = stream(server, tools=[tool(mcp)])

    response = events[-1]["response"]
    assert (response["status"], mcp.calls) == ("incomplete", [])
    assert response["output"][1]["status"] == "incomplete"
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.completed"]


def test_a_forced_call_is_forced_once(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, "5.")

    response = create(server, tools=[tool(mcp)], tool_choice={"type": "mcp", "server_label": "calc", "name": "add"})

    first, second = server.engine.received
    assert first.params.sampling.grammar is not None
    assert second.params.sampling.grammar is None
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]


def test_a_response_in_the_background_calls_tools(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD, "It is 5.")

    queued = create(server, tools=[tool(mcp)], background=True)
    url = f"/v1/responses/{queued['id']}"
    wait_until(lambda: server.http.get(url).json()["status"] == "completed")

    assert kinds(server.http.get(url).json()) == ["mcp_list_tools", "mcp_call", "message"]


def test_the_operators_server_stands_for_web_search(server: Server, mcp: RealServer) -> None:
    server.engine.script = rounds(ADD.replace("calc", "web_search"), "5.")

    response = create(server, tools=[{"type": "web_search_preview"}, {"type": "file_search"}])

    assert mcp.calls == [("add", (2, 3))]
    assert response["output"][1]["server_label"] == "web_search"
    assert [one["type"] for one in response["ignored"]] == ["file_search"]


def test_servers_that_cannot_be_used_are_refused(server: Server, mcp: RealServer) -> None:
    nowhere = tool(mcp, server_url="http://127.0.0.1:1/mcp")
    cases: list[tuple[dict[str, Any], int, str]] = [
        (nowhere, 424, "'calc' cannot be listed: it cannot be reached"),
        (tool(mcp, server_url=mcp.url.removesuffix("/mcp")), 424, "it answered with status 404"),
        (tool(mcp, server_url="https://10.0.0.1/"), 424, "its host has no public address (--mcp_private_hosts"),
        (tool(mcp, server_url="ftp://a.example/"), 400, "its URL cannot be read"),
        (tool(mcp, server_url=None), 400, "not one of --tool_server ('web_search')"),
        (tool(mcp, headers={"Host": "a"}), 400, "the header 'Host' cannot be set"),
        (tool(mcp, headers={"A": "b\r\nc: d"}), 400, "must be printable ASCII"),
        ({"type": "mcp"}, 400, "server_label"),
    ]
    for given, status, text in cases:
        code, error = refused(server, tools=[given])

        assert (code, text in error["message"]) == (status, True), error


def test_two_servers_of_one_label_are_refused(server: Server, mcp: RealServer) -> None:
    code, error = refused(server, tools=[tool(mcp), tool(mcp)])

    assert (code, error["message"]) == (400, "tools: two MCP servers are called 'calc'")


def test_servers_of_the_older_transport_are_called_in_one_session(server: Server) -> None:
    server.engine.script = rounds(ADD + ADD, REMOVE, BROKEN, "Done.")

    with real_mcp_server(is_older=True) as older:
        response = create(server, tools=[tool(older, headers={"X-Key": "k"})])

        assert older.url.endswith("/sse")
        assert older.calls == [("add", (2, 3)), ("add", (2, 3)), ("remove", "/a")]
        assert len({headers.get("x-key") for headers in older.headers}) == 1
        wait_until(lambda: not older.num_streams)  # the session has ended
    calls = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert [call["output"] for call in calls] == ["5", "5", "removed /a", None]
    assert "the disk is full" in json.dumps(calls[-1]["error"])


@pytest.mark.parametrize(("is_stream", "is_stateless"), [(False, False), (False, True), (True, True)])
def test_servers_may_answer_in_json_and_without_sessions(server: Server, is_stream: bool, is_stateless: bool) -> None:
    server.engine.script = rounds(ADD, "5.")

    with real_mcp_server(is_stream, is_stateless) as other:
        response = create(server, tools=[tool(other)])

    assert response["output"][1]["output"] == "5"


def test_an_error_after_a_call_fails_the_response(server: Server, mcp: RealServer) -> None:
    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        is_first = len(server.engine.received) == 1
        return list(rows(ADD)(req)) if is_first else [ReqFailed(req.req_id, 503, "the engine died")]  # type: ignore[arg-type]

    server.engine.script = script

    events = named_events(server.post("/v1/responses", {"input": "Hi", "stream": True, "tools": [tool(mcp)]}))

    assert events[-1]["type"] == "response.failed"
    assert kinds(events[-1]["response"]) == ["mcp_list_tools", "mcp_call"]


def mcp_answer(request_id: int, value: Any, *headers: str) -> bytes:
    body = json.dumps({"jsonrpc": "2.0", "id": request_id, "result": value}).encode()
    return answer(body, "Content-Type: application/json", *headers)


BEFORE_CALL = (
    mcp_answer(1, {"protocolVersion": "2025-06-18", "capabilities": {}}),
    answer(b"", status=202),
    mcp_answer(2, {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}),
)


@pytest.mark.parametrize(
    ("of_call", "problem"),
    [
        (None, "did not answer within 1 s"),
        (b"", "broken or incomplete"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "broken or incomplete"),
        (mcp_answer(3, {"content": [{"type": "text", "text": "x" * 10 * 2**20}]}), "more than 4 MiB"),
        (answer(b"", "Location: http://169.254.169.254/", status=307), "status 307"),
    ],
    ids=["hangs", "dies", "dies in its answer", "answers 10 MB", "redirects to a private address"],
)
def test_a_server_that_fails_in_a_call_fails_its_item_only(tmp_path: Path, of_call: bytes | None, problem: str) -> None:
    left = [*BEFORE_CALL, of_call]
    config = HttpConfig(mcp_private_hosts=["127.0.0.1"], allow_http_mcp=True, mcp_timeout=1)
    with (
        image_host_in_thread(lambda _: left.pop(0) if left else answer(b"", status=404), is_tls=False) as host,
        running(tmp_path, with_template(SHOW), config) as server,
    ):
        server.engine.script = rounds(ADD, "It is 5.")
        given = {"type": "mcp", "server_label": "calc", "server_url": host.url("/mcp", "127.0.0.1", "http")}

        response = create(server, tools=[given | {"require_approval": "never"}])

    _, call, said = response["output"]
    assert (response["status"], said["type"]) == ("completed", "message")
    assert (call["status"], call["output"]) == ("failed", None)
    assert problem in str(call["error"]), call["error"]
