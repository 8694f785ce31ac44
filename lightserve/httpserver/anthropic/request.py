"""The bodies of /v1/messages and /v1/messages/count_tokens, and their translation into a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.chat.request import MAX_MESSAGES, MAX_TOOLS, PART_SEPARATOR, ToolName
from lightserve.httpserver.chat.translation import TextOrParts, TranslatedChat, tools_of_type, translate_chat
from lightserve.httpserver.fields.generation import NewTokens, Share
from lightserve.httpserver.fields.stopping import MAX_STOP_STRINGS, StopString
from lightserve.httpserver.wire.body import Body, JsonObject, at_most

MEDIA = frozenset({"image", "document", "search_result"})
MAX_BLOCKS = 1024  # of one message
MAX_METADATA = 64

SystemText = Annotated[str, TextOrParts("system", MEDIA, {"text": "text"})]
ResultText = Annotated[str, TextOrParts("messages", MEDIA, {"text": "text"})]


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: ResultText | None = None
    is_error: bool | None = None


def _block_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise NotSupportedYetError(f"a content block of type {kind!r}", "messages")
    return kind if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _block_kind,
        custom_error_type="block",
        custom_error_message="a content block must be text, tool_use, tool_result or thinking",
    ),
]


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Blocks = Annotated[
    Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True)],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        for block in self.content:
            if isinstance(block, ToolUseBlock) and self.role != "assistant":
                raise PydanticCustomError("role", "tool_use is only allowed in a message of the assistant")
            if isinstance(block, ToolResultBlock) and self.role != "user":
                raise PydanticCustomError("role", "tool_result is only allowed in a message of the user")
        return self


class CustomTool(Body):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


Tool = Annotated[CustomTool, BeforeValidator(tools_of_type("custom"), json_schema_input_type=CustomTool)]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_openai(self) -> str | JsonObject:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def to_openai(self) -> JsonObject:
        return {"type": "json_schema", "json_schema": {"schema": self.schema_}}


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None


class PromptBody(Body):
    """The fields that make the prompt: the body of count_tokens."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: SystemText | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def prompt_fields(self) -> JsonObject:
        """The same as fields of a chat."""
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        return {
            "model": self.model,
            "messages": _messages(self),
            "continue_final_message": _is_prefill(self.messages[-1]),
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.to_openai(),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "reasoning_effort": config.effort,
            "response_format": None if config.format is None else config.format.to_openai(),
            **_thinking_fields(self.thinking, (self.model_extra or {}).get("chat_template_kwargs")),
        }


class MessagesBody(PromptBody):
    max_tokens: NewTokens
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    metadata: Annotated[dict[str, Any], at_most(MAX_METADATA)] | None = None
    stream: bool | None = None


class MessagesChat(TranslatedChat):
    format_name: ClassVar[str] = "output_config.format"
    budget_is_hint: ClassVar[bool] = True  # clients send a budget to any model


def refuse_unsupported(value: JsonObject) -> None:
    for name in ("container", "mcp_servers"):
        if value.get(name):
            raise NotSupportedYetError(name, name)


def to_prompt_chat(body: PromptBody) -> MessagesChat:
    return translate_chat(MessagesChat, body.prompt_fields, body.model_extra)


def to_chat(body: MessagesBody) -> MessagesChat:
    fields = {
        **body.prompt_fields,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stream": body.stream,
    }
    return translate_chat(MessagesChat, fields, body.model_extra)


def _thinking_fields(thinking: Thinking | None, given: Any) -> JsonObject:
    """The variables that Qwen's and DeepSeek's templates know, unless the client sets them; budget and display."""
    if thinking is None or thinking.type not in ("enabled", "disabled"):
        variables = given
    else:
        is_enabled = thinking.type == "enabled"
        variables = {"enable_thinking": is_enabled, "thinking": is_enabled, **(given or {})}
    budget = None if thinking is None or thinking.type == "disabled" else thinking.budget_tokens
    include = None if thinking is None or thinking.display != "omitted" else False
    return {"chat_template_kwargs": variables, "include_reasoning": include, "thinking_budget": budget}


def _tool(tool: CustomTool) -> JsonObject:
    given = tool.model_dump(include={"name", "description", "strict"}, exclude_unset=True)
    return {"type": "function", "function": {**given, "parameters": tool.input_schema}}


def _is_prefill(last: Message) -> bool:
    """A last message of the assistant is the beginning of the output."""
    return last.role == "assistant" and not any(isinstance(block, ToolUseBlock) for block in last.content)


def _messages(body: PromptBody) -> list[JsonObject]:
    messages: list[JsonObject] = [{"role": "system", "content": body.system}] if body.system else []
    for message in body.messages:
        if message.role == "assistant":
            messages.append(_assistant_message(message.content))
        else:
            messages += _other_messages(message.role, message.content)
    if not messages:
        raise InvalidRequestError("messages: no content in any message", "messages")
    return messages


def _assistant_message(blocks: Sequence[Block]) -> JsonObject:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    content = PART_SEPARATOR.join(texts) if texts or not calls else None
    message = {"role": "assistant", "content": content, "reasoning_content": PART_SEPARATOR.join(reasoning) or None}
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: ToolUseBlock) -> JsonObject:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _other_messages(role: str, blocks: Sequence[Block]) -> list[JsonObject]:
    """Texts and tool results in their order; adjacent texts are one message."""
    messages: list[JsonObject] = []
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            messages += _text(role, texts)
            texts = []
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content or ""})
    return messages + _text(role, texts)


def _text(role: str, texts: list[str]) -> list[JsonObject]:
    return [{"role": role, "content": PART_SEPARATOR.join(texts)}] if texts else []
