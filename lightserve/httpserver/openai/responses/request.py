"""The body of /v1/responses, and its translation into a chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.chat.request import MAX_MESSAGES, Budget
from lightserve.httpserver.chat.translation import OTHER_FIELDS, TranslatedChat, translate_chat
from lightserve.httpserver.fields.generation import NewTokens, Share
from lightserve.httpserver.fields.grammar import Schema
from lightserve.httpserver.http.body import Body, JsonObject, at_most, validate
from lightserve.httpserver.openai.responses.items import AdditionalToolsItem, Items, MessageBuilder
from lightserve.httpserver.openai.responses.tools import (
    AllowedTools,
    OfferedTools,
    Tool,
    ToolChoice,
    Tools,
    offered_tools,
)
from lightserve.mcp.toolbox import Toolbox

MAX_INCLUDED = 64
MAX_METADATA = 16  # OpenAI's limit, as are the lengths
UNSUPPORTED = ("conversation", "prompt")
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA),
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
    other_fields: ClassVar[frozenset[str]] = OTHER_FIELDS.union(UNSUPPORTED)

    input: Items
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of MCP servers
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

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to each token; None: no logprobs."""
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def all_tools(self) -> list[Tool]:
        more_tools = [tool for item in self.input if isinstance(item, AdditionalToolsItem) for tool in item.tools]
        return [*(self.tools or ()), *more_tools]

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())


class ResponsesChat(TranslatedChat):
    format_name: ClassVar[str] = "text.format"

    @property
    def new_tokens_field(self) -> str:
        return "max_output_tokens"


@dataclass(frozen=True, slots=True)
class ResponsesTranslation:
    chat: ResponsesChat
    tools: OfferedTools
    ignored: list[JsonObject]  # what the model does not get: {"param", "type", "reason"} for the response


def validate_responses(value: JsonObject) -> ResponsesBody:
    body = validate(ResponsesBody, value)
    for name in UNSUPPORTED:
        if value.get(name):
            raise NotSupportedYetError(name, name)
    return body


def translate_responses(
    body: ResponsesBody, reads_images: bool = False, toolbox: Toolbox | None = None
) -> ResponsesTranslation:
    """``reads_images``: the model does. ``toolbox``: of the MCP servers among the tools."""
    builder = _build_messages(body, reads_images)
    allowed = body.tool_choice if isinstance(body.tool_choice, AllowedTools) else None
    tools = offered_tools(body.all_tools, allowed, toolbox)
    text_format = None if body.text is None else body.text.format
    fields = {
        "model": body.model,
        "messages": builder.messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": tools.chat_tools or None,
        "tool_choice": body.tool_choice if allowed is None else allowed.mode,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if text_format is None else text_format.to_openai(),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "max_reasoning_tokens": None if body.reasoning is None else body.reasoning.max_tokens,
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
        "stream": body.stream,
        "user": body.user,
    }
    chat = translate_chat(ResponsesChat, fields, body.model_extra)
    return ResponsesTranslation(chat, tools, [*_ignored_tools(tools), *_ignored_items(builder)])


def _ignored_tools(tools: OfferedTools) -> list[JsonObject]:
    reason = "this server does not run hosted tools but those of MCP servers; the model was not given this tool"
    return [{"param": "tools", "type": kind, "reason": reason} for kind in tools.hosted]


def _ignored_items(builder: MessageBuilder) -> list[JsonObject]:
    reason = "the item has no text that the model could read"
    return [{"param": f"input[{index}]", "type": kind, "reason": reason} for index, kind in builder.left_out]


def _build_messages(body: ResponsesBody, reads_images: bool) -> MessageBuilder:
    builder = MessageBuilder(reads_images)
    if body.instructions:
        builder.append("system", body.instructions)
    builder.add_all(body.input)
    if not builder.messages:
        raise InvalidRequestError("input: it has no message", "input")
    if len(builder.messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"input: {len(builder.messages)} messages; the limit is {MAX_MESSAGES}", "input")
    return builder
