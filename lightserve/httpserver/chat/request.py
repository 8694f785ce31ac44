"""The bodies of OpenAI's endpoints, with what vLLM and LightLLM users add to them.

Every field may be null, which is as good as absent. fields/unsupported.py has the fields that are refused; any other
unknown field is ignored.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.beam_search.runner import BeamFields
from lightserve.httpserver.fields.grammar import GrammarFields
from lightserve.httpserver.fields.scheduling import TermsBody
from lightserve.httpserver.fields.thinking import ThinkingFields
from lightserve.httpserver.fields.token_rules import AllowedIds, RuleFields
from lightserve.httpserver.fields.unsupported import refuse_later
from lightserve.httpserver.wire.body import Body, at_most, check

MAX_CHOICES = 128  # of one prompt, as OpenAI
MAX_STOP_STRINGS = 16  # OpenAI takes 4
MAX_STOP_LENGTH = 1024  # characters: that much text is held back at most
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BIASED = 1024
MAX_MESSAGES = 2048
MAX_TOOL_CALLS = 128  # of one message
MAX_TOOLS = 128
PART_SEPARATOR = "\n"  # between the text parts of a message, as vLLM and LightLLM
MEDIA = frozenset(
    {"image_url", "image", "input_image", "input_audio", "audio_url", "audio", "video_url", "video", "file"}
)

G = TypeVar("G", bound="GenerationBody")

Count = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
NewTokens = Annotated[int, Field(ge=1)]
MaxTokens = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Variables = Annotated[dict[str, Any], Field(max_length=64)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None,
    BeforeValidator(_listed, json_schema_input_type=StopString | list[StopString] | None),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage in every chunk, where include_usage is set too


class GenerationBody(TermsBody, BeamFields, GrammarFields, RuleFields):
    """What both endpoints take."""

    model: str | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None  # 0: only what is told of the prompt
    max_completion_tokens: MaxTokens | None = None  # the newer name wins
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASED), at_most(MAX_BIASED)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=MAX_BAD_WORDS)] | None
    ) = None
    allowed_token_ids: AllowedIds | None = None
    watermark: bool | None = None  # TGI's
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # -1: a random one, as in vLLM and LightLLM
    stop: StopStrings = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # keep the last ones; -1: as many as fit
    prompt_logprobs: TopLogprobs | None = None
    use_beam_search: bool | None = None  # so does num_beams > 1
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] | None = None
    user: str | None = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def is_scoring(self) -> bool:
        """Nothing is to be generated."""
        return self.new_tokens == 0

    @property
    def tells_prompt(self) -> bool:
        return self.prompt_logprobs is not None

    @property
    def prompt_alternatives(self) -> int | None:
        """To each token of the prompt; None: it need not be told how likely it is."""
        return self.prompt_logprobs

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Answers to generate for a prompt."""
        return self.choices

    @property
    def beams(self) -> int | None:
        """Of a beam search; None where none is asked for."""
        if not self.use_beam_search and (self.num_beams or 1) == 1:
            return None
        return self.num_beams or self.candidates

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: only with stream", "stream_options")
        if self.is_scoring and not self.tells_prompt:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequestError(f"{name}: 0 only with echo or prompt_logprobs", name)
        if (self.min_tokens or 0) > (math.inf if self.new_tokens is None else self.new_tokens):
            found = f"min_tokens={self.min_tokens} is more than max_tokens={self.new_tokens}"
            raise InvalidRequestError(found, "min_tokens")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens: a positive number, or -1", "truncate_prompt_tokens")
        return self


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}, {"type": "null"}]}


def _joined(value: Any) -> Any:
    """Text parts as one text; anything but a list is left for the type check."""
    if not isinstance(value, list):
        return value
    if not value:
        raise PydanticCustomError("content", "a list of parts must not be empty")
    return PART_SEPARATOR.join(map(_text_of, value))


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise NotSupportedYetError(f"a message part of type {kind!r}", "messages")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise PydanticCustomError("part", "a part must have the type 'text' and a string as text")
    text: str = part["text"]
    return text


class Function(Body):
    name: str
    arguments: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = None  # JSON, or the object itself


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: Function


_HAS_CONTENT: JsonDict = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_HAS_CALLS: JsonDict = {
    "required": ["tool_calls"],
    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
}
_ANSWERS_A_CALL: JsonDict = {
    "if": {"properties": {"role": {"const": "tool"}}},
    "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string", "minLength": 1}}},
}


class Message(Body):
    model_config = ConfigDict(json_schema_extra={"anyOf": [_HAS_CONTENT, _HAS_CALLS], **_ANSWERS_A_CALL})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, BeforeValidator(_joined), WithJsonSchema(_CONTENT)] = None
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


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class ToolFunction(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; none: the tool takes no arguments
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: ToolFunction


class NamedTool(Body):
    name: str


_MODES = ("auto", "none", "required")
_NAMED: JsonDict = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}


def _tool_choice(value: Any) -> str | NamedTool | None:
    if value is None or (isinstance(value, str) and value in _MODES):
        return value
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedTool(name=name)
    raise PydanticCustomError("tool_choice", "auto, none, required, or a function as its type and its name")


ToolChoice = Annotated[
    str | NamedTool | None,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": [*_MODES]}, _NAMED, {"type": "null"}]}),
]


class ChatBody(GenerationBody, ThinkingFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None  # a variable of the chat template
    include_reasoning: bool | None = None  # false: it is left out of the answer
    separate_reasoning: bool | None = None  # false: it stays in the content, as the model writes it
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        """Which the model may call."""
        return [] if self.tools is None or self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[Tool]:
        """One of which it must call."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == self.tool_choice.name]
        return self.offered_tools if self.tool_choice == "required" else []

    @property
    def max_tool_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool) else None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs: only with logprobs", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            found = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequestError(found, "continue_final_message")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequestError("tools: two of them have the same name", "tools")
        if self.tool_choice not in (None, "auto", "none") and not self.forced_tools:
            raise InvalidRequestError("tool_choice: there is no such tool in tools", "tool_choice")


Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several, each a text or token ids, as a list of prompts."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
        raise PydanticCustomError("prompt", "a string, a list of strings, token ids or a list of lists of token ids")
    if not prompts or not all(prompts):
        raise PydanticCustomError("prompt", "must not be empty")
    return prompts


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {int})


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
_MANY = {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _IDS]}}
Prompts = Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema({"anyOf": [_TEXT, _IDS, _MANY]})]


class CompletionBody(GenerationBody):
    prompt: Prompts
    best_of: Count | None = None  # the n with the highest mean logprob of so many
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    token_healing: bool | None = None  # LightLLM's: take back the prompt's last tokens, and spell them anew

    @property
    def candidates(self) -> int:
        return max(self.best_of or 1, self.choices)

    @property
    def tells_prompt(self) -> bool:
        return bool(self.echo) or self.prompt_logprobs is not None

    @property
    def echoed_alternatives(self) -> int | None:
        """To each token of a prompt whose logprobs come before the answer's."""
        return self.logprobs if self.echo else None

    @property
    def prompt_alternatives(self) -> int | None:
        asked = [k for k in (self.prompt_logprobs, self.echoed_alternatives) if k is not None]
        return max(asked, default=None)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < self.choices:
            raise InvalidRequestError(f"best_of={self.best_of} is less than n={self.choices}", "best_of")
        if self.stream and self.candidates > self.choices:
            raise InvalidRequestError("best_of: the best cannot be known in a stream", "best_of")
        return self


def checked(model: type[G], value: dict[str, Any]) -> G:
    refuse_later(value)
    return check(model, value)
