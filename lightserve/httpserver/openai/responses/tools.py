"""The tools of /v1/responses, as the functions that the model gets.

A chat has no namespaces. So the tools of a namespace become tools whose names begin with the namespace. Their calls are
turned back: see response.py.
This server calls tools of MCP servers. It leaves other hosted tools out and says so in the response, because agents
always send some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.chat.tools import MAX_TOOLS, ToolFunction, ToolName
from lightserve.httpserver.http.body import Body, JsonObject
from lightserve.httpserver.openai.responses.mcp import McpServerTool, is_replaced
from lightserve.mcp.toolbox import Toolbox
from lightserve.mcp.tools import function_name as mcp_function_name

DEFAULT_NAMESPACE = "functions"  # of tools without a namespace, in OpenAI's models and in Codex
NAMESPACE_SEPARATOR = "__"
HOSTED, MCP = "hosted", "mcp"
_MODES = ("auto", "none", "required")


class FunctionTool(ToolFunction):
    type: Literal["function"]


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    def to_chat(self) -> JsonObject:
        if self.type == "text" or not self.definition:
            return {"type": "text"}
        return {"type": "grammar", "grammar": {"syntax": self.syntax or "lark", "definition": self.definition}}


class CustomTool(Body):
    """A tool whose input is any text, such as Codex's apply_patch."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class HostedTool(Body):
    """A tool that OpenAI's servers run, such as web_search."""

    type: str


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    return kind if kind in ("function", "custom", "namespace", MCP) else HOSTED


NamespacedTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")],
    Discriminator(
        _kind, custom_error_type="tool", custom_error_message="a tool of a namespace must be of type function or custom"
    ),
]


class NamespaceTool(Body):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[NamespacedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


_HOSTED = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "not": {"enum": ["function", "custom", "namespace", MCP]}}},
}
Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[McpServerTool, Tag(MCP)]
    | Annotated[HostedTool, Tag(HOSTED), WithJsonSchema(_HOSTED)],
    Discriminator(_kind, custom_error_type="tool", custom_error_message="a tool must be an object with a type"),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class ToolId:
    """What a call of a tool names."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function_name(self) -> str:
        """The name of the function that the model gets."""
        return function_name(self.name, self.namespace)


def function_name(name: str, namespace: str | None) -> str:
    if not namespace or namespace == DEFAULT_NAMESPACE:
        return name
    separator = "" if namespace.endswith("_") else NAMESPACE_SEPARATOR  # Codex: mcp__server__
    return f"{namespace}{separator}{name}"


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that the model gets."""

    chat_tools: list[JsonObject]
    ids: dict[str, ToolId]  # by the name of the function
    hosted: list[str]  # types of the tools that are left out


def offered_tools(tools: Iterable[Tool], choice: AllowedTools | None, toolbox: Toolbox | None = None) -> OfferedTools:
    """``choice``: only these tools. The model does not see the others, so that it cannot call them. ``toolbox``: of
    the MCP servers among ``tools``."""
    offered = OfferedTools([], {}, [])
    for tool, namespace in _flattened(tools):
        if isinstance(tool, HostedTool):
            if not is_replaced(tool.type, toolbox):
                offered.hosted.append(tool.type)
            continue
        tool_id = ToolId(tool.name, namespace, isinstance(tool, CustomTool))
        if choice is None or tool_id.function_name in choice.names:
            offered.chat_tools.append(_chat_tool(tool, tool_id.function_name))
            offered.ids[tool_id.function_name] = tool_id
    mcp_tools = {} if toolbox is None else toolbox.tools
    for name, definition in {} if toolbox is None else toolbox.definitions.items():
        if choice is None or name in choice.names or mcp_tools[name].label in choice.labels:
            offered.chat_tools.append(definition)
    if choice is not None and choice.names - offered.ids.keys() - mcp_tools.keys():
        missing = min(choice.names - offered.ids.keys() - mcp_tools.keys())
        raise InvalidRequestError(f"tool_choice.tools: {missing[:100]!r} is not in tools", "tool_choice")
    return offered


