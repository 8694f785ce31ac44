"""The body of a chat: OpenAI's fields, with what vLLM and LightLLM users add to them.

The other chat APIs translate their bodies into this one. Every field may be null, which means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError, TextOnlyError
from lightserve.httpserver.chat.template_fields import TemplateFields
from lightserve.httpserver.chat.tools import (
    FUNCTION_OR_CUSTOM,
    INPUT,
    MAX_TOOLS,
    AllowedTools,
    NamedTool,
    Tool,
    ToolChoice,
    required_for,
)
from lightserve.httpserver.fields.generation import GenerationBody, TopLogprobs
from lightserve.httpserver.http.body import Body

MAX_MESSAGES = 2048
MAX_TOOL_CALLS = 128  # of one message
PART_SEPARATOR = "\n"  # between the text parts of a message, as in vLLM and LightLLM
MEDIA = frozenset(
    {"image_url", "image", "input_image", "input_audio", "audio_url", "audio", "video_url", "video", "file"}
)

# the usual roles are system, developer, user, assistant, tool and function; a template may know others
Role = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]

_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}, {"type": "null"}]}


def _join_parts(value: Any) -> Any:
    """Text parts as one text; the type check handles any value but a list."""
    if not isinstance(value, list):
        return value
    if not value:
        raise PydanticCustomError("content", "a list of parts must not be empty")
    return PART_SEPARATOR.join(map(_part_text, value))


def _part_text(content_part: Any) -> str:
    kind = content_part.get("type") if isinstance(content_part, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise TextOnlyError(f"a message part of type {kind!r}", "messages")
    if kind != "text" or not isinstance(content_part.get("text"), str):
        raise PydanticCustomError("part", "a part must have the type 'text' and a string as text")
    text: str = content_part["text"]
    return text


class Function(Body):
    name: str
    arguments: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = None  # JSON, or the object itself


class CustomCall(Body):
    name: str
    input: str


class ToolCall(Body):
    model_config = ConfigDict(json_schema_extra=FUNCTION_OR_CUSTOM)

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: Annotated[Function | None, required_for("function", None)] = Field(default=None, validate_default=True)
    custom: Annotated[CustomCall | None, required_for("custom")] = Field(default=None, validate_default=True)

    @property
    def called(self) -> Function:
        """The call of a function that the model wrote."""
        if self.type == "custom" and self.custom is not None:
            return Function(name=self.custom.name, arguments={INPUT: self.custom.input})
        assert self.function is not None  # required_for
        return self.function


_HAS_CONTENT: JsonDict = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_HAS_CALLS: JsonDict = {
    "required": ["tool_calls"],
    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
}
_IS_TOOL_RESULT: JsonDict = {
    "if": {"properties": {"role": {"const": "tool"}}},
    "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string", "minLength": 1}}},
}


class Message(Body):
    model_config = ConfigDict(json_schema_extra={"anyOf": [_HAS_CONTENT, _HAS_CALLS], **_IS_TOOL_RESULT})

    role: Role
    content: Annotated[str | None, BeforeValidator(_join_parts), WithJsonSchema(_CONTENT)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "content must be a string or text parts")
        if self.role == "tool" and not self.tool_call_id:
            raise PydanticCustomError("tool_call_id", "a message of the role 'tool' needs its tool_call_id")
        return self


class ChatBody(GenerationBody, TemplateFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # vLLM's: the response begins with the last message if that is the assistant's too
    separate_reasoning: bool | None = None  # false: it stays in the content
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @property
    def echoed_text(self) -> str:
        """The text before the output."""
        last = self.messages[-1]
        return last.content or "" if self.echo and last.role == "assistant" else ""

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        if self.tools is None or self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in self.tools if tool.definition.name in self.tool_choice.names]
        return self.tools

    @property
    def prompt_tools(self) -> list[Tool]:
        """The tools that the chat template shows."""
        return self.offered_tools

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which the model must call one."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.definition.name == self.tool_choice.name]
        mode = self.tool_choice.mode if isinstance(self.tool_choice, AllowedTools) else self.tool_choice
        return self.offered_tools if mode == "required" else []

    @property
    def max_tool_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool) else None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs: only with logprobs: true", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequestError(message, "continue_final_message")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.definition.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequestError("tools: two tools have the same name", "tools")
        if isinstance(self.tool_choice, AllowedTools):
            self._check_allowed(self.tool_choice.names, names)
        elif self.tool_choice not in (None, "auto", "none") and not self.forced_tools:
            name = f" {self.tool_choice.name[:100]!r}" if isinstance(self.tool_choice, NamedTool) else ""
            raise InvalidRequestError(f"tool_choice: the required tool{name} is not in tools", "tool_choice")

    def _check_allowed(self, allowed: list[str], known: list[str]) -> None:
        unknown = [name for name in allowed if name not in known]
        if unknown or not allowed:
            problem = f"{unknown[0][:100]!r} is not in tools" if unknown else "no tool is allowed"
            raise InvalidRequestError(f"tool_choice: {problem}", "tool_choice")
