"""The tools of MCP servers, and what their calls return."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from lightserve.errors import McpError

JsonObject = dict[str, Any]

MAX_TOOLS = 512  # of a server
MAX_NAME = 128  # characters of a function's name
MAX_RESULT = 262_144  # characters that the model gets of a result
SEPARATOR = "__"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class McpTool:
    name: str
    description: str | None = None
    input_schema: JsonObject = field(default_factory=dict)
    annotations: JsonObject | None = None

    @property
    def is_read_only(self) -> bool:
        """As its server says."""
        return bool((self.annotations or {}).get("readOnlyHint"))


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Some of the tools of a server."""

    names: frozenset[str] | None = None  # None: all
    excluded: frozenset[str] = frozenset()
    is_read_only: bool | None = None  # None: those that only read, and others

    def matches(self, tool: McpTool) -> bool:
        if tool.name in self.excluded or (self.names is not None and tool.name not in self.names):
            return False
        return self.is_read_only is None or tool.is_read_only == self.is_read_only


ALL_TOOLS = ToolFilter()
NO_TOOLS = ToolFilter(names=frozenset())


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What a call returned: a text for the model, or an error."""

    text: str = ""
    error: JsonObject | None = None  # as in an mcp_call item of OpenAI: it has a type

    @property
    def shown_text(self) -> str:
        return self.text if self.error is None else error_text(self.error)


def function_name(label: str, name: str) -> str:
    """The name of the function that the model gets: servers may have tools of one name."""
    return _NOT_IN_NAMES.sub("_", f"{label}{SEPARATOR}{name}")[:MAX_NAME]


def tool_of(value: Any) -> McpTool:
    """An entry of a server's list."""
    match value:
        case {"name": str(name)} if name:
            schema, annotations = value.get("inputSchema"), value.get("annotations")
            description = value.get("description")
            return McpTool(
                name,
                description if isinstance(description, str) else None,
                schema if isinstance(schema, dict) else {"type": "object"},
                annotations if isinstance(annotations, dict) else None,
            )
    raise McpError("an entry of its list of tools has no name")


def outcome_of(result: Any) -> ToolOutcome:
    """Of the result of tools/call."""
    if not isinstance(result, dict):
        raise McpError("the result of the call is not an object")
    content = result.get("content")
    blocks = content if isinstance(content, list) else []
    if result.get("isError"):
        return ToolOutcome(error={"type": "mcp_tool_execution_error", "content": _shortened_blocks(blocks)})
    structured = result.get("structuredContent")
    text = "\n".join(_texts(blocks))
    if not text and structured is not None:
        text = _json(structured)
    return ToolOutcome(_shortened(text))


def failure(error: McpError) -> ToolOutcome:
    details = error.details or {"type": "mcp_protocol_error", "code": -32000, "message": str(error)}
    return ToolOutcome(error=details)


def error_text(error: Any) -> str:
    """Of an error in an mcp_call item; other servers write a string."""
    match error:
        case {"content": list(blocks)}:
            return "\n".join(_texts(blocks)) or "the tool failed without a message"
        case {"message": str(message)}:
            return message
    return str(error)


def _texts(blocks: Iterable[Any]) -> Iterable[str]:
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)} | {"type": "resource", "resource": {"text": str(text)}}:
                yield text
            case {"type": "resource_link", "uri": str(uri)}:
                yield uri
            case {"type": str(kind)}:
                yield f"[{kind[:40]} left out: this server gives the model texts of tools only]"


def _shortened_blocks(blocks: Iterable[Any]) -> list[JsonObject]:
    return [{"type": "text", "text": _shortened("\n".join(_texts(blocks)))}]


def _shortened(text: str) -> str:
    if len(text) <= MAX_RESULT:
        return text
    return f"{text[:MAX_RESULT]}\n[cut: the result has {len(text):,} characters; the limit is {MAX_RESULT:,}]"


def _json(value: Mapping[str, Any] | Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except (TypeError, RecursionError) as error:
        raise McpError("the result of the call is nested too deeply") from error
