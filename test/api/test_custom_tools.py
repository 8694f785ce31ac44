"""A conversation with a custom tool: the real openai client, the real server, a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai

from test.api.scripted import MODEL_NAME, scripted_server

PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-x = "1"\n+x = "2\\n"\n*** End Patch\n'
CALL = f"<tool_call>\n{json.dumps({'name': 'apply_patch', 'arguments': {'input': PATCH}})}\n</tool_call>"
TOOL: Any = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits files."}}


def test_a_custom_tool_is_called_and_its_result_continues_the_conversation(tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": "Fix it. " * 50}]

    with scripted_server(tmp_path) as engine, openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
        chat = client.chat.completions
        engine.will_write(CALL, CALL, "<think>\nHm.\n</think>\n\nFixed.")
        first = chat.create(model=MODEL_NAME, messages=messages, tools=[TOOL])
        chunks: list[Any] = list(chat.create(model=MODEL_NAME, messages=messages, tools=[TOOL], stream=True))
        [call] = first.choices[0].message.tool_calls or []
        messages.append(first.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Done!"})
        second = chat.create(model=MODEL_NAME, messages=messages, tools=[TOOL])

    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("apply_patch", PATCH)
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(one.custom["input"] for one in deltas) == PATCH
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert second.choices[0].message.content == "Fixed."
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens
