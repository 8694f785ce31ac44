"""The scripted engine, which the tests of agents rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from test.api.scripted import MODEL_NAME, scripted_server

TOOL = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a b"}}\n</tool_call>'


def test_the_scripted_engine_writes_given_texts_and_caches_prompts(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read it. " * 50}]
    body = {"model": MODEL_NAME, "messages": messages, "tools": [TOOL]}

    with scripted_server(tmp_path) as engine:
        engine.will_write("Meant for another prompt.", when="unknown words")
        engine.will_write(CALL, "<think>\nHm.\n</think>\n\nDone.")
        _, first = engine.server.post("/v1/chat/completions", body)
        call = first["choices"][0]["message"]["tool_calls"][0]
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "text"})
        _, second = engine.server.post("/v1/chat/completions", body)

    assert call["function"] == {"name": "read", "arguments": '{"path": "a b"}'}
    assert second["choices"][0]["message"]["reasoning"] == "Hm."
    assert second["choices"][0]["message"]["content"] == "Done."
    assert second["choices"][0]["finish_reason"] == "stop"
    cached_tokens = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] <= cached_tokens < second["usage"]["prompt_tokens"]
