"""What the contract names for a later version: a request that uses it is refused, never half obeyed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightserve.errors import InvalidRequestError, NotSupportedYetError


def _is_given(value: Any) -> bool:
    return True


def _is_not(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: value not in harmless


# field: whether a value that is not null asks for it
LATER: dict[str, Callable[[Any], bool]] = {
    "tools": _is_given,
    "tool_choice": _is_not("none"),
    "functions": _is_given,
    "function_call": _is_not("none"),
    "response_format": _is_not({"type": "text"}),
    "structured_outputs": _is_given,
    "guided_json": _is_given,
    "guided_regex": _is_given,
    "guided_choice": _is_given,
    "guided_grammar": _is_given,
    "regular_constraint": bool,
    "json_schema": _is_given,
    "regex": _is_given,
    "ebnf": _is_given,
    "prompt_logprobs": _is_given,
    "prompt_embeds": _is_given,
    "suffix": bool,
    "modalities": _is_not(["text"]),
    "audio": bool,
    "documents": bool,
    "thinking_token_budget": _is_given,
    "include_reasoning": _is_not(True),
    "lora_request": _is_given,
    "lora_path": _is_given,
    "adapter_id": _is_given,
    "return_token_ids": bool,
    "return_tokens_as_token_ids": bool,
    "logprob_token_ids": bool,
    "kv_transfer_params": _is_given,
    "repetition_detection": _is_given,
}


def refuse_later(value: dict[str, Any]) -> None:
    for name, asks_for_it in LATER.items():
        given = value.get(name)
        if given is not None and asks_for_it(given):
            raise NotSupportedYetError(name, name)
    if value.get("chat_template") is not None:
        raise InvalidRequestError("chat_template: a request cannot bring its own", "chat_template")
    if value.get("echo") is True:
        _refuse_scoring(value)


def _refuse_scoring(value: dict[str, Any]) -> None:
    if "messages" in value:
        raise NotSupportedYetError("echo in a chat", "echo")
    if value.get("logprobs") is not None:
        raise NotSupportedYetError("echo with logprobs", "logprobs")
    if value.get("max_tokens") == 0:
        raise NotSupportedYetError("echo with max_tokens 0", "max_tokens")
