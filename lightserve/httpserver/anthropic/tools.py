"""The tools of /v1/messages.

Three kinds: tools with a schema, tools that the client runs and whose schema Anthropic documents, and hosted tools.
This server calls tools of MCP servers. It cannot run other hosted tools: it leaves them out of the prompt and logs
that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.anthropic.mcp import McpToolset
from lightserve.httpserver.chat.tools import ToolName
from lightserve.httpserver.http.body import Body, JsonObject

_DATE = "(_[0-9]{8})?$"
MAX_EXAMPLES = 128  # of one tool
HOSTED = ("web_search", "web_fetch", "code_execution", "advisor", "tool_search_tool_regex", "tool_search_tool_bm25")
NEEDS_IMAGES = ("computer_", "browser_")

_PATH = {"type": "string", "description": "Path of a file or directory"}
_EDITS: JsonObject = {
    "path": _PATH,
    "file_text": {"type": "string", "description": "Content of the new file, for create"},
    "old_str": {"type": "string", "description": "Text to replace, for str_replace; it must occur exactly once"},
    "new_str": {"type": "string", "description": "Replacement, for str_replace"},
    "insert_line": {"type": "integer", "description": "Line after which to insert, for insert; 0: the beginning"},
    "insert_text": {"type": "string", "description": "Text to insert, for insert"},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "First and last line to show, for view; -1: the end",
    },
}


def _commands(*names: str, **more: JsonObject) -> JsonObject:
    command = {"type": "string", "enum": names}
    return {"type": "object", "properties": {"command": command, **_EDITS, **more}, "required": ["command"]}


# what Anthropic's documentation says about the tools that a client runs
CLIENT_TOOLS: dict[str, tuple[str, JsonObject]] = {
    "bash": (
        "Run a command in a persistent bash session.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command to run; required unless restart is true"},
                "restart": {"type": "boolean", "description": "true: restart the session"},
            },
        },
    ),
    "text_editor": ("View, create and edit text files.", _commands("view", "create", "str_replace", "insert")),
    "memory": (
        "Read and write files in /memories, which are kept between conversations.",
        _commands("view", "create", "str_replace", "insert", "delete", "rename", old_path=_PATH, new_path=_PATH),
    ),
}


# editors of before Claude 4 can undo, and insert new_str
OLD_EDITORS = ("text_editor_20241022", "text_editor_20250124")
OLD_EDITOR_SCHEMA = _commands("view", "create", "str_replace", "insert", "undo_edit")
del OLD_EDITOR_SCHEMA["properties"]["insert_text"]


class CustomTool(Body):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Field(max_length=MAX_EXAMPLES, fail_fast=True)] | None = None

    def function(self) -> JsonObject:
        given = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        if self.input_examples:
            examples = "\n".join([json_text(example, "tools") for example in self.input_examples])
            given["description"] = f"{self.description or ''}\nExamples of input:\n{examples}".lstrip()
        return {**given, "parameters": self.input_schema}


class ClientTool(Body):
    type: Annotated[str, Field(pattern=f"^({'|'.join(CLIENT_TOOLS)}){_DATE}")]
    name: ToolName
    defer_loading: bool | None = None

    def function(self) -> JsonObject:
        kind = next(kind for kind in CLIENT_TOOLS if self.type.startswith(kind))
        description, schema = CLIENT_TOOLS[kind]
        parameters = OLD_EDITOR_SCHEMA if self.type in OLD_EDITORS else schema
        return {"name": self.name, "description": description, "parameters": parameters}


class HostedTool(Body):
    type: Annotated[str, Field(pattern=f"^({'|'.join(HOSTED)}){_DATE}")]
    name: str | None = None


def _kind_of(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind == "custom":
        return "custom"
    if kind.startswith(NEEDS_IMAGES):
        raise NotSupportedYetError(f"a tool of type {kind[:100]!r}, whose results are images,", "tools")
    if kind.startswith(HOSTED):
        return "hosted"
    if kind == "mcp_toolset":
        return kind
    return "client" if kind.startswith(tuple(CLIENT_TOOLS)) else None


Tool = Annotated[
    Annotated[CustomTool, Tag("custom")]
    | Annotated[ClientTool, Tag("client")]
    | Annotated[McpToolset, Tag("mcp_toolset")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(
        _kind_of,
        custom_error_type="tool",
        custom_error_message=f"the type of a tool must be custom, or begin with one of {', '.join(CLIENT_TOOLS)}, "
        f"{', '.join(HOSTED)}, mcp_toolset",
    ),
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_openai(self, tools: Sequence[Tool]) -> str | JsonObject:
        if self.type == "tool":
            self._check_not_hosted(tools)
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type

    def _check_not_hosted(self, tools: Sequence[Tool]) -> None:
        hosted = {tool.name: tool.type for tool in tools if isinstance(tool, HostedTool) and tool.name is not None}
        if self.name in hosted:
            message = f"tool_choice: only Anthropic's servers run {self.name[:100]!r} ({hosted[self.name]})"
            raise InvalidRequestError(message, "tool_choice")


def hosted_tools(tools: Iterable[Tool]) -> list[str]:
    """The types of the tools that are left out."""
    return [tool.type for tool in tools if isinstance(tool, HostedTool)]


def chat_tools(tools: Sequence[Tool], referenced: Collection[str]) -> list[JsonObject]:
    """The tools that the model may call, as a chat has them.

    A tool with ``defer_loading`` is left out until a tool search has found it. Its definition is in the result of that
    search then: in the list of tools, at the beginning of the prompt, it would change the whole prefix.
    """
    has_schema = [tool for tool in tools if isinstance(tool, CustomTool | ClientTool)]
    if not can_defer(tools):
        return [{"type": "function", "function": tool.function()} for tool in has_schema]
    return [
        {"type": "function", "function": tool.function()} | ({"defer_loading": True} if tool.defer_loading else {})
        for tool in has_schema
        if not tool.defer_loading or tool.name in referenced
    ]


def can_defer(tools: Sequence[Tool]) -> bool:
    """Whether tools may be left out of the prompt: the client searches them, and another tool is in the prompt."""
    if any(isinstance(tool, HostedTool) and tool.type.startswith("tool_search_tool") for tool in tools):
        return False  # nobody runs that search
    return any(not tool.defer_loading for tool in tools if isinstance(tool, CustomTool | ClientTool))


def deferred_functions(tools: Iterable[JsonObject]) -> dict[str, JsonObject]:
    """The definitions that tool references show, by their names."""
    return {tool["function"]["name"]: tool["function"] for tool in tools if tool.get("defer_loading")}


def loaded_text(name: str, function: JsonObject | None) -> str:
    """What a tool reference says in the result of a tool search."""
    if function is None:
        return f"The tool {name} is available."
    return f"The tool {name} is available now:\n{json_text({'type': 'function', 'function': function}, 'tools')}"


def json_text(value: Any, param: str, hidden: Collection[str] = ()) -> str:
    """``value`` as JSON, without the ``hidden`` fields of its objects. ``param`` is the field of the request."""
    try:
        return orjson.dumps(_without(value, hidden) if hidden else value).decode()
    except (TypeError, RecursionError) as error:  # a body may have 1,024 levels, and orjson writes 254
        raise InvalidRequestError(f"{param}: a value is nested too deeply to be shown to the model", param) from error


def _without(value: Any, hidden: Collection[str]) -> Any:
    if isinstance(value, list):
        return [_without(item, hidden) for item in value]
    if isinstance(value, dict):
        return {name: _without(item, hidden) for name, item in value.items() if name not in hidden}
    return value
