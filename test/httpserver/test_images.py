"""A request with an image is refused in every API. Models that read images too are served as language models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from test.httpserver.openai_server import Server, running

URL = "data:image/png;base64,aGk="


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        yield server


def says(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


REQUESTS = [
    ("/v1/chat/completions", {"messages": says({"type": "image_url", "image_url": {"url": URL}})}),
    ("/v1/responses", {"input": says({"type": "input_image", "image_url": URL})}),
    ("/v1/messages", {"max_tokens": 5, "messages": says({"type": "image", "source": {"type": "url", "url": URL}})}),
    ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "What is it?", "images": ["aGk="]}]}),
    ("/api/generate", {"model": "tiny", "prompt": "What is it?", "images": ["aGk="]}),
    ("/generate", {"inputs": "What is it?", "multimodal_params": {"images": [{"type": "base64", "data": "aGk="}]}}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
def test_a_request_with_an_image_is_told_that_the_model_answers_text_only(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    response = server.post(path, body)

    assert response.status_code == 400
    assert "is not supported yet: this model reads and answers text only" in response.text
    assert not server.engine.received
