"""From the messages of a chat to its prompt, by the model's chat template."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from lightserve.errors import InvalidRequestError, TemplateLimitError
from lightserve.httpserver.chat.images import read_images, with_image_texts, with_placeholders
from lightserve.httpserver.chat.request import ChatBody, Function, Message
from lightserve.httpserver.chat.system_messages import arrange_system_messages
from lightserve.httpserver.chat.tools import Tool
from lightserve.httpserver.context import LONG_TEXT, ServerContext
from lightserve.httpserver.http.body import check_json_size
from lightserve.messages.control import StateKv
from lightserve.model_files.template.budget import IN_THREAD, ON_EVENT_LOOP, RenderLimits
from lightserve.model_files.template.chat_template import RESERVED_NAMES, ChatTemplate

LONG_CHAT = 100  # messages; more (about a millisecond) are rendered in a thread
USUAL_ROLES = frozenset({"system", "user", "assistant", "tool", "function"})
END_MARK = "[[the text to continue ends here]]"
# names that chat_template_kwargs may not set: the server or another field of the body sets them
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
        *RESERVED_NAMES,
    }
)


async def chat_prompt(context: ServerContext, body: ChatBody) -> tuple[str, list[int]]:
    """The prompt as text and as token ids."""
    await read_images(context, body)
    text = await _rendered(context, body)
    if not text:
        raise InvalidRequestError("the chat template gives an empty prompt for these messages", "messages")
    ids = await context.encode(with_image_texts(context, body, text), add_special_tokens=bool(body.add_special_tokens))
    return text, with_placeholders(context, body, ids)


def generation_prompt_len(context: ServerContext, body: ChatBody, prompt: str) -> int:
    """Tokens at the end of a prompt that the next turn of the chat may write in another way.

    Only models with recurrent layers use it.
    """
    has_states = any(isinstance(group, StateKv) for group in context.manager.limits.kv_groups)
    if not has_states or body.continue_final_message or body.truncate_prompt_tokens is not None:
        return 0
    variables, template = _variables(context, body), _template(context, body)
    return context.generation_prompts.num_tokens(context.tokenizer, template, variables, prompt)


async def _rendered(context: ServerContext, body: ChatBody) -> str:
    """A short chat is rendered at once, unless the template makes it long."""
    if not _is_long(body):
        with contextlib.suppress(TemplateLimitError):
            return _render(context, body, ON_EVENT_LOOP)
    return await asyncio.to_thread(_render, context, body, IN_THREAD)


async def generation_prompt(context: ServerContext, body: ChatBody, prompt: str, tags: Sequence[str]) -> str:
    """What the template writes after the last message, or with it if the model continues it.

    The parsers look there for the ``tags`` with which the template begins or ends the reasoning of the output. If no
    message could have written a tag at the end of the prompt, the whole prompt tells the same and is returned.
    """
    if not _has_own_tag(body, prompt, tags):
        return prompt
    before = await asyncio.to_thread(_prompt_before_output, context, body)
    return prompt[_first_difference(before, prompt) :]


def _has_own_tag(body: ChatBody, prompt: str, tags: Sequence[str]) -> bool:
    if body.continue_final_message:
        return any(tag in prompt for tag in tags)
    last = (body.messages[-1].content or "").rstrip()
    return any(last.endswith(tag) for tag in tags)


def _prompt_before_output(context: ServerContext, body: ChatBody) -> str:
    """The prompt without the assistant's turn. It is "" if the template does not render it."""
    messages = body.messages[:-1] if body.continue_final_message else body.messages
    try:
        return _apply(context, body, [for_template(message) for message in messages], False, IN_THREAD)
    except InvalidRequestError:
        return ""


def _first_difference(before: str, prompt: str) -> int:
    if prompt.startswith(before):
        return len(before)
    return next((i for i, (left, right) in enumerate(zip(before, prompt, strict=False)) if left != right), len(prompt))


def _is_long(body: ChatBody) -> bool:
    """Whether rendering may take longer than about a millisecond."""
    if len(body.messages) > LONG_CHAT or body.tools or body.documents:
        return True
    variables = (body.chat_template_kwargs or {}).values()
    return any(map(_is_long_value, variables)) or sum(map(_length, body.messages)) >= LONG_TEXT


def _is_long_value(value: Any) -> bool:
    return isinstance(value, list | dict) or (isinstance(value, str) and len(value) >= LONG_TEXT)


def _length(message: Message) -> int:
    """Characters that a template may write for a message; a tool call counts as long text."""
    return len(message.content or "") + (LONG_TEXT if message.tool_calls else 0) + len(_reasoning(message) or "")


def _reasoning(message: Message) -> str | None:
    return message.reasoning_content or message.reasoning


