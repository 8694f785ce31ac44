"""The items in the input of /v1/responses, and the messages of a chat that they become.

Agents send their whole history, with items of tools that other servers ran. An item with text becomes a call and its
result; an item without text is left out, and the response says so.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

import orjson
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from lightserve.httpserver.chat.image_parts import image_source, is_image
from lightserve.httpserver.chat.translation import TextOrParts
from lightserve.httpserver.http.body import Body, JsonObject
from lightserve.httpserver.openai.responses.mcp import (
    McpApprovalRequestItem,
    McpApprovalResponseItem,
    McpListToolsItem,
)
from lightserve.httpserver.openai.responses.tools import Tools, function_name
from lightserve.mcp.tools import error_text, function_name as mcp_function_name

MEDIA = frozenset({"input_image", "input_file", "input_audio"})
KINDS = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text", "refusal": "refusal"}
MAX_ITEMS = 4096  # several items may become one message
REASONING_PREFIX = "lightserve."  # of encrypted_content that this server wrote


class ToolOutputParts(TextOrParts):
    """The output of a tool may have media that the model does not read. It reads that there were some: refusing them
    would end an agent's conversation, because the agent sends the output again with every request."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        string, parts = super().__get_pydantic_json_schema__(schema, handler)["anyOf"]
        media = {"type": "object", "required": ["type"], "properties": {"type": {"enum": sorted(self.media)}}}
        return {"anyOf": [string, {"type": "array", "items": {"anyOf": [*parts["items"]["anyOf"], media]}}]}

    def text_of(self, content_part: Any) -> str:
        kind = content_part.get("type") if isinstance(content_part, dict) else None
        if isinstance(kind, str) and kind in self.media:
            return f"[{kind} left out: this model does not read it]"
        return super().text_of(content_part)


Text = Annotated[str, TextOrParts("input", MEDIA, KINDS)]
OUTPUT_PARTS = ToolOutputParts("input", MEDIA | {"encrypted_content"}, KINDS)
OutputText = Annotated[str, OUTPUT_PARTS]
CallId = Annotated[str, Field(min_length=1)]
Objects = Annotated[list[JsonObject], Field(max_length=MAX_ITEMS, fail_fast=True)]


def _text_of(content_part: JsonObject) -> str:
    """Of a part that is valid."""
    text: str = content_part[KINDS[content_part["type"]]]
    return text


def _has_url(value: Any) -> bool:
    """Whether it is an image that can be read: others have a file_id."""
    return is_image(value) and isinstance(value.get("image_url"), str)


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    _parts: list[JsonObject] = PrivateAttr(default_factory=list)  # of a chat, if some of them are images

    @model_validator(mode="wrap")
    @classmethod
    def _take_images(cls, value: Any, handler: ModelWrapValidatorHandler[MessageItem]) -> MessageItem:
        """Texts stay in ``content`` too, for what looks at the text only."""
        content = value.get("content") if isinstance(value, dict) else None
        if not isinstance(content, list) or not any(map(is_image, content)):
            return handler(value)
        item = handler({**value, "content": [each for each in content if not is_image(each)]})
        for each in filter(is_image, content):
            image_source(each)  # it raises if the part is not valid
        item._parts = [each if is_image(each) else {"type": "text", "text": _text_of(each)} for each in content]
        return item

    @property
    def chat_content(self) -> str | list[JsonObject]:
        return self._parts or self.content


class AgentMessageItem(Body):
    """A message between agents of Codex."""

    type: Literal["agent_message"]
    content: OutputText


class CallItem(Body):
    type: Literal["function_call"]
    call_id: CallId
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: CallId
    name: str
    namespace: str | None = None
    input: str


