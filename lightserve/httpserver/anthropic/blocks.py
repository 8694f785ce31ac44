"""The content blocks of /v1/messages, and their text in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError, NotSupportedYetError
from lightserve.httpserver.anthropic.tools import json_text
from lightserve.httpserver.chat.request import PART_SEPARATOR
from lightserve.httpserver.http.body import Body, JsonObject
from lightserve.mcp.tools import function_name as mcp_function_name

MAX_BLOCKS = 1024  # of one message
MEDIA = frozenset({"browser_state"})
NEEDS_FILES = frozenset({"container_upload"})
# fields of results that say nothing to a model, or that only Anthropic's servers can read
HIDDEN_FIELDS = frozenset({"type", "encrypted_content", "encrypted_index", "encrypted_stdout", "cache_control"})
BILLING_HEADER = "x-anthropic-billing-header"  # Claude Code's first system block, with another hash in every request
ERROR_PREFIXES = ("error", "<tool_use_error>")

Id = Annotated[str, Field(min_length=1)]


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str


class IgnoredBlock(Body):
    """Reasoning that only Anthropic's servers can read, the mark of a change of the model, and a list of tools."""

    type: Literal["redacted_thinking", "fallback", "mcp_tool_listing"]


class ToolUseBlock(Body):
    """A call: of the client's tool, or of one that Anthropic's servers ran."""

    type: Literal["tool_use", "server_tool_use", "mcp_tool_use"]
    id: Id
    name: str
    server_name: str | None = None  # of mcp_tool_use
    input: dict[str, Any]

    @property
    def function_name(self) -> str:
        return self.name if self.server_name is None else mcp_function_name(self.server_name, self.name)


class ToolReferenceBlock(Body):
    """The result of a tool search: from here on the model may call this tool."""

    type: Literal["tool_reference"]
    tool_name: str


class SearchResultBlock(Body):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]

    @property
    def text(self) -> str:
        inside = PART_SEPARATOR.join([block.text for block in self.content])
        return f"<search_result>\n{self.title}\n{self.source}\n{inside}\n</search_result>"


class DocumentBlock(Body):
    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        parts = [self.title, self.context, _source_text(self.source)]
        inside = PART_SEPARATOR.join([text for text in parts if text])
        return f"<document>\n{inside}\n</document>"


class ImageBlock(Body):
    type: Literal["image"]
    source: dict[str, Any]

    @property
    def content_part(self) -> JsonObject:
        """As a part of a chat message."""
        match self.source:
            case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
                url = f"data:{media_type};base64,{data}"
            case {"type": "url", "url": str(url)}:
                pass
            case _:
                message = "an image needs a source of type 'base64' with media_type and data, or of type 'url' with url"
                raise InvalidRequestError(message, "messages")
        return {"type": "image_url", "image_url": url}


def _source_text(source: JsonObject) -> str:
    match source:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": list(blocks)}:
            return _joined(blocks)
        case {"type": "base64" | "url" | "file" as kind}:
            raise NotSupportedYetError(f"a document with a source of type {kind!r}", "messages")
    raise InvalidRequestError("a document needs a source of type 'text' with data, or 'content'", "messages")


def _kind_of(kinds: dict[str, str]) -> Callable[[Any], str | None]:
    """The tag of a block by its type, which must be one of ``kinds``."""

    def kind_of(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            return None
        if kind in MEDIA:
            raise NotSupportedYetError(f"a content block of type {kind!r}", "messages")
        if kind in NEEDS_FILES:
            raise InvalidRequestError(f"a content block of type {kind!r}: this server stores no files", "messages")
        return kinds.get(kind)

    return kind_of


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


RESULT_KINDS = {kind: kind for kind in ("text", "image", "search_result", "document", "tool_reference")}
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")],
    Discriminator(
        _kind_of(RESULT_KINDS),
        custom_error_type="block",
        custom_error_message=f"a content block of a tool result must be one of {', '.join(RESULT_KINDS)}",
    ),
]
ResultBlocks = Annotated[
    Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[ResultBlock]),
]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: ResultBlocks | None = None
    is_error: bool | None = None


ServerResultKind = Literal[
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_result",
]


class ServerToolResultBlock(Body):
    """The result of a tool that Anthropic's servers ran, in an earlier message of the assistant."""

    type: ServerResultKind
    tool_use_id: Id
    content: Any = None
    is_error: bool | None = None


KINDS: dict[str, str] = {
    **{kind: kind for kind in ("text", "image", "thinking", "tool_result", "search_result", "document")},
    **dict.fromkeys(("redacted_thinking", "fallback", "mcp_tool_listing"), "ignored"),
    **dict.fromkeys(("tool_use", "server_tool_use", "mcp_tool_use"), "tool_use"),
    **dict.fromkeys(ServerResultKind.__args__, "server_tool_result"),  # type: ignore[attr-defined]
}
Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[IgnoredBlock, Tag("ignored")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ServerToolResultBlock, Tag("server_tool_result")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[DocumentBlock, Tag("document")],
    Discriminator(
        _kind_of(KINDS),
        custom_error_type="block",
        custom_error_message=f"a content block must be one of {', '.join(KINDS)}",
    ),
]
Blocks = Annotated[
    Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True)],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]

SYSTEM_TEXT: JsonObject = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}


def join_system(value: Any) -> Any:
    """The text of ``system``; the type check handles any value but a list and a string."""
    if isinstance(value, list):
        return PART_SEPARATOR.join(without_billing_header(map(_system_text, value)))
    if isinstance(value, str) and value.startswith(BILLING_HEADER):  # a proxy joined the blocks
        return value.partition("\n")[2]
    return value


def without_billing_header(texts: Iterable[str]) -> list[str]:
    """The other texts. The hash in the header would make every prompt differ near its first token."""
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _system_text(block: Any) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind in {*MEDIA, "image"}:
            raise NotSupportedYetError(f"a system block of type {kind!r}", "system")
    raise PydanticCustomError("block", "a system block must have the type 'text' and a string as text")


def error_text(text: str) -> str:
    """The text of a failed tool: chat templates have no field for ``is_error``."""
    if not text:
        return "Error: the tool failed without a message"
    return text if text.lower().startswith(ERROR_PREFIXES) else f"Error: {text}"


def server_result_text(block: ServerToolResultBlock) -> str:
    text = _joined(block.content if isinstance(block.content, list) else [block.content])
    return error_text(text) if block.is_error else text


def referenced_tools(content: Any) -> Iterable[str]:
    """The names in the result of Anthropic's tool search."""
    references = content.get("tool_references") if isinstance(content, dict) else None
    for reference in references if isinstance(references, list) else ():
        if isinstance(reference, dict) and isinstance(reference.get("tool_name"), str):
            yield reference["tool_name"]


def _joined(values: Iterable[Any]) -> str:
    return PART_SEPARATOR.join([_as_text(value) for value in values])


def _as_text(value: Any) -> str:
    """A value of a result: texts as they are, anything else as JSON."""
    match value:
        case None:
            return ""
        case str(text) | {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind in {*MEDIA, "image"}:
            raise NotSupportedYetError(f"a content block of type {kind!r}", "messages")
    return json_text(value, "messages", HIDDEN_FIELDS)
