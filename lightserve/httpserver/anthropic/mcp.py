"""MCP servers of /v1/messages: the field mcp_servers, and tools of the type mcp_toolset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.http.body import Body, JsonObject, at_most
from lightserve.mcp.servers import McpConnector, McpServer
from lightserve.mcp.toolbox import MAX_SERVERS
from lightserve.mcp.tools import ALL_TOOLS, MAX_TOOLS, NO_TOOLS, McpTool, ToolFilter

PARAM = "mcp_servers"

Names = Annotated[list[str], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolConfiguration(Body):
    """Of earlier versions, in place of an mcp_toolset."""

    enabled: bool | None = None
    allowed_tools: Names | None = None

    def to_filter(self) -> ToolFilter:
        if self.enabled is False:
            return NO_TOOLS
        return ALL_TOOLS if self.allowed_tools is None else ToolFilter(frozenset(self.allowed_tools))


class McpServerDefinition(Body):
    type: Literal["url"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    url: str | None = None  # None: one of --tool_server
    authorization_token: str | None = None
    tool_configuration: ToolConfiguration | None = None

    def server(self, connector: McpConnector) -> McpServer:
        token = self.authorization_token
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        server = connector.find(self.name, self.url, headers, PARAM)
        configuration = self.tool_configuration or ToolConfiguration()
        return replace(server, allowed=configuration.to_filter())


McpServers = Annotated[list[McpServerDefinition], Field(max_length=MAX_SERVERS, fail_fast=True)]


class ToolSettings(Body):
    enabled: bool | None = None


class PinnedTool(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]


class McpToolset(Body):
    type: Literal["mcp_toolset"]
    mcp_server_name: str
    default_config: ToolSettings | None = None
    configs: Annotated[dict[str, ToolSettings], Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS)] | None = None
    tools: Annotated[list[PinnedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def apply(self, server: McpServer) -> McpServer:
        listed = None if self.tools is None else [McpTool(t.name, t.description, t.input_schema) for t in self.tools]
        return replace(server, allowed=self._filter(), listed=listed)

    def _filter(self) -> ToolFilter:
        configs = self.configs or {}
        if self.default_config is not None and self.default_config.enabled is False:
            return ToolFilter(frozenset(name for name, config in configs.items() if config.enabled))
        return ToolFilter(excluded=frozenset(name for name, config in configs.items() if config.enabled is False))


def requested_servers(
    definitions: Sequence[McpServerDefinition], tools: Iterable[Any], connector: McpConnector
) -> list[McpServer]:
    toolsets = {tool.mcp_server_name: tool for tool in tools if isinstance(tool, McpToolset)}
    names = {definition.name for definition in definitions}
    for name in toolsets:
        if name not in names:
            raise InvalidRequestError(f"tools: the mcp_toolset of {name[:100]!r} needs that server in {PARAM}", "tools")
    servers = [definition.server(connector) for definition in definitions]
    return [toolsets[server.label].apply(server) if server.label in toolsets else server for server in servers]


def with_output(value: Mapping[str, Any], blocks: Sequence[JsonObject]) -> JsonObject:
    """The body with the output so far as the end of its conversation."""
    *earlier, last = value["messages"]
    if last["role"] != "assistant":
        return {**value, "messages": [*earlier, last, {"role": "assistant", "content": list(blocks)}]}
    begun = last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
    return {**value, "messages": [*earlier, {**last, "content": [*begun, *blocks]}]}