class ActionCallItem(Body):
    """A call of a tool that the client runs and whose arguments are an object."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: CallId | None = None
    id: str | None = None
    action: JsonObject | None = None
    operation: JsonObject | None = None  # of apply_patch


class CallOutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: OutputText
    _parts: list[JsonObject] = PrivateAttr(default_factory=list)  # of a chat, if some of them are images

    @model_validator(mode="wrap")
    @classmethod
    def _take_images(cls, value: Any, handler: ModelWrapValidatorHandler[CallOutputItem]) -> CallOutputItem:
        item = handler(value)
        output = value.get("output") if isinstance(value, dict) else None
        if isinstance(output, list) and any(map(_has_url, output)):
            item._parts = [
                each if _has_url(each) else {"type": "text", "text": OUTPUT_PARTS.text_of(each)} for each in output
            ]
        return item

    def chat_content(self, reads_images: bool) -> str | list[JsonObject]:
        return self._parts if reads_images and self._parts else self.output


class ActionOutputItem(Body):
    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: CallId | None = None
    id: str | None = None
    output: str | Objects | None = None  # objects: stdout and stderr of each command


class HostedCallItem(Body):
    """A call that a server ran, with its result."""

    type: Literal["mcp_call", "file_search_call", "code_interpreter_call"]
    id: CallId
    name: str | None = None
    server_label: str | None = None  # of mcp_call, as are the next four
    approval_request_id: str | None = None
    arguments: str | None = None
    output: str | None = None
    error: Any = None
    queries: Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None  # of file_search_call
    results: Objects | None = None
    code: str | None = None  # of code_interpreter_call
    outputs: Objects | None = None

    @property
    def function_name(self) -> str:
        if self.name is None:
            return _tool_of(self.type)
        return self.name if self.server_label is None else mcp_function_name(self.server_label, self.name)


class ReasoningText(Body):
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(max_length=MAX_ITEMS, fail_fast=True)]


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: ReasoningTexts | None = None
    summary: ReasoningTexts | None = None
    encrypted_content: str | None = None


class AdditionalToolsItem(Body):
    """More tools; Codex sends all its tools like this to some models."""

    type: Literal["additional_tools"]
    tools: Tools


class ItemReference(Body):
    """An item of a stored response; history.py replaces it by the item."""

    type: Literal["item_reference"]
    id: str


class LeftOutItem(Body):
    """An item without text for the model."""

    type: Literal[
        "web_search_call",
        "image_generation_call",
        "computer_call",
        "computer_call_output",
        "tool_search_call",
        "tool_search_output",
        "compaction",
        "compaction_summary",
        "context_compaction",
    ]


# name in the path of an error: the items of that name
_MODELS: dict[str, type[Body]] = {
    "message": MessageItem,
    "agent_message": AgentMessageItem,
    "function_call": CallItem,
    "custom_tool_call": CustomCallItem,
    "action_call": ActionCallItem,
    "call_output": CallOutputItem,
    "action_output": ActionOutputItem,
    "hosted_call": HostedCallItem,
    "reasoning": ReasoningItem,
    "additional_tools": AdditionalToolsItem,
    "item_reference": ItemReference,
    "mcp_list_tools": McpListToolsItem,
    "mcp_approval_request": McpApprovalRequestItem,
    "mcp_approval_response": McpApprovalResponseItem,
    "left_out": LeftOutItem,
}


def _types_of(model: type[Body]) -> Iterable[str]:
    annotation = model.model_fields["type"].annotation
    return [kind for kind in get_args(annotation) if isinstance(kind, str)] or ["message"]


_TAGS = {kind: tag for tag, model in _MODELS.items() for kind in _types_of(model)}


def _tag(value: Any) -> str | None:
    kind = value.get("type", None) if isinstance(value, dict) else ""
    if kind is None:
        return "message"
    return _TAGS.get(kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[AgentMessageItem, Tag("agent_message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ActionCallItem, Tag("action_call")]
    | Annotated[CallOutputItem, Tag("call_output")]
    | Annotated[ActionOutputItem, Tag("action_output")]
    | Annotated[HostedCallItem, Tag("hosted_call")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[McpListToolsItem, Tag("mcp_list_tools")]
    | Annotated[McpApprovalRequestItem, Tag("mcp_approval_request")]
    | Annotated[McpApprovalResponseItem, Tag("mcp_approval_response")]
    | Annotated[LeftOutItem, Tag("left_out")],
    Discriminator(
        _tag,
        custom_error_type="item",
        custom_error_message=f"the type of an item must be one of {', '.join(_TAGS)}",
    ),
]


def as_items(value: Any) -> Any:
    """Input that is a string is one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)],
    BeforeValidator(as_items, json_schema_input_type=str | list[Item]),
]


def encode_reasoning(text: str) -> str:
    """``encrypted_content`` of a reasoning item. It is opaque, not secret. A client that sends nothing else of the item
    back keeps the reasoning, and with it the match in the prefix cache."""
    return REASONING_PREFIX + base64.b64encode(text.encode(errors="surrogatepass")).decode()


