"""What one response says to one MCP server: initialize, tools/list, tools/call."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import orjson

from lightserve import __version__
from lightserve.errors import McpError
from lightserve.mcp.exchange import Answer, Message
from lightserve.mcp.servers import McpConnector, McpServer
from lightserve.mcp.sse import SseTransport, is_of_older_transport
from lightserve.mcp.tools import MAX_TOOLS, McpTool, ToolOutcome, outcome_of, tool_of

JsonObject = dict[str, Any]

# of the protocol, newest first; later ones have no session and are announced by another request
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
MAX_PAGES = 32  # of a list of tools
CLIENT = {"name": "lightserve", "version": __version__}


class McpSession:
    def __init__(self, server: McpServer, connector: McpConnector) -> None:
        self.server = server
        self._connector: McpConnector | SseTransport = connector
        if is_of_older_transport(server.url):
            self._connector = SseTransport(connector)
        self._ids = itertools.count(1)
        self._version = ""  # that both know; empty: not initialised
        self._session_id: str | None = None  # a server may have none
        self._lock = asyncio.Lock()

    async def tools(self) -> list[McpTool]:
        tools: list[McpTool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._request("tools/list", {} if cursor is None else {"cursor": cursor})
            listed = page.get("tools")
            tools += map(tool_of, listed if isinstance(listed, list) else ())
            if len(tools) > MAX_TOOLS:
                raise McpError(f"it has more than {MAX_TOOLS} tools")
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str):
                return tools
        raise McpError(f"its list of tools has more than {MAX_PAGES} pages")

    async def call(self, name: str, arguments: JsonObject) -> ToolOutcome:
        return outcome_of(await self._request("tools/call", {"name": name, "arguments": arguments}))

    async def close(self) -> None:
        """Tell the server that its session is over. It may refuse, and nobody waits for it."""
        if isinstance(self._connector, SseTransport):
            self._connector.close()
        if self._session_id is None:
            return
        message = Message(self.server.url, self._headers(), b"", None, "DELETE")
        self._session_id = None
        try:
            await self._connector.send(self.server, message)
        except McpError:
            return  # 405: sessions end by themselves there

    async def _request(self, method: str, params: JsonObject) -> JsonObject:
        async with self._lock:
            if not self._version:
                await self._initialize()
        return _result_of(await self._send(method, params))

    async def _initialize(self) -> None:
        params = {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": CLIENT}
        answer = await self._send("initialize", params)
        version = _result_of(answer).get("protocolVersion")
        if version not in VERSIONS:
            raise McpError(f"its protocol is {str(version)[:40]!r}; this server knows {', '.join(VERSIONS)}")
        self._version, self._session_id = version, answer.headers.get("mcp-session-id")
        await self._send("notifications/initialized", None)

    async def _send(self, method: str, params: JsonObject | None) -> Answer:
        """``params`` None: a notification."""
        request_id = None if params is None else next(self._ids)
        body: JsonObject = {"jsonrpc": "2.0", "method": method}
        if request_id is not None:
            body |= {"id": request_id, "params": params}
        try:
            content = orjson.dumps(body)
        except TypeError as error:
            raise McpError("the arguments of the call are nested too deeply") from error
        return await self._connector.send(self.server, Message(self.server.url, self._headers(), content, request_id))

    def _headers(self) -> dict[str, str]:
        headers = dict(self.server.headers)
        if self._version:
            headers["MCP-Protocol-Version"] = self._version
        if self._session_id is not None:
            headers["Mcp-Session-Id"] = self._session_id
        return headers


def _result_of(answer: Answer) -> JsonObject:
    match answer.message:
        case {"error": {"message": str(text)} as error}:
            code = error.get("code")
            details = {
                "type": "mcp_protocol_error",
                "code": code if isinstance(code, int) else 0,
                "message": text[:2000],
            }
            raise McpError(f"it answered with an error: {text[:300]}", details)
        case {"result": dict(result)}:
            return result
    raise McpError("its answer has no result")
