"""Background responses through the openai client, with two HTTP processes and a scripted engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import openai

from test.api.scripted import MODEL_NAME, scripted_server
from test.waiting import wait_until


def new_client(url: str) -> openai.OpenAI:
    """Each client has a connection of its own, which may reach another of the HTTP processes."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def is_completed(client: openai.OpenAI, response_id: str) -> bool:
    return client.responses.retrieve(response_id).status == "completed"


def test_a_background_response_is_read_and_cancelled_through_any_process(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "--httpserver_workers", "2") as engine:
        for _ in range(4):
            engine.will_write("Paris.", "word " * 20_000)
            with new_client(engine.url) as client:
                short = client.responses.create(model=MODEL_NAME, input="Capital of France?", background=True)
                wait_until(partial(is_completed, client, short.id))
                long = client.responses.create(model=MODEL_NAME, input="Hi", background=True)
            with new_client(engine.url) as client:
                completed = client.responses.retrieve(short.id)
                cancelled = client.responses.cancel(long.id)

            assert (short.status, long.status) == ("queued", "queued")
            assert completed.output_text == "Paris."
            assert cancelled.status == "cancelled"
            assert len(cancelled.output_text) < 5 * 20_000


def test_a_background_response_fails_with_its_http_process(tmp_path: Path) -> None:
    def status_of(response_id: str) -> str | None:
        with new_client(engine.url) as client:
            return client.responses.retrieve(response_id).status

    with scripted_server(tmp_path, "--httpserver_workers", "2") as engine:
        engine.will_write("word " * 20_000, step_s=0.01)
        with new_client(engine.url) as client:
            long = client.responses.create(model=MODEL_NAME, input="Hi", background=True)
        wait_until(lambda: status_of(long.id) == "in_progress")

        for name in ("ls-httpserver", "ls-httpserver-1"):  # one of them has it
            engine.server.processes()[name][0].kill()

        wait_until(lambda: status_of(long.id) == "failed")
        with new_client(engine.url) as client:
            error = client.responses.retrieve(long.id).error
        assert error is not None
        assert error.message == "the HTTP process that generated this response died; send the request again"
