"""The tools of a chat: what the model may call, and what it must call.

A chat template knows functions only. So a custom tool, whose input is any text, is a function with one string argument
for the model. custom_input.py turns its calls back.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from lightserve.httpserver.http.body import Body, JsonObject

MAX_TOOLS = 1024
INPUT = "input"  # the argument of a custom tool
INPUT_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input of the tool, as one string."}},
    "required": [INPUT],
    "additionalProperties": False,
}

T = TypeVar("T")
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


def required_for(*kinds: str | None) -> AfterValidator:
    """The field must not be null if the ``type`` of the object is one of these."""

    def check(value: T, info: ValidationInfo) -> T:
        if value is None and info.data.get("type", "") in kinds:
            raise PydanticCustomError("missing", "Field required")
        return value

    return AfterValidator(check)


# the schema of a tool or call: the fields that required_for requires
FUNCTION_OR_CUSTOM: JsonDict = {
    "anyOf": [
        {
            "required": ["function"],
            "properties": {"type": {"enum": ["function", None]}, "function": {"type": "object"}},
        },
        {
            "required": ["type", "custom"],
            "properties": {"type": {"const": "custom"}, "custom": {"type": "object"}},
        },
    ]
}


class ToolFunction(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: the tool takes no arguments
    strict: bool | None = None


class CustomGrammar(Body):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"type": {"const": "grammar"}}},
            "then": {"required": ["grammar"], "properties": {"grammar": {"type": "object"}}},
        }
    )

    type: Literal["text", "grammar"]
    grammar: Annotated[CustomGrammar | None, required_for("grammar")] = Field(default=None, validate_default=True)


class CustomDefinition(Body):
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None

    def as_function(self) -> ToolFunction:
        """With the grammar in the description: the input is not constrained by it, so that the model must know it."""
        description = self.description or ""
        grammar = None if self.format is None else self.format.grammar
        if grammar is not None:
            description += f"\n\nThe input must match this {grammar.syntax} grammar:\n{grammar.definition}"
        return ToolFunction(name=self.name, description=description.strip(), parameters=INPUT_SCHEMA)


class Tool(Body):
    model_config = ConfigDict(json_schema_extra=FUNCTION_OR_CUSTOM)

    type: Literal["function", "custom"] | None = None
    function: Annotated[ToolFunction | None, required_for("function", None)] = Field(
        default=None, validate_default=True
    )
    custom: Annotated[CustomDefinition | None, required_for("custom")] = Field(default=None, validate_default=True)

    @property
    def is_custom(self) -> bool:
        return self.type == "custom"

    @cached_property
    def definition(self) -> ToolFunction:
        """The function that the model gets."""
        function = self.custom.as_function() if self.is_custom and self.custom is not None else self.function
        assert function is not None  # required_for
        return function


class NamedTool(Body):
    name: str


class AllowedTools(Body):
    """The model gets only these tools."""

    mode: Literal["auto", "required"]
    names: Annotated[list[str], Field(max_length=MAX_TOOLS)]


_MODES = ("auto", "none", "required")
_HAS_NAME: JsonDict = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_NAMED: JsonDict = {
    "type": "object",
    "required": ["function"],
    "properties": {"type": {"const": "function"}, "function": _HAS_NAME},
}
_NAMED_CUSTOM: JsonDict = {
    "type": "object",
    "required": ["type", "custom"],
    "properties": {"type": {"const": "custom"}, "custom": _HAS_NAME},
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
                "tools": {
                    "type": "array",
                    "minItems": 1,
                    "items": {"anyOf": [{**_NAMED, "required": ["type", "function"]}, _NAMED_CUSTOM]},
                },
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
        case {"type": "custom", "custom": {"name": str(name)}}:
            return NamedTool(name=name)
    raise PydanticCustomError(
        "tool_choice",
        "must be auto, none, required, the name of a tool, an object with it, or an object with allowed_tools",
    )


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return name
    raise PydanticCustomError(
        "tool_choice", "an allowed tool must be an object with the type function or custom and its name"
    )


ToolChoice = Annotated[
    str | NamedTool | AllowedTools | None,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {"anyOf": [{"enum": [*_MODES]}, {"type": "string"}, _NAMED, _NAMED_CUSTOM, _ALLOWED, {"type": "null"}]}
    ),
]
