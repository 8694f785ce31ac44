"""Tools of the type mcp in a request of /v1/responses, and the items about them in its input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.chat.tools import MAX_TOOLS
from lightserve.httpserver.http.body import Body, JsonObject, at_most
from lightserve.mcp.servers import MAX_HEADERS, McpConnector, McpServer
from lightserve.mcp.toolbox import Toolbox
from lightserve.mcp.tools import ALL_TOOLS, NO_TOOLS, McpTool, ToolFilter

PARAM = "tools"
# hosted tools of OpenAI: the labels of --tool_server that can stand for them, as vLLM calls them too
STAND_INS = {"web_search": ("web_search", "browser"), "code_interpreter": ("code_interpreter", "python")}

Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Names = Annotated[list[str], Field(max_length=MAX_TOOLS, fail_fast=True)]
Headers = Annotated[dict[str, str], Field(max_length=MAX_HEADERS), at_most(MAX_HEADERS)]


class ToolNames(Body):
    """OpenAI's filter object."""

    tool_names: Names | None = None
    read_only: bool | None = None

    def to_filter(self) -> ToolFilter:
        names = None if self.tool_names is None else frozenset(self.tool_names)
        return ToolFilter(names, is_read_only=self.read_only)


class Approval(Body):
    always: ToolNames | None = None
    never: ToolNames | None = None


class McpServerTool(Body):
    type: Literal["mcp"]
    server_label: Label
    server_url: str | None = None
    authorization: str | None = None
    headers: Headers | None = None
    allowed_tools: Names | ToolNames | None = None
    require_approval: Literal["always", "never"] | Approval | None = None

    def server(self, connector: McpConnector) -> McpServer:
        self._check_supported()
        headers = dict(self.headers or {})
        if self.authorization is not None:
            headers["Authorization"] = f"Bearer {self.authorization}"
        server = connector.find(self.server_label, self.server_url, headers, PARAM)
        return replace(server, allowed=self._allowed(), needs_approval=self._needs_approval(server.is_of_operator))

    def _check_supported(self) -> None:
        for name in ("connector_id", "tunnel_id"):
            if (self.model_extra or {}).get(name) and self.server_url is None:
                raise InvalidRequestError(f"{PARAM}: only OpenAI's servers have a {name}; give server_url", PARAM)

    def _allowed(self) -> ToolFilter:
        if isinstance(self.allowed_tools, ToolNames):
            return self.allowed_tools.to_filter()
        return ALL_TOOLS if self.allowed_tools is None else ToolFilter(frozenset(self.allowed_tools))

    def _needs_approval(self, is_of_operator: bool) -> ToolFilter:
        """OpenAI asks before every call unless the request says otherwise. The operator's servers are trusted."""
        if self.require_approval is None:
            return NO_TOOLS if is_of_operator else ALL_TOOLS
        if not isinstance(self.require_approval, Approval):
            return ALL_TOOLS if self.require_approval == "always" else NO_TOOLS
        if self.require_approval.never is None:
            always = self.require_approval.always
            return ALL_TOOLS if always is None else always.to_filter()
        return _others(self.require_approval.never)


def _others(never: ToolNames) -> ToolFilter:
    """The tools that ``never`` does not name."""
    is_read_only = None if never.read_only is None else not never.read_only
    if never.tool_names is None:
        return NO_TOOLS if is_read_only is None else ToolFilter(is_read_only=is_read_only)
    return ToolFilter(excluded=frozenset(never.tool_names), is_read_only=is_read_only)


class McpListToolsItem(Body):
    """The tools of a server, from an earlier response: the server is not asked again."""

    type: Literal["mcp_list_tools"]
    server_label: str | None = None
    tools: Annotated[list[JsonObject], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def listed(self) -> list[McpTool]:
        return list(self._tools())

    def _tools(self) -> Iterator[McpTool]:
        for value in self.tools or ():
            match value:
                case {"name": str(name), "input_schema": dict(schema)}:
                    description, annotations = value.get("description"), value.get("annotations")
                    yield McpTool(
                        name,
                        description if isinstance(description, str) else None,
                        schema,
                        annotations if isinstance(annotations, dict) else None,
                    )


class McpApprovalRequestItem(Body):
    type: Literal["mcp_approval_request"]
    id: Annotated[str, Field(min_length=1)]
    name: str
    arguments: str
    server_label: str


class McpApprovalResponseItem(Body):
    type: Literal["mcp_approval_response"]
    approval_request_id: Annotated[str, Field(min_length=1)]
    approve: bool
    reason: str | None = None

    @property
    def refusal(self) -> str:
        """What the model reads in place of a result."""
        because = f": {self.reason}" if self.reason else ""
        return f"The user did not approve this call{because}"


def stand_in(kind: str, connector: McpConnector) -> McpServer | None:
    """The operator's server for a hosted tool of OpenAI, such as web_search_preview."""
    for hosted, labels in STAND_INS.items():
        for label in labels:
            if kind.startswith(hosted) and label in connector.tool_servers:
                return connector.find(label, None, {}, PARAM)
    return None


def is_replaced(kind: str, toolbox: Toolbox | None) -> bool:
    """Whether a server of the operator stands for a hosted tool."""
    labels = [label for hosted, names in STAND_INS.items() if kind.startswith(hosted) for label in names]
    servers = {} if toolbox is None else toolbox.servers
    return any(label in servers and servers[label].is_of_operator for label in labels)


def requested_servers(tools: Iterable[Any], items: Iterable[Any], connector: McpConnector) -> list[McpServer]:
    """The MCP servers that the tools of a request name, with what its input says about their tools."""
    known = {item.server_label: item.listed() for item in items if isinstance(item, McpListToolsItem) and item.tools}
    servers: list[McpServer] = []
    for tool in tools:
        server = tool.server(connector) if isinstance(tool, McpServerTool) else stand_in(tool.type, connector)
        if server is None or (not isinstance(tool, McpServerTool) and server in servers):
            continue
        servers.append(replace(server, listed=known.get(server.label)))
    return servers


def approved_calls(items: Sequence[Any]) -> list[McpApprovalRequestItem]:
    """The calls that the input approves and that were not made yet."""
    requests = {item.id: item for item in items if isinstance(item, McpApprovalRequestItem)}
    made = {getattr(item, "approval_request_id", None) for item in items if item.type == "mcp_call"}
    approved = []
    for item in items:
        if not isinstance(item, McpApprovalResponseItem):
            continue
        request = requests.get(item.approval_request_id)
        if request is None:
            what = f"the approval request {item.approval_request_id[:100]!r}"
            raise InvalidRequestError(f"input: {what} is not there; send it too, or previous_response_id", "input")
        if item.approve and request.id not in made:
            approved.append(request)
    return approved


def without_secrets(tool: Mapping[str, Any]) -> JsonObject:
    """A tool as the response repeats it."""
    return {name: value for name, value in tool.items() if name not in ("headers", "authorization")}