def _render(context: ServerContext, body: ChatBody, limits: RenderLimits) -> str:
    _check_arguments(body)
    messages = [for_template(message) for message in body.messages]
    if body.continue_final_message:
        _append_end_mark(messages[-1])
    adds_turn = not body.continue_final_message and body.add_generation_prompt is not False
    text = _apply(context, body, messages, adds_turn, limits)
    _check_custom_roles(context, body, messages, limits)
    return text.rpartition(END_MARK)[0] if body.continue_final_message else text


def _check_custom_roles(
    context: ServerContext, body: ChatBody, messages: list[dict[str, Any]], limits: RenderLimits
) -> None:
    """Refuse roles whose messages the template drops: it may know only the usual ones."""
    marks = {i: f"[message {i}]" for i, message in enumerate(messages) if message["role"] not in USUAL_ROLES}
    if not marks:
        return
    marked = [message | {"content": marks.get(i, message["content"])} for i, message in enumerate(messages)]
    text = _apply(context, body, marked, True, limits)
    for i, mark in marks.items():
        role = messages[i]["role"]
        if mark not in text:
            raise InvalidRequestError(
                f"messages.{i}.role: the model's chat template drops messages of the role {role!r}",
                f"messages.{i}.role",
            )
        context.unknown_fields.log_role(role)


def _apply(
    context: ServerContext, body: ChatBody, messages: list[dict[str, Any]], adds_turn: bool, limits: RenderLimits
) -> str:
    """Render with content None for tool calls, which some templates expect; if that fails, with empty content."""
    template = _template(context, body)
    tools = [_tool(tool) for tool in body.prompt_tools] or None
    render = partial(
        template.render,
        limits,
        tools=tools,
        documents=body.documents or None,
        add_generation_prompt=adds_turn,
        **_variables(context, body),
    )
    if any(message["role"] == "system" for message in messages):
        messages = arrange_system_messages(messages, template.system_rules)
    try:
        return render(messages=messages)
    except TemplateLimitError:
        raise
    except InvalidRequestError:
        if all(message["content"] is not None for message in messages):
            raise
    return render(messages=[message | {"content": message["content"] or ""} for message in messages])


def _template(context: ServerContext, body: ChatBody) -> ChatTemplate:
    template = body.own_template
    if template is None:
        template = context.tokenizer.choose_template(bool(body.prompt_tools), bool(body.documents))
    if body.documents and "documents" not in template.variables:
        raise InvalidRequestError("documents: the model's chat template takes no documents", "documents")
    return template


def _check_arguments(body: ChatBody) -> None:
    """Tool arguments are JSON inside JSON, which the size check of the body did not count."""
    functions = [call.called for message in body.messages for call in message.tool_calls or ()]
    check_json_size(
        "".join([function.arguments for function in functions if isinstance(function.arguments, str)]).encode()
    )


def _append_end_mark(message: dict[str, Any]) -> None:
    """Mark the end of the text, to cut off what the template writes after the message."""
    if message["content"] is None:
        raise InvalidRequestError("continue_final_message: the final message has no text", "continue_final_message")
    message["content"] += [{"type": "text", "text": END_MARK}] if isinstance(message["content"], list) else END_MARK


def _variables(context: ServerContext, body: ChatBody) -> dict[str, Any]:
    given = context.config.template_variables | body.template_variables()
    return {name: value for name, value in given.items() if name not in RESERVED}


def _tool(tool: Tool) -> dict[str, Any]:
    """Only the given fields, always in the same order: equal tools give an equal prefix for the cache."""
    function = tool.definition
    known = ("name", "description", "parameters", "strict")
    given = {name: getattr(function, name) for name in known if name in function.model_fields_set}
    return {"type": "function", "function": given | (function.model_extra or {})}


def for_template(message: Message) -> dict[str, Any]:
    """Only the given fields, because templates test whether a field is defined."""
    role = "system" if message.role == "developer" else message.role
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": _tool_calls(message),
        "reasoning_content": _reasoning(message),
    }
    given = {name: value for name, value in optional.items() if value}
    return {"role": role, "content": message.content_parts or message.content, **given}


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": function.name, "arguments": _parsed_arguments(function)},
        }
        for call, function in ((call, call.called) for call in message.tool_calls or ())
    ]


class Arguments(dict[str, Any]):
    """The arguments of a call as an object and as its JSON: most templates take the object, some the JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return f"{self}{after}"

    def __radd__(self, before: str) -> str:
        return f"{before}{self}"


def _parsed_arguments(function: Function) -> Any:
    """OpenAI's clients send JSON text. Text that is not JSON, which a model wrote, stays as it is."""
    value = function.arguments
    if isinstance(value, str | None):
        try:
            value = orjson.loads(value or "{}")
        except orjson.JSONDecodeError:
            return value
    return Arguments(value) if isinstance(value, dict) else value
