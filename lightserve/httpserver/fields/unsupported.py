"""Fields of OpenAI, vLLM, SGLang and others that this server does not support: they are refused, never ignored."""

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
    # OpenAI's
    "functions": _is_given,
    "function_call": _is_not("none"),
    "suffix": bool,
    "modalities": _is_not(["text"]),
    "audio": bool,
    "web_search_options": _is_given,
    # vLLM's
    "prompt_embeds": _is_given,
    "lora_request": _is_given,
    "logprob_token_ids": bool,
    "kv_transfer_params": _is_given,
    "ec_transfer_params": _is_given,
    "repetition_detection": _is_given,
    "return_prompt_text": bool,
    "vllm_xargs": bool,
    # SGLang's
    "lora_path": _is_given,
    "stop_regex": bool,
    "input_ids": _is_given,
    "task": _is_given,
    "session_params": bool,
    "custom_logit_processor": _is_given,
    "custom_params": bool,
    "return_hidden_states": bool,
    "return_routed_experts": bool,
    "return_prompt_token_ids": bool,
    "return_cached_tokens_details": bool,
    "return_spec_tokens_details": bool,
    "return_meta_info": bool,
    "return_sampling_mask": bool,
    "bootstrap_host": _is_given,
    # LightLLM's and TGI's
    "adapter_id": _is_given,
    "role_settings": bool,
    "character_settings": bool,
    # llama.cpp's
    "repeat_penalty": _is_not(1),
    "mirostat": bool,
    "dry_multiplier": bool,
    "xtc_probability": bool,
    "dynatemp_range": bool,
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
    if value.get("token_healing") is True and "messages" in value:
        raise NotSupportedYetError("token_healing in a chat", "token_healing")


def _refuse_chat_fields(value: dict[str, Any]) -> None:
    """Fields that a completion cannot have."""
    for name in (
        "documents",
        "tools",
        "tool_choice",
        "thinking_token_budget",
        "thinking_budget",
        "max_reasoning_tokens",
    ):
        if value.get(name) not in (None, "none"):
            raise InvalidRequestError(f"{name}: only in a chat", name)
