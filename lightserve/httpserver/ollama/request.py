"""The bodies of /api/chat and /api/generate, and their translation into a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.chat.request import MAX_MESSAGES, MAX_TOOL_CALLS
from lightserve.httpserver.chat.tools import MAX_TOOLS, ToolFunction
from lightserve.httpserver.chat.translation import OTHER_FIELDS, TranslatedChat, translate_chat
from lightserve.httpserver.fields.generation import Penalty, Share, TopLogprobs
from lightserve.httpserver.fields.shared import StopStrings
from lightserve.httpserver.http.body import Body, JsonObject

MAX_CONTEXT_IDS = 2**20
MAX_EXACT_FLOAT = 2**53


def _whole_number(value: Any) -> Any:
    """Ollama takes 5.0 as an integer. Larger floats may be rounded, and are refused."""
    is_exact = isinstance(value, float) and abs(value) <= MAX_EXACT_FLOAT and value.is_integer()
    return int(value) if is_exact else value


Whole = BeforeValidator(_whole_number)
Images = Annotated[list[str], Field(max_length=1024, description="base64, before the text")]


class Options(Body):
    """Ollama's other options (num_ctx, num_gpu, mirostat, ...) have no effect here, and unknown ones are accepted."""

    num_predict: Annotated[int, Whole] | None = Field(default=None, description="maximum new tokens; below 1: no limit")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), Whole] | None = None
    top_p: Share | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), Whole] | None = None
    stop: StopStrings = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Whole] | None = Field(default=None, description="0 turns repeat_penalty off")
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    @property
    def chat_fields(self) -> JsonObject:
        same = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")
        penalties = ("presence_penalty", "frequency_penalty")
        return {
            **{name: getattr(self, name) for name in (*same, *penalties)},
            "max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None,
            "repetition_penalty": None if self.repeat_last_n == 0 else self.repeat_penalty,
        }


class CallFunction(Body):
    name: str
    arguments: dict[str, Any] | str | None = None


class ToolCall(Body):
    id: str | None = None
    function: CallFunction


class Message(Body):
    role: Annotated[str, Field(min_length=1)]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_name: str | None = Field(default=None, description="of a message of the role tool")
    tool_call_id: str | None = None


class Tool(Body):
    type: Literal["function"] | None = None
    function: ToolFunction


class GenerationRequest(Body):
    """What /api/chat and /api/generate share."""

    other_fields: ClassVar[frozenset[str]] = OTHER_FIELDS

    model: str | None = None
    stream: bool | None = Field(default=None, description="default true")
    format: Literal["", "json"] | dict[str, Any] | None = Field(default=None, description='"json" or a JSON schema')
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: str | int | float | None = Field(default=None, description="no effect: the model stays loaded")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def is_stream(self) -> bool:
        return self.stream is not False

    @property
    def top_k_logprobs(self) -> int | None:
        """Alternatives to each token; None: no logprobs."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def shared_fields(self) -> JsonObject:
        """The same as fields of a chat. It has no ``model``: names are compared in Ollama's way."""
        return {
            **(self.options or Options()).chat_fields,
            "response_format": _response_format(self.format),
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            **_thinking_fields(self.think, (self.model_extra or {}).get("chat_template_kwargs")),
        }


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        default=None, description="none: the response says that the model is loaded"
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class GenerateRequest(GenerationRequest):
    prompt: str | None = Field(default=None, description="empty: the response says that the model is loaded")
    suffix: str | None = Field(default=None, description="the text after the response")
    system: str | None = None
    template: str | None = Field(default=None, description="refused: a request cannot set it")
    context: Annotated[list[int], Field(max_length=MAX_CONTEXT_IDS, fail_fast=True)] | None = Field(
        default=None, description="the context of an earlier response"
    )
    raw: bool | None = Field(default=None, description="use no chat template")
    images: Images | None = None


class OllamaChat(TranslatedChat):
    format_name: ClassVar[str] = "format"

    def new_tokens_within(self, room: int) -> int | None:
        """Ollama ends a response where the context is full, whatever num_predict is."""
        return None if self.new_tokens is None else min(self.new_tokens, max(room, 1))


