"""The body of a chat: OpenAI's fields, with what vLLM and LightLLM users add to them.

The other chat APIs translate their bodies into this one. Every field may be null, which means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.chat.image_parts import image_source, is_image
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
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.generation import GenerationBody, LimitedLogprobs
from lightserve.httpserver.fields.images import ImageFields
from lightserve.httpserver.http.body import Body
from lightserve.media.sizes import ImageSize
from lightserve.media.sources import ImageSource, ReadImage
from lightserve.messages.params import ThinkingLimit
from lightserve.model_files.template.chat_template import ChatTemplate
from lightserve.text.parsing.tool_grammar import Thinking

MAX_DOCUMENTS = 1024
MAX_VARIABLES = 64
MAX_MESSAGES = 2048
MAX_TOOL_CALLS = 128  # of one message
PART_SEPARATOR = "\n"  # between the text parts of a message, as in vLLM and LightLLM
MEDIA = frozenset(
    {"image_url", "image", "input_image", "input_audio", "audio_url", "audio", "video_url", "video", "file"}
)

Budget = Annotated[int, Field(ge=-1, lt=2**31, description="tokens between the tags of reasoning; -1: no limit")]
Variables = Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)]
Effort = Annotated[str, Field(max_length=32)]
Document = Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)]
# the usual roles are system, developer, user, assistant, tool and function; a template may know others
Role = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]

_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}, {"type": "null"}]}

_PREDICTED = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


class ThinkingFields(Body):
    """The fields that limit reasoning, as vLLM, Qwen and others name them. The lowest of several values counts."""

    budget_is_hint: ClassVar[bool] = False  # ignored for a model that does not reason, instead of refused

    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    max_reasoning_tokens: Budget | None = None

    def thinking_limit(self, context: ServerContext, thinking: Thinking | None) -> ThinkingLimit | None:
        """``thinking``: how the output may reason; None: the model does not reason."""
        given = {name: getattr(self, name) for name in ThinkingFields.model_fields}
        limits = {name: value for name, value in given.items() if value is not None and value >= 0}
        if not limits or (thinking is None and self.budget_is_hint):
            return None
        if thinking is None:
            name = next(iter(limits))
            message = f"{name}: the chat template does not show how the model reasons; set --reasoning_parser"
            raise InvalidRequestError(message, name)
        tags = thinking.reasoning_format
        end_ids = tuple(context.tokenizer.encode(tags.end, add_special_tokens=False))
        return ThinkingLimit(min(limits.values()), tags.begin, tags.end, end_ids, thinking.is_begun)


class ThinkingSettings(Body):
    """As on the APIs of Anthropic, DeepSeek, Moonshot and Z.ai."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


class ReasoningSettings(Body):
    """As on OpenRouter and on /v1/responses."""

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None


