"""The messages of /v1/messages as messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.anthropic.blocks import (
    Block,
    Blocks,
    DocumentBlock,
    ImageBlock,
    SearchResultBlock,
    ServerToolResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    error_text,
    referenced_tools,
    server_result_text,
    without_billing_header,
)
from lightserve.httpserver.anthropic.tools import loaded_text
from lightserve.httpserver.chat.request import PART_SEPARATOR
from lightserve.httpserver.http.body import Body, JsonObject

ASSISTANT_BLOCKS = (ToolUseBlock, ServerToolResultBlock, ThinkingBlock)
USER_BLOCKS = (ToolResultBlock, SearchResultBlock, DocumentBlock, ImageBlock)

Pieces = Sequence[str | JsonObject | list[JsonObject]]  # of a content: texts, parts, or lists of parts


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        for block in self.content:
            if isinstance(block, ASSISTANT_BLOCKS) and self.role != "assistant":
                raise PydanticCustomError("role", f"{block.type} is only allowed in a message of the assistant")
            if isinstance(block, USER_BLOCKS) and self.role != "user":
                raise PydanticCustomError("role", f"{block.type} is only allowed in a message of the user")
        return self


def found_tools(messages: Sequence[Message]) -> set[str]:
    """The tools that a tool search in the conversation has found."""
    names: set[str] = set()
    for block in (block for message in messages for block in message.content):
        if isinstance(block, ToolResultBlock):
            names.update(item.tool_name for item in block.content or () if isinstance(item, ToolReferenceBlock))
        elif isinstance(block, ServerToolResultBlock):
            names.update(referenced_tools(block.content))
    return names


@dataclass(frozen=True, slots=True)
class Conversation:
    system: str | None
    messages: Sequence[Message]
    deferred: dict[str, JsonObject]  # tools that the first reference to them defines
    takes_late_system: bool  # the chat template shows a system message that is not the first

    def to_chat(self) -> list[JsonObject]:
        chat: list[list[JsonObject]] = []  # messages in a row that are one
        for message in self._chat_messages():
            if chat and _is_continued(chat[-1][-1], message):
                chat[-1].append(message)
            else:
                chat.append([message])
        if not chat:
            raise InvalidRequestError("messages: no content in any message", "messages")
        return [
            row[0] if len(row) == 1 else _text(row[0]["role"], [message["content"] for message in row]) for row in chat
        ]

    def _chat_messages(self) -> Iterator[JsonObject]:
        if self.system:
            yield _text("system", [self.system])
        is_late = False
        for message in self.messages:
            is_late = is_late or message.role != "system"
            if message.role == "assistant":
                yield from _assistant_messages(message.content)
            elif message.role == "user":
                yield from self._user_messages(message.content)
            else:
                yield from self._system_messages(message.content, is_late)

    def _system_messages(self, blocks: Sequence[Block], is_late: bool) -> Iterator[JsonObject]:
        texts = without_billing_header(block.text for block in blocks if isinstance(block, TextBlock))
        if texts and is_late and not self.takes_late_system:
            yield _text("user", ["<system-reminder>", *texts, "</system-reminder>"])
        elif texts:
            yield _text("system", texts)

    def _user_messages(self, blocks: Sequence[Block]) -> Iterator[JsonObject]:
        """Texts and tool results in their order; adjacent texts are one message."""
        texts: list[str | JsonObject] = []
        for block in blocks:
            if isinstance(block, TextBlock | SearchResultBlock | DocumentBlock):
                texts.append(block.text)
            elif isinstance(block, ImageBlock):
                texts.append(block.content_part)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield _text("user", texts)
                texts = []
                yield _tool_message(block.tool_use_id, self._result_content(block))
        if texts:
            yield _text("user", texts)

    def _result_content(self, block: ToolResultBlock) -> str | list[JsonObject]:
        text = self._result_text(block)
        images = [item.content_part for item in block.content or () if isinstance(item, ImageBlock)]
        return _content([*([text] if text else []), *images]) if images else text

    def _result_text(self, block: ToolResultBlock) -> str:
        texts = [
            loaded_text(item.tool_name, self._take_definition(item.tool_name))
            if isinstance(item, ToolReferenceBlock)
            else item.text
            for item in block.content or ()
            if not isinstance(item, ImageBlock)
        ]
        text = PART_SEPARATOR.join(texts)
        return error_text(text) if block.is_error else text

    def _take_definition(self, name: str) -> JsonObject | None:
        """Once: a definition may be long, and a conversation may have thousands of references."""
        return self.deferred.pop(name, None)


def _is_continued(before: JsonObject, message: JsonObject) -> bool:
    """Anthropic combines messages of one role in a row, and many chat templates need that."""
    return message["role"] == before["role"] and message["role"] in ("user", "system")


@dataclass(slots=True)
class _AssistantMessage:
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[JsonObject] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.texts or self.reasoning or self.calls)

    def to_chat(self) -> JsonObject:
        content = PART_SEPARATOR.join(self.texts) if self.texts or not self.calls else None
        reasoning = PART_SEPARATOR.join(self.reasoning) or None
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        return message | ({"tool_calls": self.calls} if self.calls else {})


def _assistant_messages(blocks: Sequence[Block]) -> Iterator[JsonObject]:
    """One message, or several: in a chat, the result of a server's tool stands between two messages."""
    message, has_result = _AssistantMessage(), False
    for block in blocks:
        if isinstance(block, TextBlock):
            message.texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            message.reasoning.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            message.calls.append(_call(block))
        elif isinstance(block, ServerToolResultBlock):
            if message:
                yield message.to_chat()
            yield _tool_message(block.tool_use_id, server_result_text(block))
            message, has_result = _AssistantMessage(), True
    if message or not has_result:
        yield message.to_chat()


def _call(block: ToolUseBlock) -> JsonObject:
    return {"id": block.id, "type": "function", "function": {"name": block.function_name, "arguments": block.input}}


def _tool_message(call_id: str, content: str | list[JsonObject]) -> JsonObject:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _text(role: str, pieces: Pieces) -> JsonObject:
    return {"role": role, "content": _content(pieces)}


def _content(pieces: Pieces) -> str | list[JsonObject]:
    """One text, or parts if some of them are images."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
        return PART_SEPARATOR.join(texts)
    content: list[JsonObject] = []
    for piece in pieces:
        if isinstance(piece, list):
            content += piece
        else:
            content.append({"type": "text", "text": piece} if isinstance(piece, str) else piece)
    return content
