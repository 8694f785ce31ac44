"""POST /invocations gives the response of the endpoint that the body is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightserve.config import HttpConfig
from test.httpserver.openai_server import Server, events, rows, running
from test.waiting import wait_until

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        server.engine.script = rows("Hel", "lo")
        yield server


def invoke(server: Server, **body: Any) -> Any:
    response = server.post("/invocations", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_messages_are_a_chat(server: Server) -> None:
    assert invoke(server, messages=[USER])["choices"][0]["message"]["content"] == "Hello"


def test_a_prompt_is_a_completion(server: Server) -> None:
    assert invoke(server, prompt="Hi", messages=None)["choices"][0]["text"] == "Hello"


def test_inputs_are_a_body_of_tgi_or_lightllm(server: Server) -> None:
    assert invoke(server, inputs="Hi") == [{"generated_text": "Hello"}]
    assert invoke(server, inputs="Hi", parameters={"ignore_eos": True})["generated_text"] == ["Hello"]


def test_a_stream_is_a_stream(server: Server) -> None:
    response = server.post("/invocations", {"messages": [USER], "stream": True, "request_id": "mine"})

    chunks = events(response)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello"
    assert response.headers["x-request-id"] == "mine"


def test_errors_are_those_of_the_endpoint(server: Server) -> None:
    chat = server.post("/invocations", {"messages": [USER], "temperature": 3})
    tgi = server.post("/invocations", {"inputs": "Hi", "parameters": {"temperature": 0.0}})

    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "temperature")
    assert (tgi.status_code, tgi.json()["error_type"]) == (422, "validation")


@pytest.mark.parametrize("body", [{}, {"input": "Hi"}, {"messages": None}], ids=str)
def test_a_body_for_no_endpoint_is_refused(server: Server, body: dict[str, Any]) -> None:
    response = server.post("/invocations", body)

    assert response.status_code == 400
    assert "messages (chat), prompt (completions) or inputs" in response.json()["error"]["message"]


def test_a_client_that_disconnects_aborts_its_request(server: Server) -> None:
    server.engine.aborted.clear()
    server.hold()
    try:
        with server.http.stream("POST", "/invocations", json={"messages": [USER], "stream": True}) as response:
            next(response.iter_lines())
        wait_until(lambda: len(server.engine.aborted) == 1)
    finally:
        server.release()


def test_it_needs_a_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run"), config=HttpConfig(api_key=["secret"])) as guarded:
        assert guarded.post("/invocations", {"messages": [USER]}).status_code == 401
