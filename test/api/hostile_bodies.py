"""Requests with long strings of a client in every place where a server may remember them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from test.api.test_faults import CHAT, COMPLETE, GENERATE, HI, JSON, Client

Request = tuple[str, dict[str, Any] | None, dict[str, str]]  # path, body and headers
MAX_PATH, MAX_HEADER = 40_000, 8_000  # characters that the server takes
HEADERS = ("X-Request-Id", "User-Agent", "X-Api-Key", "Traceparent", "X-Unknown")


def chat(**fields: Any) -> Request:
    return CHAT, {"messages": HI, "max_tokens": 1, **fields}, {}


def complete(**fields: Any) -> Request:
    return COMPLETE, {"prompt": [1, 2], "max_tokens": 1, **fields}, {}


def message(**fields: Any) -> Request:
    return CHAT, {"messages": [{"role": "user", "content": "Hi", **fields}], "max_tokens": 1}, {}


def with_headers(text: str, *names: str) -> Request:
    return "/v1/models", None, dict.fromkeys(names, text[-MAX_HEADER:])


# by what the client chooses: a request with a long text, which ends in a number that no other request has
HOSTILE: dict[str, Callable[[str], Request]] = {
    "unknown field": lambda text: chat(**{text: 1}),
    "near field": lambda text: chat(**{"max_tokens" + text[-10:]: 1, "temperatur" + text: 1}),
    "field of a message": lambda text: message(**{text: 1}),
    "field of an inner object": lambda text: (GENERATE, {"inputs": "Hi", "parameters": {text: 1}}, {}),
    "model": lambda text: chat(model=text),
    "model of Ollama": lambda text: ("/api/chat", {"model": text, "messages": HI}, {}),
    "request id": lambda text: complete(request_id=text[-128:], rid=text),
    "user": lambda text: chat(user=text),
    "salt": lambda text: complete(cache_salt=text),
    "stop string": lambda text: complete(stop=[text]),
    "role": lambda text: message(role=text),
    "name": lambda text: message(name=text),
    "template variable": lambda text: chat(chat_template_kwargs={text: text}),
    "tool": lambda text: chat(tools=[{"type": "function", "function": {"name": text[-64:], "description": text}}]),
    "key of logit_bias": lambda text: complete(logit_bias={text: 1}),
    "adapter": lambda text: ("/v1/load_lora_adapter", {"lora_name": text, "lora_path": text}, {}),
    "earlier response": lambda text: ("/v1/responses", {"input": "Hi", "previous_response_id": text}, {}),
    "metadata": lambda text: ("/v1/responses", {"input": "Hi", "max_output_tokens": 16, "metadata": {"a": text}}, {}),
    "aborted request": lambda text: ("/abort_request", {"request_id": text}, {}),
    "wrong value": lambda text: complete(temperature=text),
    "route": lambda text: ("/v1/" + text[-MAX_PATH:], {}, {}),
    "query": lambda text: (f"/v1/models?{text[-MAX_PATH:]}=1", None, {}),
    "timeline": lambda text: (f"/debug/requests/{text[-MAX_PATH:]}", None, {}),
    "stored response": lambda text: (f"/v1/responses/{text[-MAX_PATH:]}", None, {}),
    "header": lambda text: with_headers(text, *HEADERS),
    "host": lambda text: with_headers(text, "Host", *HEADERS),
}


def send(client: Client, kind: str, number: int, length: int) -> tuple[int, int]:
    """Status and size of a request whose text has this length."""
    path, body, headers = HOSTILE[kind]("k" * length + str(number))
    raw = b"" if body is None else json.dumps(body).encode()
    status, _ = client.send("GET" if body is None else "POST", path, raw, JSON | headers)
    return status, len(path) + len(raw) + sum(map(len, headers.values()))