def _thinking(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


def _reasoning(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


class TemplateFields(ThinkingFields):
    """The fields that set variables of the chat template."""

    chat_template_kwargs: Variables | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: (
        Annotated[ThinkingSettings, BeforeValidator(_thinking, json_schema_input_type=bool | ThinkingSettings)] | None
    ) = None
    reasoning: (
        Annotated[ReasoningSettings, BeforeValidator(_reasoning, json_schema_input_type=bool | ReasoningSettings)]
        | None
    ) = None
    include_reasoning: bool | None = None  # false: the response leaves it out
    documents: Annotated[list[Document], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = Field(
        default=None, description="texts for templates that take documents"
    )

    @model_validator(mode="after")
    def _spread_objects(self) -> TemplateFields:
        """The parts of ``thinking`` and ``reasoning`` are other names of fields that count if both are set."""
        settings = self.reasoning or ReasoningSettings()
        budgets = [self.thinking.budget_tokens if self.thinking else None, settings.max_tokens]
        for budget in budgets:
            if self.thinking_token_budget is None:
                self.thinking_token_budget = budget
        if self.reasoning_effort is None:
            self.reasoning_effort = settings.effort
        if self.include_reasoning is None and settings.exclude is not None:
            self.include_reasoning = not settings.exclude
        return self

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason; None: the request does not say."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            return self.thinking.type == "enabled"
        if self.reasoning is not None and self.reasoning.enabled is not None:
            return self.reasoning.enabled
        return False if self.reasoning_effort == "none" else None

    def template_variables(self) -> dict[str, Any]:
        """The variables that these fields set; chat_template_kwargs count before the other fields."""
        variables: dict[str, Any] = {}
        if self.thinks is not None:
            variables |= {"enable_thinking": self.thinks, "thinking": self.thinks}  # Qwen's and DeepSeek's names
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return variables | (self.chat_template_kwargs or {})


def _join_parts(value: Any) -> Any:
    """Text parts as one text; the type check handles any value but a list."""
    if not isinstance(value, list):
        return value
    if not value:
        raise PydanticCustomError("content", "a list of parts must not be empty")
    return PART_SEPARATOR.join(map(_part_text, value))


def _join_predicted(value: Any) -> Any:
    """Parts of a predicted text follow one another as they are."""
    return "".join(map(_part_text, value)) if isinstance(value, list) else value


def _part_text(content_part: Any) -> str:
    kind = content_part.get("type") if isinstance(content_part, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise NotSupportedYetError(f"a message part of type {kind!r}", "messages")
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
    _parts: tuple[str | ImageSource, ...] = PrivateAttr(())  # if some of them are images

    @model_validator(mode="wrap")
    @classmethod
    def _take_images(cls, value: Any, handler: ModelWrapValidatorHandler[Message]) -> Message:
        """Texts stay in ``content`` too, for what looks at the text only."""
        content = value.get("content") if isinstance(value, dict) else None
        if not isinstance(content, list) or not any(map(is_image, content)):
            return handler(value)
        parts = tuple(image_source(each) if is_image(each) else _part_text(each) for each in content)
        texts = [each for each in parts if isinstance(each, str)]
        message = handler({**value, "content": PART_SEPARATOR.join(texts)})
        message._parts = parts
        return message

    @property
    def image_sources(self) -> list[ImageSource]:
        return [each for each in self._parts if not isinstance(each, str)]

    @property
    def content_parts(self) -> list[dict[str, str]]:
        """For the chat template, if some of them are images."""
        return [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": each.kind} for each in self._parts
        ]

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "content must be a string or text parts")
        if self.role == "tool" and not self.tool_call_id:
            raise PydanticCustomError("tool_call_id", "a message of the role 'tool' needs its tool_call_id")
        return self


class Prediction(Body):
    """OpenAI's: a text that the output will probably resemble."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_join_predicted), WithJsonSchema(_PREDICTED)]


class ChatBody(GenerationBody, TemplateFields, ImageFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: LimitedLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # vLLM's: the response begins with the last message if that is the assistant's too
    separate_reasoning: bool | None = None  # false: it stays in the content
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None  # with --speculative_config, drafts come from it too
    _own_template: ChatTemplate | None = PrivateAttr(None)
    _shows_unused_tools: bool = PrivateAttr(False)
    _read_images: list[ReadImage] = PrivateAttr(default_factory=list)

    @property
    def own_template(self) -> ChatTemplate | None:
        """A trainer's, in place of the model's: see chat_routes.py."""
        return self._own_template

    def use_template(self, template: ChatTemplate) -> None:
        self._own_template = template

    def show_unused_tools(self) -> None:
        """In the prompt, with ``tool_choice: none`` too, as vLLM does: trainers parse the calls themselves."""
        self._shows_unused_tools = True

    @property
    def read_images(self) -> list[ReadImage]:
        """The images of all messages, once they are read."""
        return self._read_images

    @read_images.setter
    def read_images(self, images: list[ReadImage]) -> None:
        self._read_images = images

    @property
    def image_sizes(self) -> list[ImageSize]:
        return [image.size for image in self._read_images]

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
        return self.tools or [] if self._shows_unused_tools and self.tool_choice == "none" else self.offered_tools

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
