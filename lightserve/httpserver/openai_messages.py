"""A conversation as a chat template wants it, and as token ids."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.body import check_size
from lightserve.httpserver.context import LONG_TEXT, ServerContext
from lightserve.httpserver.openai_protocol import ChatBody, Function, Message

LONG_CHAT = 100  # messages: rendering more than this (about a millisecond) leaves the event loop
END_MARK = "[[the text to continue ends here]]"
# what chat_template_kwargs may not set: it is the server's, or another field of the body says it
RESERVED = frozenset(
    {
        "self",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_dict",
        "return_tensors",
    }
)


async def chat_ids(context: ServerContext, body: ChatBody) -> list[int]:
    """The conversation as token ids, by the model's chat template."""
    is_long = len(body.messages) > LONG_CHAT or sum(map(_length, body.messages)) >= LONG_TEXT
    text = await asyncio.to_thread(_render, context, body) if is_long else _render(context, body)
    if not text:
        raise InvalidRequestError("the model's chat template makes nothing of these messages", "messages")
    return await context.encode(text, add_special_tokens=bool(body.add_special_tokens))


def _length(message: Message) -> int:
    """Characters of it that a template may write; those of a tool call are not worth counting."""
    return len(message.content or "") + (LONG_TEXT if message.tool_calls else 0) + len(_reasoning(message) or "")


def _reasoning(message: Message) -> str | None:
    return message.reasoning_content or message.reasoning


def _render(context: ServerContext, body: ChatBody) -> str:
    _check_arguments(body)
    messages = [for_template(message) for message in body.messages]
    if body.continue_final_message:
        _mark_the_end(messages[-1])
    adds_turn = not body.continue_final_message and body.add_generation_prompt is not False
    text = context.tokenizer.apply_chat_template(messages, None, adds_turn, **_variables(body))
    return text.rpartition(END_MARK)[0] if body.continue_final_message else text


def _check_arguments(body: ChatBody) -> None:
    """They are JSON inside JSON, which the check of the body did not see."""
    functions = [call.function for message in body.messages for call in message.tool_calls or ()]
    check_size("".join([one.arguments for one in functions if isinstance(one.arguments, str)]).encode())


def _mark_the_end(message: dict[str, Any]) -> None:
    """So that what the template writes after the message can be cut off, however it treats spaces."""
    if message["content"] is None:
        raise InvalidRequestError("continue_final_message: the final message has no text", "continue_final_message")
    message["content"] += END_MARK


def _variables(body: ChatBody) -> dict[str, Any]:
    given = {name: value for name, value in (body.chat_template_kwargs or {}).items() if name not in RESERVED}
    if body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
    return given


def for_template(message: Message) -> dict[str, Any]:
    """Only what is there, because templates ask whether a field is defined."""
    role = "system" if message.role == "developer" else message.role
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": _tool_calls(message),
        "reasoning_content": _reasoning(message),
    }
    given = {name: value for name, value in optional.items() if value}
    return {"role": role, "content": message.content, **given}


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _read(call.function)}}
        for call in message.tool_calls or ()
    ]


def _read(function: Function) -> Any:
    """Templates are written for an object, OpenAI's clients send its JSON."""
    if not isinstance(function.arguments, str | None):
        return function.arguments
    try:
        return orjson.loads(function.arguments or "{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            f"messages: the arguments of a tool call are not JSON: {error}", "messages"
        ) from error
