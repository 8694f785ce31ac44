"""What Ollama's clients send and read, and a server for them."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from test.httpserver.chat.tool_chats import WEATHER
from test.httpserver.openai_server import Server

# what a template shows of a model that thinks and calls tools: <tool_call> </think>
SHOW = (
    "{{ {'messages': messages, 'tools': tools, 'thinks': enable_thinking | default(1),"
    " 'effort': reasoning_effort | default(''), 'turn': add_generation_prompt} | tojson }}{# <tool_call> </think> #}"
)
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Rain?", "parameters": WEATHER}},
    {"function": {"name": "now"}},
]
END_FIELDS = [
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
]


def lines(response: httpx2.Response) -> list[dict[str, Any]]:
    """The objects of a stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def chat(server: Server, **fields: Any) -> httpx2.Response:
    return server.post("/api/chat", {"model": "tiny", "messages": [USER]} | fields)


def generate(server: Server, **fields: Any) -> httpx2.Response:
    return server.post("/api/generate", {"model": "tiny", "prompt": "Hi"} | fields)


def whole(response: httpx2.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx2.Response) -> tuple[int, str]:
    body = response.json()
    assert list(body) == ["error"]
    return response.status_code, body["error"]


def fold(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as a client puts it together."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for one in objects:
        part = one["message"]
        message["content"] += part["content"]
        if "thinking" in part:
            message["thinking"] = message.get("thinking", "") + part["thinking"]
        if "tool_calls" in part:
            message["tool_calls"] = message.get("tool_calls", []) + part["tool_calls"]
    return message
