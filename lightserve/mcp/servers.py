"""The MCP servers of requests: where they are, and who may be dialled."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property

from lightserve.errors import InvalidRequestError, McpError
from lightserve.mcp.exchange import Answer, EventStream, Message, exchange
from lightserve.mcp.tools import ALL_TOOLS, NO_TOOLS, McpTool, ToolFilter
from lightserve.outbound.addresses import look_up
from lightserve.outbound.dial import LookUp, Resolver, Streams, connect
from lightserve.outbound.urls import OutboundUrl, RuleFlags, UrlRules, parse_url

MCP_FLAGS = RuleFlags("--allowed_mcp_domains", "--mcp_private_hosts", "--allow_http_mcp")
MAX_CONNECTIONS = 64  # of a process
MAX_HEADERS, MAX_HEADER = 32, 8192
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
HEADER_VALUE = re.compile(r"[\x20-\x7e\t]*")
# this client sets them; a request with its own could smuggle a second request or another host
RESERVED = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "content-type", "expect", "host", "keep-alive"}
    | {"mcp-protocol-version", "mcp-session-id", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)


@dataclass(frozen=True, slots=True)
class McpServer:
    """As a request wants it."""

    label: str
    url: OutboundUrl
    headers: Mapping[str, str] = field(default_factory=dict)
    is_of_operator: bool = False  # --tool_server: dialled whatever its address is
    allowed: ToolFilter = ALL_TOOLS
    needs_approval: ToolFilter = NO_TOOLS
    listed: Sequence[McpTool] | None = None  # the request knows its tools; None: the server is asked


class McpConnector:
    """Of an HTTP process. It keeps no connection."""

    def __init__(
        self,
        rules: UrlRules,
        timeout_s: float,
        tool_servers: Mapping[str, str],
        takes_urls: bool = True,
        look_up_host: LookUp = look_up,
    ) -> None:
        """``tool_servers``: the URLs of --tool_server by label. ``takes_urls``: of clients."""
        self.tool_servers = {label: parse_url(url) for label, url in tool_servers.items()}
        self._rules = rules
        self._timeout_s = timeout_s
        self._takes_urls = takes_urls
        self._resolver = Resolver(rules, look_up_host)
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)
        self._num_streams = 0

    @cached_property
    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def find(self, label: str, url: str | None, headers: Mapping[str, str], param: str) -> McpServer:
        """The server that a request names. ``url`` None: one of the operator's. ``param`` is the field, for errors."""
        try:
            if url is None:
                return self._of_operator(label)
            return self._of_client(label, url, headers)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{param}: MCP server {label[:100]!r}: {error}", param) from error

    def _of_operator(self, label: str) -> McpServer:
        if label not in self.tool_servers:
            names = ", ".join(map(repr, self.tool_servers)) or "none"
            raise InvalidRequestError(f"it has no URL, and is not one of --tool_server ({names})")
        return McpServer(label, self.tool_servers[label], is_of_operator=True)

    def _of_client(self, label: str, url: str, headers: Mapping[str, str]) -> McpServer:
        if not self._takes_urls:
            raise InvalidRequestError("this server calls no MCP servers of clients (--no_mcp_urls)")
        parsed = parse_url(url)
        self._rules.check(parsed)
        return McpServer(label, parsed, checked_headers(headers))

    async def send(self, server: McpServer, message: Message) -> Answer:
        """Raises McpError, also when the answer takes too long."""
        async with self.time_limit(), self._connections:
            return await exchange(await self._open(server), message)

    async def open_stream(self, server: McpServer, message: Message) -> EventStream:
        """The answer to a GET. Streams have a limit of their own: each needs other connections for its messages."""
        if self._num_streams >= MAX_CONNECTIONS:
            raise McpError(f"{MAX_CONNECTIONS} streams of MCP servers are open, which is the limit")
        self._num_streams += 1
        stream: EventStream | None = None
        try:
            stream = EventStream(await self._open(server), self._on_stream_closed)
            await stream.open(message)
        except BaseException:
            if stream is None:
                self._on_stream_closed()
            raise
        return stream

    def _on_stream_closed(self) -> None:
        self._num_streams -= 1

    @asynccontextmanager
    async def time_limit(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            raise McpError(f"it did not answer within {self._timeout_s:g} s (--mcp_timeout)") from error

    async def _open(self, server: McpServer) -> Streams:
        try:
            return await connect(server.url, await self._addresses(server), self.tls)
        except InvalidRequestError as error:
            raise McpError(str(error)) from error
        except OSError as error:
            raise McpError("it cannot be reached") from error

    async def _addresses(self, server: McpServer) -> Sequence[str]:
        if server.is_of_operator:
            return await asyncio.to_thread(look_up, server.url.host, server.url.port)
        return await self._resolver.addresses_of(server.url)


def checked_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Of a client, who may set any but those of the protocol."""
    if len(headers) > MAX_HEADERS:
        raise InvalidRequestError(f"{len(headers)} headers; the limit is {MAX_HEADERS}")
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name) or name.lower() in RESERVED:
            raise InvalidRequestError(f"the header {name[:100]!r} cannot be set")
        if len(value) > MAX_HEADER or not HEADER_VALUE.fullmatch(value):
            raise InvalidRequestError(f"the value of the header {name!r} must be printable ASCII of {MAX_HEADER} bytes")
    return dict(headers)
