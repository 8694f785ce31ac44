"""The response of /v1/chat/completions/render: what a chat would send to the engine, as vLLM's /inference/v1/generate
takes it.
"""

from __future__ import annotations

from typing import Any

from lightserve.httpserver.chat.prepare import PreparedChat
from lightserve.httpserver.fields.sampling import PARAM_NAMES
from lightserve.httpserver.http.body import JsonObject

ID_PREFIX = "chatcmpl-"
# field of sampling_params: generation parameter
SAMPLING = {
    **PARAM_NAMES,
    "max_tokens": "max_new_tokens",
    "seed": "seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
}


def rendered(chat: PreparedChat, model: str) -> JsonObject:
    prompt_request = chat.prompt_requests[0]
    return {
        "request_id": ID_PREFIX + chat.log.request_id,
        "model": model,
        "prompt": chat.prompt,
        "token_ids": prompt_request.prompt_ids,
        "features": None,
        "sampling_params": {name: _plain(prompt_request.params.get(key)) for name, key in SAMPLING.items()},
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
