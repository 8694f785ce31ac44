"""MCP servers that answer something else than the protocol says. Each gives one McpError, within limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lightserve.errors import InvalidRequestError, McpError
from lightserve.mcp import exchange, session, tools
from lightserve.mcp.servers import MCP_FLAGS, McpConnector, McpServer, checked_headers
from lightserve.mcp.session import McpSession
from lightserve.mcp.toolbox import Toolbox
from lightserve.mcp.tools import McpTool, ToolFilter, error_text, function_name, outcome_of
from lightserve.outbound.urls import UrlRules
from test.media.fetch.image_host import answer, image_host

RULES = UrlRules(MCP_FLAGS, private_hosts=("localhost",), allows_http=True)
JSON = "Content-Type: application/json"
EVENT_STREAM = "Content-Type: text/event-stream"


def result(request_id: int, value: Any, *headers: str) -> bytes:
    message = {"jsonrpc": "2.0", "id": request_id, "result": value}
    return answer(json.dumps(message).encode(), JSON, *headers)


INITIALIZED = result(1, {"protocolVersion": "2025-06-18", "capabilities": {}}, "Mcp-Session-Id: s1")
TAKEN = answer(b"", status=202)


def listed(*answers: bytes | None, timeout_s: float = 10.0, path: str = "/mcp") -> tuple[list[McpTool], list[str]]:
    """The tools of a server that gives these answers, and the heads of the requests."""

    async def ask() -> tuple[list[McpTool], list[str]]:
        left = list(answers)
        async with image_host(lambda _: left.pop(0), is_tls=False) as host:
            connector = McpConnector(RULES, timeout_s, {})
            server = connector.find("x", host.url(path, scheme="http"), {"X-Key": "k"}, "tools")
            try:
                return await McpSession(server, connector).tools(), host.heads
            finally:
                host.go_on.set()

    return asyncio.run(ask())


def test_a_list_in_pages_is_one_list_and_the_session_is_named() -> None:
    pages = [
        {"tools": [{"name": "a"}], "nextCursor": "2"},
        {"tools": [{"name": "b", "inputSchema": {"type": "object"}}]},
    ]

    found, heads = listed(INITIALIZED, TAKEN, result(2, pages[0]), result(3, pages[1]))

    assert [tool.name for tool in found] == ["a", "b"]
    assert ["mcp-session-id: s1" in head.lower() for head in heads] == [False, True, True, True]
    assert all("x-key: k" in head.lower() for head in heads)
    assert "mcp-protocol-version: 2025-06-18" in heads[-1].lower()


EVENTS = [
    'event: message\r\ndata: {"jsonrpc":"2.0","method":"notifications/message","params":{}}\r\n\r\n',
    ": comment\n\n",
    'data: {"jsonrpc":"2.0","id":2,\ndata: "result":{"tools":[{"name":"a"}]}}\n\n',
]


def test_events_before_the_answer_are_skipped() -> None:
    stream = answer("".join(EVENTS).encode(), "Content-Type: text/event-stream; charset=utf-8")

    assert [tool.name for tool in listed(INITIALIZED, TAKEN, stream)[0]] == ["a"]


@pytest.mark.parametrize(
    ("opened", "problem"),
    [
        (answer(b"", JSON), "its answer is no stream of events"),
        (answer(b"event: endpoint\ndata: http://169.254.169.254/\n\n", EVENT_STREAM), "is of another server"),
        (answer(b"event: endpoint\ndata: file:///etc/passwd\n\n", EVENT_STREAM), "is no URL"),
        (answer(b"event: message\ndata: {}\n\n", EVENT_STREAM), "its stream of events has ended"),
        (answer(b"", status=405), "it answered with status 405"),
    ],
)
def test_a_stream_of_the_older_transport_that_is_wrong_is_an_error(opened: bytes, problem: str) -> None:
    with pytest.raises(McpError, match=problem):
        listed(opened, path="/sse")


def test_a_stream_that_ends_before_the_answer_is_an_error_and_no_message_goes_elsewhere() -> None:
    opened = answer(b"event: endpoint\ndata: /messages?session=1\n\n", EVENT_STREAM)

    with pytest.raises(McpError, match="its stream of events has ended"):
        listed(opened, TAKEN, path="/sse?key=1")


LOOP = result(2, {"tools": [], "nextCursor": "again"})


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        (answer(b"no", JSON), "its answer is not JSON"),
        (answer(b"{}", JSON), "it did not answer the request"),
        (answer(b'{"id": 7, "result": {}}', JSON), "it did not answer the request"),
        (answer(b'{"id": 2, "result": 5}', JSON), "its answer has no result"),
        (answer(b'{"id": 2, "error": {"code": -32601, "message": "no such method"}}', JSON), "no such method"),
        (answer(b"", "Content-Encoding: gzip", JSON), "is compressed"),
        (answer(b"", status=401), "status 401; check its headers and its token"),
        (answer(b"", "Location: http://127.0.0.1/", status=307), "it answered with status 307"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "broken or incomplete"),
        (b"nonsense\r\n\r\n", "broken or incomplete"),
        (result(2, {"tools": [{"title": "x"}]}), "has no name"),
        (result(2, {"tools": [{"name": str(i)} for i in range(tools.MAX_TOOLS + 1)]}), "more than 512 tools"),
        (None, "did not answer within 1 s (--mcp_timeout)"),
    ],
)
def test_a_wrong_answer_is_one_error(last: bytes | None, problem: str) -> None:
    with pytest.raises(McpError) as caught:
        listed(INITIALIZED, TAKEN, last, timeout_s=1.0)

    assert problem in str(caught.value)


def test_an_answer_without_end_is_not_read_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_ANSWER_BYTES", 2**20)

    with pytest.raises(McpError, match="more than 1 MiB"):
        listed(INITIALIZED, TAKEN, result(2, {"tools": [], "x": "y" * 2**21}))


def test_a_list_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_PAGES", 2)

    with pytest.raises(McpError, match="more than 2 pages"):
        listed(INITIALIZED, TAKEN, LOOP, LOOP.replace(b'"id": 2', b'"id": 3'))


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(McpError, match=r"its protocol is '1999-01-01'"):
        listed(result(1, {"protocolVersion": "1999-01-01"}))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://a.example/", "use https: (--allow_http_mcp allows both)"),
        ("https://a.example:8443/", "only 443 is allowed, except for --allowed_mcp_domains"),
        ("https://user@a.example/", "its URL cannot be read"),
    ],
)
def test_urls_are_held_to_the_rules(url: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        McpConnector(UrlRules(MCP_FLAGS), 1.0, {}).find("x", url, {}, "tools")

    assert problem in str(caught.value)


def test_a_private_address_looks_like_a_name_that_does_not_exist() -> None:
    def problem(addresses: list[str]) -> str:
        connector = McpConnector(UrlRules(MCP_FLAGS), 1.0, {}, look_up_host=lambda *_: addresses)
        server = connector.find("x", "https://a.example/", {}, "tools")
        with pytest.raises(McpError) as caught:
            asyncio.run(McpSession(server, connector).tools())
        return str(caught.value)

    assert problem([]) == problem(["10.0.0.1"]) == problem(["8.8.8.8", "127.0.0.1"])


def test_no_urls_of_clients_leaves_the_servers_of_the_operator() -> None:
    connector = McpConnector(RULES, 1.0, {"own": "http://127.0.0.1:1/mcp"}, takes_urls=False)

    assert connector.find("own", None, {}, "tools").is_of_operator
    with pytest.raises(InvalidRequestError, match="--no_mcp_urls"):
        connector.find("x", "https://a.example/", {}, "tools")


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "Mcp-Session-Id", "a b", "a:", ""])
def test_headers_of_the_protocol_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        checked_headers({name: "x"})


def test_names_of_functions_have_only_letters_that_grammars_and_clients_know() -> None:
    assert function_name("calc", "files/read file") == "calc__files_read_file"
    assert len(function_name("a" * 64, "b" * 200)) == 128


def test_results_are_texts() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "data": "x"}, {"type": "resource_link", "uri": "f:b"}]

    assert outcome_of({"content": blocks}).text.splitlines()[::2] == ["a", "f:b"]
    assert outcome_of({"content": [], "structuredContent": {"x": 1}}).text == '{"x":1}'
    assert outcome_of({"content": 5}).text == ""
    assert error_text("down") == "down"


def test_a_long_result_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MAX_RESULT", 10)

    text = outcome_of({"content": [{"type": "text", "text": "y" * 50}]}).text

    assert text == "y" * 10 + "\n[cut: the result has 50 characters; the limit is 10]"


@pytest.mark.parametrize("arguments", ["[1]", "{", "1"])
def test_arguments_that_are_no_object_are_not_sent(arguments: str) -> None:
    async def call() -> str:
        connector = McpConnector(RULES, 1.0, {"own": "http://127.0.0.1:1/mcp"})
        server = McpServer("own", connector.tool_servers["own"], is_of_operator=True, listed=[McpTool("f")])
        toolbox = await Toolbox.open(connector, [server], "tools")
        return (await toolbox.call("own__f", arguments)).shown_text

    assert "the model wrote arguments" in asyncio.run(call())


def test_filters() -> None:
    reads, writes = McpTool("reads", annotations={"readOnlyHint": True}), McpTool("writes")

    assert ToolFilter(is_read_only=True).matches(reads)
    assert not ToolFilter(is_read_only=True).matches(writes)
    assert not ToolFilter(frozenset({"reads"}), frozenset({"reads"})).matches(reads)
