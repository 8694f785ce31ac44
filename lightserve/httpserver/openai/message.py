"""A chat's output in OpenAI's JSON: a whole message, or pieces of one."""

from __future__ import annotations

from typing import Any

import orjson

from lightserve.output_parsing import CallArguments, CallStart, Content, Delta, Output, Reasoning

Object = dict[str, Any]


def message_of(output: Output) -> Object:
    """A whole answer."""
    content = output.content if output.content or not output.calls else None
    message: Object = {"role": "assistant", "content": content, "refusal": None}
    if output.reasoning:
        message |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
    if output.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in output.calls
        ]
    return message


def delta_json(delta: Delta) -> bytes:
    """A piece of one, as a member of a choice."""
    return b'"delta":' + orjson.dumps(_delta(delta))


def _delta(delta: Delta) -> Object:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
