"""Streams are valid server-sent events and preserve any text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from test.fuzz.profile import FUZZ
from test.httpserver.openai_server import Server, running, tokens

MESSAGES = [{"role": "user", "content": "Hi"}]
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    "completion": ("/v1/completions", {"prompt": "x", "stream": True}),
    "response": ("/v1/responses", {"input": "x", "stream": True}),
    "message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 50, "stream": True}),
    "lightllm": ("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 50, "ignore_eos": False}}),
    "tgi": ("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 50, "details": True}}),
}
# line ends of every kind, what looks like a field, and anything else
breaks = st.sampled_from(
    ["\n", "\r", "\r\n", "\n\n", "data: ", "event: x\n", ":", "\u2028", "\x85", "\x00", "\ufeff", "\x1e"]
)
texts = st.lists(breaks | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4).map("".join)
pieces_lists = st.lists(texts, min_size=1, max_size=5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        yield server


def parsed(raw: bytes) -> Iterator[tuple[str, str]]:
    """Name and data of each event, parsed as in the HTML standard."""
    name = ""
    data: list[str] = []
    for line in re.split("\r\n|\r|\n", raw.decode().removeprefix("\ufeff")):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "", []
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value
        else:
            assert not field, f"the field {field!r} is none of ours"
    assert not data, "an event without an end"


def text_in(event: dict[str, Any]) -> str:
    """The text that an event of any API adds."""
    if "choices" in event:
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"]
        )
    if "token" in event:
        return str(event["token"]["text"])
    delta = event.get("delta")
    return str(delta if isinstance(delta, str) else (delta or {}).get("text", ""))


@pytest.mark.parametrize("name", STREAMS)
@FUZZ
@given(pieces=pieces_lists)
def test_any_text_survives_a_stream(server: Server, name: str, pieces: list[str]) -> None:
    path, body = STREAMS[name]
    server.engine.script = tokens([(100 + i, piece) for i, piece in enumerate(pieces)])

    answer = server.post(path, body)

    assert answer.status_code == 200, answer.text
    found = [(kind, json.loads(data)) for kind, data in parsed(answer.content) if data != "[DONE]"]
    assert "".join(text_in(event) for _, event in found) == "".join(pieces)
    assert all(kind == event.get("type", kind) for kind, event in found if kind)
