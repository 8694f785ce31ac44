"""The bodies of /v1/messages and /v1/messages/count_tokens, and their translation into a chat."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.anthropic.blocks import SYSTEM_TEXT, join_system
from lightserve.httpserver.anthropic.conversation import Conversation, Message, found_tools
from lightserve.httpserver.anthropic.mcp import McpServers, requested_servers
from lightserve.httpserver.anthropic.tools import Tool, ToolChoice, chat_tools, deferred_functions, hosted_tools
from lightserve.httpserver.chat.request import MAX_MESSAGES
from lightserve.httpserver.chat.tools import MAX_TOOLS, Tool as ChatTool
from lightserve.httpserver.chat.translation import OTHER_FIELDS, TranslatedChat, translate_chat
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.generation import NewTokens, Share
from lightserve.httpserver.fields.shared import MAX_STOP_STRINGS, StopString
from lightserve.httpserver.http.body import Body, JsonObject, at_most
from lightserve.mcp.servers import McpConnector, McpServer
from lightserve.mcp.toolbox import Toolbox
from lightserve.model_files.template.budget import ON_EVENT_LOOP
from lightserve.model_files.template.chat_template import NOTHING
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

MAX_METADATA = 64
HOSTED_FIELDS = ("container",)  # of hosted tools
LATE_SYSTEM = "[[a late system message]]"

SystemText = Annotated[
    str,
    BeforeValidator(join_system),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": SYSTEM_TEXT}]}),
]


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

    other_fields: ClassVar[frozenset[str]] = OTHER_FIELDS.union(HOSTED_FIELDS)

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: SystemText | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    mcp_servers: McpServers | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the name of output_config.format in earlier versions

    def prompt_fields(self, takes_late_system: bool, toolbox: Toolbox | None = None) -> JsonObject:
        """The same as fields of a chat. ``toolbox``: of the MCP servers."""
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        tools = chat_tools(self.tools or (), found_tools(self.messages))
        messages = Conversation(self.system, self.messages, deferred_functions(tools), takes_late_system).to_chat()
        output_format = config.format or self.output_format
        return {
            "model": self.model,
            "messages": messages,
            # a last message of the assistant is the beginning of the output
            "continue_final_message": messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
            "tools": [*tools, *({} if toolbox is None else toolbox.definitions.values())] or None,
            "tool_choice": None if choice is None else choice.to_openai(self.tools or ()),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "reasoning_effort": config.effort,
            "response_format": None if output_format is None else output_format.to_openai(),
            **_thinking_fields(self.thinking, (self.model_extra or {}).get("chat_template_kwargs")),
        }

    def servers(self, connector: McpConnector) -> list[McpServer]:
        """The MCP servers whose tools this server calls."""
        return requested_servers(self.mcp_servers or (), self.tools or (), connector)

    def hosted_fields(self) -> list[str]:
        """What only Anthropic's servers can do, and what this server therefore leaves out."""
        fields = [name for name in HOSTED_FIELDS if (self.model_extra or {}).get(name)]
        return [*hosted_tools(self.tools or ()), *fields]


class MessagesBody(PromptBody):
    max_tokens: NewTokens
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    metadata: Annotated[dict[str, Any], at_most(MAX_METADATA)] | None = None
    context_management: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    stream: bool | None = None


class MessagesChat(TranslatedChat):
    format_name: ClassVar[str] = "output_config.format"
    budget_is_hint: ClassVar[bool] = True  # clients send a budget to any model

    @property
    def prompt_tools(self) -> list[ChatTool]:
        """Without the tools whose definition is in the result of a tool search."""
        return [tool for tool in self.offered_tools if not (tool.model_extra or {}).get("defer_loading")]

    def new_tokens_within(self, room: int) -> int | None:
        """At most the rest of the context: agents set the largest max_tokens of Anthropic's models."""
        return self.new_tokens if self.new_tokens is None or room < 1 else min(self.new_tokens, room)


def to_prompt_chat(context: ServerContext, body: PromptBody) -> MessagesChat:
    return translate_chat(MessagesChat, body.prompt_fields(_takes_late_system(context)), body.model_extra)


def to_chat(context: ServerContext, body: MessagesBody, toolbox: Toolbox | None = None) -> MessagesChat:
    fields = {
        **body.prompt_fields(_takes_late_system(context), toolbox),
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stream": body.stream,
    }
    return translate_chat(MessagesChat, fields, body.model_extra)


def log_hosted(body: PromptBody, request_id: str) -> None:
    left_out = body.hosted_fields()
    if left_out:
        logger.info("%s: left out, only Anthropic's servers have it: %s", request_id, ", ".join(left_out)[:200])


def _takes_late_system(context: ServerContext) -> bool:
    tokenizer = context.optional_tokenizer
    return tokenizer is None or not tokenizer.has_chat_template or _shows_late_system(tokenizer)


@lru_cache(maxsize=4)
def _shows_late_system(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows a system message after a message of the user. Some refuse it, some drop it."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": LATE_SYSTEM}]
    try:
        template = tokenizer.choose_template(has_tools=False, has_documents=False)
        return LATE_SYSTEM in template.render(ON_EVENT_LOOP, messages=messages, **NOTHING, add_generation_prompt=True)
    except InvalidRequestError:
        return False


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
