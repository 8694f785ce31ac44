"""The MCP tools of one response, by the names of the functions that the model gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from lightserve.errors import InvalidRequestError, McpError
from lightserve.mcp.servers import McpConnector, McpServer
from lightserve.mcp.session import McpSession
from lightserve.mcp.tools import McpTool, ToolOutcome, failure, function_name
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

MAX_SERVERS = 16  # of a request
MAX_SHOWN = 8  # names in an error
_closing: set[asyncio.Task[None]] = set()


@dataclass(frozen=True, slots=True)
class HostedTool:
    """A tool that this server calls for the model."""

    label: str  # of its MCP server
    tool: McpTool
    needs_approval: bool

    @property
    def function_name(self) -> str:
        return function_name(self.label, self.tool.name)


class Toolbox:
    def __init__(self, sessions: Iterable[McpSession], tools: Iterable[HostedTool]) -> None:
        self.tools: dict[str, HostedTool] = {tool.function_name: tool for tool in tools}
        self.listings: dict[str, Sequence[McpTool]] = {}  # by label: of the servers that were asked
        self._sessions = {session.server.label: session for session in sessions}

    @classmethod
    async def open(cls, connector: McpConnector, servers: Sequence[McpServer], param: str) -> Toolbox:
        """Ask the servers for their tools, all at once. ``param`` is the field that names them, for errors."""
        _check(servers, param)
        sessions = [McpSession(server, connector) for server in servers]
        try:
            lists = await _listed(sessions, param)
        except BaseException:
            cls(sessions, ()).close()
            raise
        tools = [tool for session, listed in zip(sessions, lists, strict=True) for tool in _hosted(session, listed)]
        toolbox = cls(sessions, tools)
        asked = ((session.server, listed) for session, listed in zip(sessions, lists, strict=True))
        toolbox.listings = {
            server.label: [tool for tool in listed if server.allowed.matches(tool)]
            for server, listed in asked
            if server.listed is None
        }
        return toolbox

    @property
    def definitions(self) -> dict[str, dict[str, Any]]:
        """As the tools of a chat, by the name of the function."""
        return {name: _definition(name, tool.tool) for name, tool in self.tools.items()}

    @property
    def servers(self) -> dict[str, McpServer]:
        return {label: session.server for label, session in self._sessions.items()}

    async def call(self, name: str, arguments: str) -> ToolOutcome:
        """``name`` is that of the function. What goes wrong at the server is an outcome: the model reads it."""
        hosted = self.tools[name]
        begin_s = time.monotonic()
        try:
            outcome = await self._sessions[hosted.label].call(hosted.tool.name, _parsed(arguments))
        except McpError as error:
            outcome = failure(error)
        how = "failed" if outcome.error is not None else f"{len(outcome.text)} characters"
        logger.info("MCP call %s: %s in %.3f s", name, how, time.monotonic() - begin_s)
        return outcome

    def close(self) -> None:
        """End the sessions, without waiting for the servers."""
        for session in self._sessions.values():
            task = asyncio.get_running_loop().create_task(session.close())
            _closing.add(task)
            task.add_done_callback(_closing.discard)


@contextmanager
def closing_on_error(toolbox: Toolbox | None) -> Iterator[None]:
    """A response closes its toolbox when it ends. Until there is one, an error does."""
    try:
        yield
    except BaseException:
        if toolbox is not None:
            toolbox.close()
        raise


def _check(servers: Sequence[McpServer], param: str) -> None:
    if len(servers) > MAX_SERVERS:
        raise InvalidRequestError(f"{param}: {len(servers)} MCP servers; the limit is {MAX_SERVERS}", param)
    labels = [server.label for server in servers]
    for label in labels:
        if labels.count(label) > 1:
            raise InvalidRequestError(f"{param}: two MCP servers are called {label[:100]!r}", param)


async def _listed(sessions: Sequence[McpSession], param: str) -> list[Sequence[McpTool]]:
    try:
        async with asyncio.TaskGroup() as tasks:
            listing = [tasks.create_task(_list(session, param)) for session in sessions]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in listing]


async def _list(session: McpSession, param: str) -> Sequence[McpTool]:
    server = session.server
    if server.listed is not None:
        return server.listed
    try:
        listed = await session.tools()
    except McpError as error:
        problem = f"{param}: the tools of the MCP server {server.label!r} cannot be listed: {error}"
        raise McpError(problem, error.details, param) from error
    _check_names(server, listed, param)
    return listed


def _check_names(server: McpServer, listed: Sequence[McpTool], param: str) -> None:
    """Without any of its allowed tools the model would get none, and nobody would know why."""
    has, wanted = [tool.name for tool in listed], server.allowed.names
    if wanted and wanted.isdisjoint(has):
        problem = f"{param}: the MCP server {server.label!r} has no tool {_shown(sorted(wanted))}; it has {_shown(has)}"
        raise InvalidRequestError(problem, param)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:64]) for name in names[:MAX_SHOWN]) or "none"


def _hosted(session: McpSession, listed: Iterable[McpTool]) -> Iterator[HostedTool]:
    server = session.server
    for tool in listed:
        if server.allowed.matches(tool):
            yield HostedTool(server.label, tool, server.needs_approval.matches(tool))


def _definition(name: str, tool: McpTool) -> dict[str, Any]:
    function = {"name": name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _parsed(arguments: str) -> dict[str, Any]:
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError as error:
        raise McpError("the model wrote arguments that are not JSON") from error
    if not isinstance(value, dict):
        raise McpError("the model wrote arguments that are not an object")
    return value
