"""What ``LLM.chat`` takes: one conversation, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

from lightserve.errors import InvalidRequestError

Conversation = Sequence[dict[str, Any]]  # messages in OpenAI's format


def is_conversation(messages: Any) -> TypeGuard[Conversation]:
    """Whether these are not several conversations. It may be wrong in other ways."""
    return not _is_list(messages) or isinstance(messages[0], Mapping)


def check_conversation(messages: Any) -> None:
    if not _is_list(messages) or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise InvalidRequestError(
            f"messages: {repr(messages)[:100]} is no conversation; a conversation is a list of messages such as "
            '{"role": "user", "content": "Hi"}, and chat takes one or a list of several',
            "messages",
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0


def is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