def decode_reasoning(encrypted: str | None) -> str:
    """The text, if this server wrote it; else it is empty."""
    if encrypted is None or not encrypted.startswith(REASONING_PREFIX):
        return ""
    try:
        return base64.b64decode(encrypted.removeprefix(REASONING_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


class MessageBuilder:
    """Joins the reasoning, text and calls of one turn of the assistant into one message."""

    def __init__(self, reads_images: bool = False) -> None:
        """``reads_images``: the model does; else the text says that an output of a tool had some."""
        self._reads_images = reads_images
        self.messages: list[JsonObject] = []
        self.left_out: list[tuple[int, str]] = []  # index and type of the items that became no message
        self._reasoning = ""  # for the next message of the assistant
        self._takes_calls = False  # the last message is an assistant message
        self._results: list[tuple[str, str]] = []  # ids and texts, of calls in a row that a server ran
        self._approval_requests: dict[str, McpApprovalRequestItem] = {}

    def add_all(self, items: Iterable[Item]) -> None:
        for index, item in enumerate(items):
            if not isinstance(item, HostedCallItem | McpApprovalResponseItem):
                self._add_results()
            if isinstance(item, LeftOutItem):
                self.left_out.append((index, item.type))
            else:
                self._add(item)
        self._add_results()

    def _add_results(self) -> None:
        """Calls of one output are one message, and their results follow it."""
        results, self._results = self._results, []
        for call_id, text in results:
            self._result(call_id, text)

    def append(self, role: str, content: str | list[JsonObject] | None, **fields: Any) -> None:
        self._takes_calls = role == "assistant"
        if self._takes_calls and self._reasoning:
            fields["reasoning_content"] = self._reasoning
        self._reasoning = ""
        self.messages.append({"role": role, "content": content, **fields})

    def _add(self, item: Item) -> None:
        match item:
            case MessageItem():
                self.append(item.role, item.chat_content)
            case AgentMessageItem():
                self.append("user", item.content)
            case CallItem():
                self._call(item.call_id, function_name(item.name, item.namespace), item.arguments)
            case CustomCallItem():
                custom = {"name": function_name(item.name, item.namespace), "input": item.input}
                self._add_call({"id": item.call_id, "type": "custom", "custom": custom})
            case CallOutputItem():
                self._result(item.call_id, item.chat_content(self._reads_images))
            case ReasoningItem():
                self._reasoning += _reasoning_of(item)
            case _:
                self._add_client_or_hosted(item)

    def _add_client_or_hosted(self, item: Item) -> None:
        match item:
            case ActionCallItem():
                arguments = item.action or item.operation or {}
                self._call(item.call_id or item.id or "", _tool_of(item.type), orjson.dumps(arguments).decode())
            case ActionOutputItem():
                self._result(item.call_id or item.id or "", _action_output(item))
            case HostedCallItem():
                self._call(item.id, item.function_name, item.arguments or _hosted_arguments(item))
                self._results.append((item.id, _hosted_output(item)))
            case McpApprovalRequestItem():
                self._approval_requests[item.id] = item
            case McpApprovalResponseItem() if not item.approve and item.approval_request_id in self._approval_requests:
                request = self._approval_requests[item.approval_request_id]
                self._call(request.id, mcp_function_name(request.server_label, request.name), request.arguments)
                self._results.append((request.id, item.refusal))

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        self._add_call({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _add_call(self, call: JsonObject) -> None:
        if not self._takes_calls or self._reasoning:
            self.append("assistant", None, tool_calls=[])
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _result(self, call_id: str, content: str | list[JsonObject]) -> None:
        self.append("tool", content, tool_call_id=call_id or "call")


def _reasoning_of(item: ReasoningItem) -> str:
    """The text, or what is left of it: our own encrypted content, or a summary by another server."""
    text = "".join(content_part.text for content_part in item.content or ())
    return (
        text
        or decode_reasoning(item.encrypted_content)
        or "\n".join(summary_part.text for summary_part in item.summary or ())
    )


def _tool_of(call_type: str) -> str:
    return call_type.removesuffix("_call")


def _action_output(item: ActionOutputItem) -> str:
    if not isinstance(item.output, list):
        return item.output or ""
    return "\n".join(str(entry[name]) for entry in item.output for name in ("stdout", "stderr") if entry.get(name))


def _hosted_arguments(item: HostedCallItem) -> str:
    arguments = {"code": item.code} if item.code is not None else {"queries": item.queries or []}
    return orjson.dumps(arguments).decode()


def _hosted_output(item: HostedCallItem) -> str:
    results = [f"{result.get('filename', '')}\n{result['text']}" for result in item.results or () if result.get("text")]
    logs = [str(output["logs"]) for output in item.outputs or () if output.get("logs")]
    error = [] if item.error is None else [f"error: {error_text(item.error)}"]
    return "\n".join([item.output or "", *results, *logs, *error]).strip()
