"""The queue over HTTP: priorities, deadlines, refusals. A null worker with slow steps."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.waiting import wait_until

COMPLETE = "/v1/completions"
MODEL = "SmolLM2-135M-Instruct"
FLAGS = ("--null_worker", "--null_step_ms", "5", "--running_max_req_size", "1", "--max_queue_size", "4")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that runs one request at a time and queues up to four."""
    with running_server(tmp_path_factory.mktemp("narrow") / "log", *FLAGS) as server:
        yield server


def body(max_tokens: int = 4, **options: Any) -> dict[str, Any]:
    return {"prompt": [1, 2, 3], "max_tokens": max_tokens, **options}


@contextmanager
def busy(server: ServerProcess) -> Iterator[None]:
    """Inside the block, a request occupies the server; then its client disconnects."""
    raw = json.dumps(body(8000, stream=True)).encode()
    request = urllib.request.Request(server.url + COMPLETE, raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=RESPONSE_S):
        wait_until(lambda: server.metrics()["num_requests_running"] == 1)  # otherwise the metric may still be the old 0
        yield
    wait_until(lambda: server.metrics()["num_requests_running"] == 0)


def waiting(server: ServerProcess, count: int) -> None:
    wait_until(lambda: server.metrics()["num_requests_waiting"] == count)


def test_an_urgent_request_overtakes_waiting_ones(narrow: ServerProcess) -> None:
    ended: list[int] = []

    def ask(priority: int) -> None:
        status, _ = narrow.post(COMPLETE, body(20, priority=priority))
        assert status == 200
        ended.append(priority)

    threads = [threading.Thread(target=ask, args=(priority,)) for priority in (0, 1, -1)]
    with busy(narrow):
        for count, thread in enumerate(threads, start=1):
            thread.start()
            waiting(narrow, count)
    for thread in threads:
        thread.join(RESPONSE_S)

    assert ended == [-1, 0, 1]


def test_a_timeout_ends_a_request_that_waits(narrow: ServerProcess) -> None:
    before = narrow.metrics()["request_failed_total"]

    with busy(narrow):
        status, response = narrow.post(COMPLETE, body(timeout=0.2))

        assert (status, response["error"]["code"]) == (504, "timeout")
        wait_until(lambda: narrow.metrics()["request_failed_total"] == before + 1)
        waiting(narrow, 0)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETE, body(8000, timeout=0.3)),
        ("/generate", {"inputs": [1, 2, 3], "parameters": {"max_new_tokens": 8000, "timeout": 0.3}}),
    ],
)
def test_a_timeout_ends_a_request_that_runs_and_frees_its_memory(
    narrow: ServerProcess, path: str, asked: dict[str, Any]
) -> None:
    before = narrow.metrics()["request_failed_total"]

    status, response = narrow.post(path, asked)

    assert (status, response["error"]["code"]) == (504, "timeout")
    wait_until(lambda: narrow.metrics()["request_failed_total"] == before + 1)
    narrow.wait_until_idle()
    assert narrow.post(COMPLETE, body())[0] == 200


def test_a_stream_that_takes_too_long_ends_with_an_event(narrow: ServerProcess) -> None:
    raw = json.dumps(body(8000, timeout=0.3, stream=True)).encode()
    request = urllib.request.Request(narrow.url + COMPLETE, raw, {"Content-Type": "application/json"})

    with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
        *_, last, done, _ = response.read().split(b"\n\n")

    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "timeout"
    assert done == b"data: [DONE]"


def test_a_full_queue_refuses_and_counts_it(narrow: ServerProcess) -> None:
    before = narrow.metrics()["request_refused_total"]

    with busy(narrow):
        threads = [threading.Thread(target=narrow.post, args=(COMPLETE, body())) for _ in range(4)]
        for thread in threads:
            thread.start()
        waiting(narrow, 4)

        status, response = narrow.post(COMPLETE, body())

        assert (status, response["error"]["code"]) == (429, "rate_limit_exceeded")
    for thread in threads:
        thread.join(RESPONSE_S)
    wait_until(lambda: narrow.metrics()["request_refused_total"] == before + 1)


def test_more_prompts_than_may_wait_are_a_rate_limit_to_the_openai_client(narrow: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0, timeout=RESPONSE_S)

    with busy(narrow), pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model=MODEL, prompt=[[1, 2, 3]] * 5, max_tokens=4)

    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "1"
    response = client.completions.create(model=MODEL, prompt=[[1, 2, 3]] * 4, max_tokens=4)  # the places are free again
    assert [choice.finish_reason for choice in response.choices] == ["length"] * 4


def test_an_operators_abort_counts_as_one(narrow: ServerProcess) -> None:
    before = narrow.metrics()["request_success_total/abort"]
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(narrow.post(COMPLETE, body(8000))[0]))
    asking.start()
    wait_until(lambda: narrow.metrics()["num_requests_running"] == 1)

    narrow.post("/abort_request", {"abort_all": True})

    asking.join(RESPONSE_S)
    assert statuses == [499]
    wait_until(lambda: narrow.metrics()["request_success_total/abort"] == before + 1)


def test_evicted_prefix_cache_tokens_are_counted(narrow: ServerProcess) -> None:
    """The pool has room for one long request: the second one evicts the first one's tokens."""
    for token in (7, 8):
        assert narrow.post(COMPLETE, {"prompt": [token] * 5000, "max_tokens": 1})[0] == 200

    wait_until(lambda: narrow.metrics()["prefix_cache_evicted_tokens_total"] > 0)
    narrow.wait_until_idle()