def _flattened(tools: Iterable[Tool]) -> Iterator[tuple[FunctionTool | CustomTool | HostedTool, str | None]]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from ((inner_tool, tool.name) for inner_tool in tool.tools)
        elif not isinstance(tool, McpServerTool):
            yield tool, None


def _chat_tool(tool: FunctionTool | CustomTool, name: str) -> JsonObject:
    if isinstance(tool, FunctionTool):
        given = tool.model_dump(exclude_unset=True, exclude={"type", "defer_loading"})
        return {"type": "function", "function": given | {"name": name}}
    tool_format = None if tool.format is None else tool.format.to_chat()
    return {"type": "custom", "custom": {"name": name, "description": tool.description, "format": tool_format}}


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """tool_choice of the type allowed_tools: only these may be called."""

    names: frozenset[str]  # of functions that the model gets
    mode: Literal["auto", "required"]
    labels: frozenset[str] = frozenset()  # of MCP servers, all of whose tools may be called


def _tool_choice(value: Any) -> Any:
    """As the tool_choice of a chat, or AllowedTools."""
    if value is None or (isinstance(value, str) and value in _MODES):
        return value
    match value:
        case {"type": "function" | "custom", "name": str(name)}:
            return {"type": "function", "function": {"name": function_name(name, _namespace(value))}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return AllowedTools(frozenset(_allowed_names(tools)), mode, frozenset(_allowed_labels(tools)))
        case {"type": "mcp", "server_label": str(label), "name": str(name)}:
            return {"type": "function", "function": {"name": mcp_function_name(label, name)}}
        case {"type": "mcp", "server_label": str(label)} if value.get("name") is None:
            return AllowedTools(frozenset(), "required", frozenset({label}))
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise InvalidRequestError(f"tool_choice: this server does not run {kind[:100]!r}", "tool_choice")
    raise PydanticCustomError(
        "tool_choice",
        "must be auto, none, required, or an object: of type function or custom with a name, or of type allowed_tools"
        " with a mode (auto, required) and a list of tools",
    )


def _allowed_names(tools: list[Any]) -> Iterator[str]:
    """Hosted tools have no name: they are left out of tools too."""
    for tool in tools[:MAX_TOOLS]:
        match tool:
            case {"type": "function" | "custom", "name": str(name)}:
                yield function_name(name, _namespace(tool))
            case {"type": "mcp", "server_label": str(label), "name": str(name)}:
                yield mcp_function_name(label, name)
            case {"type": str(kind)} if kind not in ("function", "custom"):
                continue
            case _:
                raise PydanticCustomError("tool_choice", "a tool must have a type, and a name unless it is hosted")


def _allowed_labels(tools: list[Any]) -> Iterator[str]:
    for tool in tools[:MAX_TOOLS]:
        match tool:
            case {"type": "mcp", "server_label": str(label)} if not isinstance(tool.get("name"), str):
                yield label


def _namespace(value: JsonObject) -> str | None:
    namespace = value.get("namespace")
    return namespace if isinstance(namespace, str) else None


_STRING: JsonObject = {"type": "string"}
_NAMED: JsonObject = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"enum": ["function", "custom"]}, "name": _STRING},
}
_MCP_CHOICE: JsonObject = {
    "type": "object",
    "required": ["type", "server_label"],
    "properties": {"type": {"const": "mcp"}, "server_label": _STRING, "name": {"type": ["string", "null"]}},
}
_HOSTED_CHOICE: JsonObject = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "not": {"enum": ["function", "custom"]}}},
}
_ALLOWED: JsonObject = {
    "type": "object",
    "required": ["type", "mode", "tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "maxItems": MAX_TOOLS, "items": {"anyOf": [_NAMED, _HOSTED_CHOICE]}},
    },
}
ToolChoice = Annotated[
    Any,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": [*_MODES]}, _NAMED, _MCP_CHOICE, _ALLOWED, {"type": "null"}]}),
]
