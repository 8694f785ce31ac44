"""The body of /v1/responses, and its translation into a chat."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError, NotSupportedYetError, ResponseNotFoundError
from lightserve.httpserver.chat.request import MAX_MESSAGES, MAX_TOOLS, ToolFunction
from lightserve.httpserver.chat.translation import TextOrParts, TranslatedChat, tools_of_type, translate_chat
from lightserve.httpserver.fields.generation import NewTokens, Share
from lightserve.httpserver.fields.grammar import Schema
from lightserve.httpserver.fields.thinking import Budget
from lightserve.httpserver.wire.body import Body, JsonObject, at_most, validate

MEDIA = frozenset({"input_image", "input_file", "input_audio"})
KINDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
MAX_ITEMS = 4096  # several items may become one message
MAX_INCLUDED = 64
MAX_METADATA = 16  # OpenAI's limit, as are the lengths
LOGPROBS = "message.output_text.logprobs"

Text = Annotated[str, TextOrParts("input", MEDIA, KINDS)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA),
]


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class CallItem(Body):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    arguments: str


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Text


class ReasoningText(Body):
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None


def _item_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "item_reference":
        raise InvalidRequestError("input: an item_reference is not possible, this server stores no responses", "input")
    if isinstance(value, dict) and kind is None:
        return "message"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_kind,
        custom_error_type="item",
        custom_error_message="an item must be a message, function_call, function_call_output or reasoning",
    ),
]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)],
    BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
]


class FunctionTool(ToolFunction):
    type: Literal["function"]


Tool = Annotated[FunctionTool, BeforeValidator(tools_of_type("function"), json_schema_input_type=FunctionTool)]

_MODES = ("auto", "none", "required")
_NAMED = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
}


def _tool_choice(value: Any) -> Any:
    """As the tool_choice of a chat."""
    if value is None or (isinstance(value, str) and value in _MODES):
        return value
    match value:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise PydanticCustomError(
        "tool_choice", "must be auto, none, required, or an object with the type function and the name of the function"
    )


ToolChoice = Annotated[
    Any, PlainValidator(_tool_choice), WithJsonSchema({"anyOf": [{"enum": [*_MODES]}, _NAMED, {"type": "null"}]})
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def to_openai(self) -> JsonObject:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"schema": self.schema_, "strict": self.strict}}


class TextConfig(Body):
    format: TextFormat | None = None


class ReasoningConfig(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    max_tokens: Budget | None = None


class ResponsesBody(Body):
    input: Items
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None


class ResponsesChat(TranslatedChat):
    format_name: ClassVar[str] = "text.format"


def validate_responses(value: JsonObject) -> ResponsesBody:
    body = validate(ResponsesBody, value)
    if body.previous_response_id is not None:
        raise ResponseNotFoundError(body.previous_response_id, "previous_response_id")
    for name in ("background", "conversation", "prompt"):
        if value.get(name):
            raise NotSupportedYetError(name, name)
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        raise NotSupportedYetError("the log probabilities of a response", "top_logprobs")
    return body


def to_chat(body: ResponsesBody) -> ResponsesChat:
    text_format = None if body.text is None else body.text.format
    fields = {
        "model": body.model,
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if text_format is None else text_format.to_openai(),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "max_reasoning_tokens": None if body.reasoning is None else body.reasoning.max_tokens,
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
        "stream": body.stream,
        "user": body.user,
    }
    return translate_chat(ResponsesChat, fields, body.model_extra)


def _tool(tool: FunctionTool) -> JsonObject:
    return {"type": "function", "function": tool.model_dump(exclude_unset=True, exclude={"type"})}


def _messages(body: ResponsesBody) -> list[JsonObject]:
    builder = _MessageBuilder()
    if body.instructions:
        builder.append("system", body.instructions)
    for item in body.input:
        builder.add(item)
    if not builder.messages:
        raise InvalidRequestError("input: it has no message", "input")
    if len(builder.messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"input: {len(builder.messages)} messages; the limit is {MAX_MESSAGES}", "input")
    return builder.messages


class _MessageBuilder:
    """Joins the reasoning, text and calls of one turn of the assistant into one message."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self._reasoning = ""  # for the next message of the assistant
        self._takes_calls = False  # the last message is an assistant message

    def add(self, item: MessageItem | CallItem | CallOutputItem | ReasoningItem) -> None:
        match item:
            case MessageItem():
                self.append(item.role, item.content)
            case CallItem():
                self._call(item)
            case CallOutputItem():
                self.append("tool", item.output, tool_call_id=item.call_id)
            case ReasoningItem():
                self._reasoning += "".join(part.text for part in item.content or ())

    def append(self, role: str, content: str | None, **fields: Any) -> None:
        self._takes_calls = role == "assistant"
        if self._takes_calls and self._reasoning:
            fields["reasoning_content"] = self._reasoning
        self._reasoning = ""
        self.messages.append({"role": role, "content": content, **fields})

    def _call(self, item: CallItem) -> None:
        if not self._takes_calls or self._reasoning:
            self.append("assistant", None, tool_calls=[])
        function = {"name": item.name, "arguments": item.arguments}
        self.messages[-1].setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )
