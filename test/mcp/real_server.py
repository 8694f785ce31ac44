"""A real MCP server, of the SDK, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from test.waiting import DEADLINE_S, until

pytest.importorskip("mcp", reason="requirements-test.txt has it")

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations


@dataclass
class RealServer:
    url: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)  # of calls
    num_streams: int = 0  # that are open, of the older transport


def counting_streams(app: Any, real: RealServer) -> Any:
    async def counting(scope: Any, receive: Any, send: Any) -> None:
        is_get = scope.get("method") == "GET"
        real.num_streams += is_get
        try:
            await app(scope, receive, send)
        finally:
            real.num_streams -= is_get

    return counting


@contextmanager
def real_mcp_server(is_stream: bool = True, is_stateless: bool = False, is_older: bool = False) -> Iterator[RealServer]:
    """``is_stream``: answers are server-sent events; else JSON. ``is_older``: of the transport before."""
    real, mcp = RealServer(""), MCPServer("calculator")

    def add(a: int, b: int, context: Context[Any, Any]) -> str:
        """Add two numbers."""
        real.calls.append(("add", (a, b)))
        real.headers.append(dict(context.headers or {}))
        return str(a + b)

    def remove(path: str) -> str:
        """Remove a file."""
        real.calls.append(("remove", path))
        return f"removed {path}"

    def broken() -> str:
        """It never works."""
        raise ToolError("the disk is full")

    mcp.add_tool(add, annotations=ToolAnnotations(read_only_hint=True))
    mcp.add_tool(remove)
    mcp.add_tool(broken)
    started, stopped = threading.Event(), []
    of_today = {"json_response": not is_stream, "stateless_http": is_stateless}
    app = mcp.sse_app() if is_older else mcp.streamable_http_app(**of_today)

    async def serve() -> None:
        server = uvicorn.Server(
            uvicorn.Config(counting_streams(app, real), log_config=None, ws="none", access_log=False)
        )
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        real.url = f"http://127.0.0.1:{listener.getsockname()[1]}{'/sse' if is_older else '/mcp'}"
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        stopped.append(server)
        started.set()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(DEADLINE_S)
    try:
        yield real
    finally:
        stopped[0].should_exit = True
        thread.join(DEADLINE_S)
