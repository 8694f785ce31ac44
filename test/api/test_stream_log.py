"""--stream_log: a client that lost its connection comes back for the rest of its stream, wherever that is."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from test.api.event_client import Event, EventClient
from test.api.scripted import write_model
from test.api.server import ServerProcess, running_server
from test.waiting import wait_until
from test.worker.kv.block_store.redis_server import redis_server

pytestmark = pytest.mark.slow

COMPLETE, CHAT, MESSAGES, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/generate_stream"
USER = [{"role": "user", "content": "Hello"}]
BODY = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
# each with the same text every time
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETE, BODY),
    "chat": (CHAT, {"messages": USER, "max_tokens": 100, "ignore_eos": True, "stream": True}),
    "messages": (MESSAGES, {"messages": USER, "max_tokens": 100, "ignore_eos": True, "stream": True}),
    "lightllm": (GENERATE, {"inputs": "Once", "parameters": {"max_new_tokens": 100, "ignore_eos": True}}),
    "tgi": (GENERATE, {"inputs": "Once", "parameters": {"max_new_tokens": 100, "details": True}}),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 100, "ignore_eos": True, "stream": True}),
}


def serve(folder: Path, *flags: str) -> Any:
    """A server whose worker takes 10 ms for a token, so that a stream of 100 can be cut."""
    write_model(folder / "model")
    null = ("--null_worker", "--null_step_ms", "10", "--model_dir", str(folder / "model"))
    return running_server(folder / "log", *null, *flags)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as address:
        yield f"redis://{address}/1"


@pytest.fixture(scope="module")
def server(redis: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--httpserver_workers", "2", "--api_key", "ours", "theirs", "--stream_log", redis, "--stream_log_ttl", "3")
    with serve(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


def ask(server: ServerProcess, path: str, body: dict[str, Any], last_id: str | None = None) -> EventClient:
    return EventClient(server.url, path, body, last_id, Authorization="Bearer ours")


def texts(events: list[Event]) -> list[str]:
    """The events without what differs from request to request."""
    changing = ("id", "created", "created_at", "seed", "item_id", "usage", "completed_at")

    def cleaned(value: Any) -> Any:
        if isinstance(value, list):
            return [cleaned(item) for item in value]
        if isinstance(value, dict):
            return {name: cleaned(item) for name, item in value.items() if name not in changing}
        return value

    return [event.data if event.data == "[DONE]" else str(cleaned(event.json)) for event in events]


@pytest.mark.parametrize("api", APIS)
def test_a_stream_that_was_cut_and_resumed_is_whole(server: ServerProcess, api: str) -> None:
    path, body = APIS[api]
    whole = ask(server, path, body).read_all()
    first = ask(server, path, body)
    first.read(20)
    first.close()

    resumed = ask(server, path, body, first.last_id)

    assert resumed.status == 200
    found = first.events + resumed.read_all()
    assert texts(found) == texts(whole)
    numbers = [int((event.id or "").rpartition(".")[2]) for event in found]
    assert numbers == list(range(1, len(whole) + 1))


def test_a_stream_can_be_resumed_many_times_and_after_its_end(server: ServerProcess) -> None:
    whole = ask(server, COMPLETE, BODY).read_all()
    client = ask(server, COMPLETE, BODY)
    found: list[Event] = []
    while len(found) < 90:
        found += client.read(10)
        client.close()
        client = ask(server, COMPLETE, {}, found[-1].id)
    found += client.read_all()
    again = ask(server, COMPLETE, {}, found[-3].id).read_all()
    nothing = ask(server, COMPLETE, {}, found[-1].id).read_all()

    assert texts(found) == texts(whole)
    assert [event.id for event in again] == [event.id for event in found[-2:]]
    assert nothing == []


def test_another_key_and_another_endpoint_do_not_get_the_stream(server: ServerProcess) -> None:
    client = ask(server, COMPLETE, BODY)
    client.read(5)
    others = EventClient(server.url, COMPLETE, BODY, client.last_id, Authorization="Bearer theirs")
    elsewhere = ask(server, CHAT, BODY, client.last_id)
    stranger = EventClient(server.url, COMPLETE, BODY, client.last_id)

    assert (others.status, others.error()["code"]) == (404, "stream_not_found")
    assert elsewhere.status == 404
    assert stranger.status == 401
    client.close()


@pytest.mark.parametrize("last_id", ["nonsense", "A" * 22 + ".7", "A" * 22, "7"])
def test_an_unknown_stream_is_an_error_that_says_so(server: ServerProcess, last_id: str) -> None:
    client = ask(server, COMPLETE, BODY, last_id)

    assert client.status == 404
    assert "there is no such stream: it has expired (--stream_log_ttl)" in client.error()["message"]


def running(server: ServerProcess) -> float:
    """As an operator sees it."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": "Bearer ours"})
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("lightserve_num_requests_running{")).split()[-1])


def test_a_stream_that_nobody_comes_back_for_is_aborted_after_the_ttl(server: ServerProcess) -> None:
    long = BODY | {"max_tokens": 5000}
    client = ask(server, COMPLETE, long)
    client.read(5)
    client.close()

    wait_until(lambda: running(server) == 1)
    wait_until(lambda: running(server) == 0)  # it would take 50 s
    assert ask(server, COMPLETE, long, client.last_id).status == 404


def test_a_stream_that_is_read_elsewhere_outlives_the_ttl(server: ServerProcess) -> None:
    body = BODY | {"max_tokens": 700}  # more than 7 s
    client = ask(server, COMPLETE, body)
    client.read(5)
    client.close()

    found = ask(server, COMPLETE, body, client.last_id).read_all()

    assert len(client.events) + len(found) == 701
    assert found[-1].data == "[DONE]"


def test_without_a_stream_log_events_have_no_ids(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        events = EventClient(server.url, COMPLETE, BODY).read_all()
        ignored = EventClient(server.url, COMPLETE, BODY, "A" * 22 + ".7")

        assert {event.id for event in events} == {None}
        assert ignored.status == 200


def redis_process(address: str) -> psutil.Process:
    """The one of the test, which shows its address as its title."""
    return next(one for one in psutil.Process().children() if address in " ".join(one.cmdline()))


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_redis_that_hangs_or_dies_breaks_no_stream(tmp_path: Path, number: signal.Signals) -> None:
    with redis_server(tmp_path) as address, serve(tmp_path, "--stream_log", f"redis://{address}") as server:
        whole = EventClient(server.url, COMPLETE, BODY).read_all()
        client = EventClient(server.url, COMPLETE, BODY | {"max_tokens": 300})
        client.read(20)

        redis_process(address).send_signal(number)
        events = client.read_all()
        later = EventClient(server.url, COMPLETE, BODY).read_all()
        resumed = EventClient(server.url, COMPLETE, BODY, client.events[10].id)

        assert len(events) == 301
        assert texts(events)[:90] == texts(whole)[:90]
        assert events[-1].id is None  # it cannot be resumed, so it has none
        assert texts(later) == texts(whole)
        assert resumed.status == 503
        wait_until(lambda: server.metrics()["resumable_streams_lost_total"] >= 1)
        server.wait_for_log("streams go on without it, and cannot be resumed")
        assert "Traceback" not in server.log
