"""The tools of a chat: what the model may call, and what it must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from lightserve.httpserver.wire.body import Body

MAX_TOOLS = 1024

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class ToolFunction(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: the tool takes no arguments
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] | None = None
    function: ToolFunction


class NamedTool(Body):
    name: str


class AllowedTools(Body):
    """The model gets only these tools."""

    mode: Literal["auto", "required"]
    names: Annotated[list[str], Field(max_length=MAX_TOOLS)]


_MODES = ("auto", "none", "required")
_FUNCTION: JsonDict = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_NAMED: JsonDict = {
    "type": "object",
    "required": ["function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
_ALLOWED: JsonDict = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "items": {**_NAMED, "required": ["type", "function"]}},
            },
        },
    },
}


def _tool_choice(value: Any) -> str | NamedTool | AllowedTools | None:
    match value:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            return AllowedTools(mode=mode, names=[_allowed_name(tool) for tool in tools])
        case None | "auto" | "none" | "required":
            return value
        case str(name) | {"type": "function", "name": str(name)}:  # TGI's form, and that of OpenAI's Responses
            return NamedTool(name=name)
        case {"function": {"name": str(name)}} if value.get("type") in (None, "function"):
            return NamedTool(name=name)
    raise PydanticCustomError(
        "tool_choice",
        "must be auto, none, required, the name of a function, an object with it, or an object with allowed_tools",
    )


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise PydanticCustomError("tool_choice", "an allowed tool must be an object with the type function and its name")


ToolChoice = Annotated[
    str | NamedTool | AllowedTools | None,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": [*_MODES]}, {"type": "string"}, _NAMED, _ALLOWED, {"type": "null"}]}),
]