def chat_of(body: ChatRequest) -> OllamaChat:
    messages = _messages(body.messages or [])
    last = messages[-1]
    fields = {
        **body.shared_fields,
        "messages": messages,
        "tools": [{"type": "function", "function": tool.function} for tool in body.tools or ()] or None,
        "continue_final_message": True if last["role"] == "assistant" and not last.get("tool_calls") else None,
    }
    return translate_chat(OllamaChat, fields, body.model_extra)


def generation_of(body: GenerateRequest, has_template: bool) -> OllamaChat:
    """Without a template the messages are not used, and the whole output is content."""
    content = _with_images(body.prompt or "", body.images)
    messages: list[JsonObject] = [{"role": "user", "content": content if has_template else ""}]
    if body.system and has_template:
        messages.insert(0, {"role": "system", "content": body.system})
    separate = None if has_template else False
    fields = {**body.shared_fields, "messages": messages, "separate_reasoning": separate}
    return translate_chat(OllamaChat, fields, body.model_extra)


def refuse_unsupported(body: GenerateRequest | ChatRequest) -> None:
    if isinstance(body, ChatRequest):
        return
    if body.images and (body.raw or body.suffix or body.context):
        raise InvalidRequestError("images: do not combine with raw, suffix or context", "images")
    if body.template:
        raise InvalidRequestError("template: a request cannot set it; use raw: true with a whole prompt", "template")
    if body.system and (body.raw or body.suffix):
        raise InvalidRequestError("system: does not combine with raw or suffix, which use no chat template", "system")


def _messages(messages: list[Message]) -> list[JsonObject]:
    ids = ToolIds()
    return [_message(message, ids) for message in messages]


def _message(message: Message, ids: ToolIds) -> JsonObject:
    if message.role == "tool":
        call_id = ids.of_result(message.tool_name, message.tool_call_id)
        content = message.content or ""
        return {"role": "tool", "content": content, "tool_call_id": call_id, "name": message.tool_name}
    calls = [
        {"id": ids.of_call(call.function.name, call.id), "type": "function", "function": _function(call.function)}
        for call in message.tool_calls or ()
    ]
    content_or_none = message.content or (None if calls else "")
    shown = _with_images(content_or_none or "", message.images) if message.images else content_or_none
    chat_message: JsonObject = {"role": message.role, "content": shown, "reasoning_content": message.thinking}
    return chat_message | ({"tool_calls": calls} if calls else {})


def _with_images(text: str, images: list[str] | None) -> str | list[JsonObject]:
    if not images:
        return text
    urls = [image if image.startswith("data:") else f"data:;base64,{image}" for image in images]
    return [*({"type": "image_url", "image_url": url} for url in urls), {"type": "text", "text": text}]


def _function(function: CallFunction) -> JsonObject:
    return {"name": function.name, "arguments": function.arguments or {}}


def _response_format(value: str | dict[str, Any] | None) -> JsonObject | None:
    if isinstance(value, dict):
        return {"type": "json_schema", "json_schema": {"schema": value}}
    return {"type": "json_object"} if value == "json" else None


def _thinking_fields(think: bool | str | None, given: Any) -> JsonObject:
    """The variables that Qwen's and DeepSeek's templates know, unless the client sets them."""
    if think is None:
        return {}
    variables = {"enable_thinking": think is not False, "thinking": think is not False}
    return {
        "chat_template_kwargs": {**variables, **(given if isinstance(given, Mapping) else {})},
        "reasoning_effort": think if isinstance(think, str) else None,
    }


class ToolIds:
    """Gives a call without an id the next number, and gives a result the id of its call."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []  # name and id of the calls that have no result yet

    def of_call(self, name: str, given: str | None) -> str:
        call_id = given or self._next()
        self._open.append((name, call_id))
        return call_id

    def of_result(self, name: str | None, given: str | None) -> str:
        """The given id, else that of the first open call with this name, else that of the first open call."""
        by_id = [call for call in self._open if call[1] == given]
        by_name = [call for call in self._open if call[0] == name]
        if given and not by_id:
            return given
        call = next(iter(by_id or by_name or self._open), None)
        if call is None:
            return self._next()
        self._open.remove(call)
        return call[1]

    def _next(self) -> str:
        self._count += 1
        return f"{self._count:09d}"  # Mistral's templates need nine letters or digits
