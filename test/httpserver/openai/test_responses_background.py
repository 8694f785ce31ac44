"""Responses in the background: the request is answered at once, and the client polls the stored response."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lightserve.config import HttpConfig
from lightserve.httpserver.openai.responses.response import ResponsesResponse
from test.httpserver.chat.tool_chats import prompt
from test.httpserver.openai.test_responses import SHOW, create, refused
from test.httpserver.openai_server import Server, fails, rows, running, with_template
from test.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


def get(server: Server, response_id: str) -> Any:
    return server.http.get(f"/v1/responses/{response_id}").json()


def wait_for(server: Server, response_id: str, status: str) -> Any:
    wait_until(lambda: get(server, response_id)["status"] == status)
    return get(server, response_id)


def test_a_background_response_is_polled_until_it_is_completed(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")
    server.hold()

    queued = server.openai.responses.create(model="tiny", input="Hi", background=True)
    wait_for(server, queued.id, "in_progress")
    server.release()
    wait_for(server, queued.id, "completed")
    found = server.openai.responses.retrieve(queued.id)

    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    assert (found.status, found.background, found.output_text) == ("completed", True, "Hello")
    assert found.usage is not None
    assert found.usage.output_tokens == 2


def test_a_conversation_continues_after_a_background_response(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")
    server.hold()
    first = create(server, background=True)
    wait_for(server, first["id"], "in_progress")

    status, error = refused(server, previous_response_id=first["id"])
    server.release()
    wait_for(server, first["id"], "completed")
    create(server, input="And?", previous_response_id=first["id"])

    assert (status, error["param"]) == (400, "previous_response_id")
    assert [one["content"] for one in prompt(server)["messages"]] == ["Hi", "Hello", "And?"]


def test_a_background_response_is_cancelled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = server.context.manager
    monkeypatch.setattr(manager, "abort_requests", manager._abort_own_requests)  # the fake engine does not pass it on
    server.engine.script = rows("Hel", "lo")
    server.hold()
    made = create(server, background=True)
    wait_for(server, made["id"], "in_progress")

    cancelled = server.openai.responses.cancel(made["id"])
    server.release()

    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    wait_until(lambda: server.engine.received[-1].req_id in server.engine.aborted)
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        server.openai.responses.cancel(made["id"])


def test_a_background_response_that_is_deleted_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = server.context.manager
    monkeypatch.setattr(manager, "abort_requests", manager._abort_own_requests)
    server.engine.script = rows("Hel", "lo")
    server.hold()
    made = create(server, background=True)
    wait_for(server, made["id"], "in_progress")

    server.openai.responses.delete(made["id"])

    wait_until(lambda: server.engine.received[-1].req_id in server.engine.aborted)
    wait_until(lambda: manager.running_requests == 0)
    server.release()
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(made["id"])


def test_a_background_response_that_fails_is_stored_as_failed(server: Server) -> None:
    server.engine.script = fails(599, "secret", "Hel")
    made = create(server, background=True)

    found = wait_for(server, made["id"], "failed")

    assert found["error"]["code"] == "server_error"
    assert "secret" not in found["error"]["message"]


def test_a_bug_in_a_background_response_ends_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: ResponsesResponse, outs: Any) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(ResponsesResponse, "write", write)
    server.engine.script = rows("Hi")

    found = wait_for(server, create(server, background=True)["id"], "failed")

    assert "secret" not in found["error"]["message"]
    wait_until(lambda: server.context.manager.running_requests == 0)


BAD: list[dict[str, Any]] = [{"store": False}, {"stream": True}, {"background": "yes"}]


@pytest.mark.parametrize("fields", BAD)
def test_a_background_response_must_be_stored_and_is_not_streamed(server: Server, fields: dict[str, Any]) -> None:
    status, error = refused(server, **({"background": True} | fields))

    assert (status, error["param"]) == (400, "background")


def test_an_invalid_background_request_is_refused_at_once(server: Server) -> None:
    status, error = refused(server, background=True, max_output_tokens=10**6)

    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_server_that_drains_refuses_background_responses_and_finishes_those_that_run(tmp_path: Path) -> None:
    with running(tmp_path, with_template(SHOW)) as server:
        server.engine.script = rows("Hel", "lo")
        server.hold()
        made = create(server, background=True)
        wait_for(server, made["id"], "in_progress")

        server.context.manager.drain()
        status, _ = refused(server, background=True)
        has_drained = server.context.manager._drained.is_set()
        server.release()

        assert (status, has_drained) == (503, False)
        assert wait_for(server, made["id"], "completed")["output"]
        wait_until(server.context.manager._drained.is_set)


def test_background_responses_are_limited(tmp_path: Path) -> None:
    with running(tmp_path, with_template(SHOW), HttpConfig(response_store_size=1)) as server:
        server.engine.script = rows("Hel", "lo")
        server.hold()
        wait_for(server, create(server, background=True)["id"], "in_progress")

        status, error = refused(server, background=True)
        server.release()

        assert (status, error["code"], error["param"]) == (429, "rate_limit_exceeded", "background")
        assert "the limit is 1 (--response_store_size)" in error["message"]
        wait_until(lambda: server.post("/v1/responses", {"input": "Hi", "background": True}).status_code == 200)


def test_without_a_store_there_are_no_background_responses(tmp_path: Path) -> None:
    with running(tmp_path, with_template(SHOW), HttpConfig(response_store_size=0)) as server:
        status, error = refused(server, background=True)

        assert (status, error["param"]) == (400, "background")


def test_a_background_response_that_cannot_be_stored_is_aborted(tmp_path: Path) -> None:
    with running(tmp_path, with_template(SHOW), HttpConfig(response_store_bytes=100)) as server:
        server.hold()

        response = server.post("/v1/responses", {"input": "Hi", "background": True})

        assert response.status_code == 503
        assert "--response_store_bytes" in response.json()["error"]["message"]
        assert server.context.manager.running_requests == 0
        server.release()
