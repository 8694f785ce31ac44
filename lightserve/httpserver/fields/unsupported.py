"""Fields of OpenAI's, vLLM's and SGLang's bodies that this server does not support: it refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightserve.errors import InvalidRequestError, NotSupportedYetError


def _is_given(value: Any) -> bool:
    return True


def _is_not(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: value not in harmless


# field: whether a value that is not null uses it
UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "functions": _is_given,
    "function_call": _is_not("none"),
    "prompt_embeds": _is_given,
    "suffix": bool,
    "modalities": _is_not(["text"]),
    "audio": bool,
    "documents": bool,
    "lora_request": _is_given,
    "lora_path": _is_given,
    "adapter_id": _is_given,
    "return_token_ids": bool,
    "return_tokens_as_token_ids": bool,
    "logprob_token_ids": bool,
    "kv_transfer_params": _is_given,
    "repetition_detection": _is_given,
}


def refuse_unsupported(value: dict[str, Any]) -> None:
    for name, is_used in UNSUPPORTED.items():
        given = value.get(name)
        if given is not None and is_used(given):
            raise NotSupportedYetError(name, name)
    if "messages" not in value:
        _refuse_chat_fields(value)
    if value.get("chat_template") is not None:
        raise InvalidRequestError("chat_template: a request cannot set it", "chat_template")
    if value.get("echo") is True and "messages" in value:
        raise NotSupportedYetError("echo in a chat", "echo")
    if value.get("token_healing") is True and "messages" in value:
        raise NotSupportedYetError("token_healing in a chat", "token_healing")


def _refuse_chat_fields(value: dict[str, Any]) -> None:
    """Fields that a completion cannot have."""
    for name in ("tools", "tool_choice", "thinking_token_budget", "thinking_budget", "max_reasoning_tokens"):
        if value.get(name) not in (None, "none"):
            raise InvalidRequestError(f"{name}: only in a chat", name)
