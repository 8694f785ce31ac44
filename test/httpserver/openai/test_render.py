"""/v1/chat/completions/render: the prompt of a chat, without generating."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from lightserve.config import HttpConfig
from test.httpserver.openai_server import Server, running
from test.real_model import smollm2_tokenizer as smol

PATH = "/v1/chat/completions/render"
MESSAGES = [{"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = replace(HttpConfig(), enable_rl=True)  # for /inference/v1/generate
    with running(tmp_path_factory.mktemp("run"), config=config) as server:
        yield server


def render(server: Server, **fields: Any) -> httpx2.Response:
    return server.post(PATH, {"messages": MESSAGES} | fields)


def test_the_prompt_is_that_of_the_chat_and_nothing_is_generated(server: Server) -> None:
    received = len(server.engine.received)

    response = render(server).json()

    text = smol().apply_chat_template(MESSAGES)
    assert response["prompt"] == text
    assert response["token_ids"] == smol().encode(text, add_special_tokens=False)
    assert response["request_id"].startswith("chatcmpl-")
    assert len(server.engine.received) == received


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": False},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Well,"}], "continue_final_message": True},
        {"truncate_prompt_tokens": 5},
        {"temperature": 0.5, "top_k": 3, "max_tokens": 7, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [4]},
        {"seed": 5, "presence_penalty": 0.5, "ignore_eos": True, "max_completion_tokens": 9},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_a_rendered_chat_generates_what_the_chat_does(server: Server, fields: dict[str, Any]) -> None:
    rendered = render(server, **fields).json()
    body = {"token_ids": rendered["token_ids"], "sampling_params": rendered["sampling_params"]}

    assert server.chat(**{"messages": MESSAGES} | fields).status_code == 200
    assert server.post("/inference/v1/generate", body).status_code == 200

    chat, tokens = server.engine.received[-2:]
    assert list(chat.prompt_ids) == list(tokens.prompt_ids) == rendered["token_ids"]
    assert tokens.params == chat.params.replace(continues_text=True)  # the space between words, which tokens lack


def test_a_chat_that_would_be_refused_is_refused(server: Server) -> None:
    refused: list[tuple[dict[str, Any], int]] = [
        ({"messages": []}, 400),
        ({"model": "none such"}, 404),
        ({"max_tokens": 100_000}, 400),
        ({"response_format": {"type": "json_schema"}}, 400),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, 400),
    ]

    assert [render(server, **fields).status_code for fields, _ in refused] == [status for _, status in refused]
    assert server.chat().status_code == 200
