"""A worker that dies under a real server: no text is lost or changed."""

from __future__ import annotations

import http.client
import json
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from test.api.poisoned_worker import POISON
from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.test_numerics import BAD_TOKEN, save_spoilt_model
from test.waiting import wait_until

pytestmark = pytest.mark.slow

COMPLETE = "/v1/completions"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 40}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.3, "seed": 7},
    {"temperature": 0.9, "seed": 5, "top_k": 30, "repetition_penalty": 1.1, "logprobs": 2},
    {"temperature": 1.0, "seed": 3, "guided_json": NUMBERS},
    {"temperature": 0, "guided_regex": "[ab]{60,80}"},
    {"temperature": 0, "prompt_logprobs": 1, "stream": False},
    {"temperature": 1.0, "seed": 1, "top_k": 20, "n": 2},
    {"use_beam_search": True, "n": 3, "stream": False, "max_tokens": 40},
    {"temperature": 0, "no_repeat_ngram_size": 4},
    {"temperature": 0.3, "seed": 2, "top_k": 5, "first_allowed_token_ids": [1, 2, 3]},
]
POISONED = (
    "-c",
    "import sys; from lightserve.server.api_server import main; from lightserve.server.process_group import Modules; "
    "sys.exit(main(modules=Modules(null_worker='test.api.poisoned_worker')))",
)
NULL = ("--null_worker", "--null_step_ms", "20")


class Clients:
    """Requests in flight, each in its own thread, and the total number of events received."""

    def __init__(self, server: ServerProcess, threads: ThreadPoolExecutor) -> None:
        self.events = 0
        self._server = server
        self._threads = threads

    def ask(self, bodies: list[dict[str, Any]]) -> list[Future[list[Any]]]:
        return [self._threads.submit(self._answer, body) for body in bodies]

    def _answer(self, body: dict[str, Any]) -> list[Any]:
        """The choices, joined if streamed; an error unchanged."""
        place = urlsplit(self._server.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=RESPONSE_S)
        connection.request("POST", COMPLETE, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if not body["stream"] or response.status != 200:
            parsed = json.load(response)
            return comparable(parsed["choices"]) if response.status == 200 else [response.status, parsed["error"]]
        pieces: dict[int, list[Any]] = defaultdict(list)
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return [event["error"]]
                for choice in event["choices"]:
                    pieces[choice["index"]].append(choice)
                self.events += 1
        return comparable([joined(pieces[index]) for index in sorted(pieces)])


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = [piece["logprobs"] for piece in pieces if piece.get("logprobs")]
    return {
        "text": "".join(piece["text"] for piece in pieces),
        "finish_reason": pieces[-1]["finish_reason"],
        "logprobs": [logprob for part in logprobs for logprob in part["token_logprobs"]],
    }


def comparable(choices: list[Any]) -> list[Any]:
    """Floats without their last digits: a prompt computed at once rounds differently than token by token."""
    rounded: list[Any] = json.loads(json.dumps(choices), parse_float=lambda digits: f"{float(digits):.2f}")
    return rounded


@contextmanager
def clients_of(server: ServerProcess) -> Iterator[Clients]:
    with ThreadPoolExecutor(32) as threads:
        yield Clients(server, threads)


def kill_worker(server: ServerProcess, name: str = "ls-worker") -> None:
    wait_until(lambda: name in server.processes())
    server.processes()[name][0].send_signal(signal.SIGKILL)


def restarted(server: ServerProcess, times: int) -> Callable[[], bool]:
    return lambda: server.log.count("a new model worker is ready") == times


def deaths_of(server: ServerProcess) -> int:
    return server.log.count("died (signal 9); restarting the workers")


def health(server: ServerProcess) -> int:
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=RESPONSE_S)
    connection.request("GET", "/health")
    return connection.getresponse().status


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = save_spoilt_model(tmp_path_factory.mktemp("spoilt"))
    flags = ("--model_dir", folder, "--device", "cpu", "--max_total_token_num", "4096")
    with running_server(tmp_path_factory.mktemp("server") / "log", *flags) as server:
        yield server


def sixteen() -> list[dict[str, Any]]:
    common = {"max_tokens": 100, "ignore_eos": True, "stream": True}
    return [{**common, **KINDS[i % len(KINDS)], "prompt": [*PROMPT[: 3 + i % 6], i]} for i in range(16)]


def answers(server: ServerProcess) -> list[Any]:
    """Of requests that nothing interrupts."""
    with clients_of(server) as clients:
        return [response.result() for response in clients.ask(sixteen())]


def test_sixteen_streams_end_with_the_same_text_when_their_worker_is_killed(small: ServerProcess) -> None:
    with clients_of(small) as clients:
        whole = [response.result() for response in clients.ask(sixteen())]
        before = clients.events

        responses = clients.ask(sixteen())
        wait_until(lambda: clients.events > before + 100)
        kill_worker(small)
        again = [response.result() for response in responses]

    assert small.log.count("model worker 0 died (signal 9); restarting the workers") == 1
    assert [choice for response in whole for choice in response if "finish_reason" not in choice] == []
    assert again == whole
    wait_until(lambda: small.metrics()["worker_restarts_total"] == 1)
    wait_until(lambda: small.metrics()["kv_used_tokens"] == small.metrics()["num_requests_running"] == 0)


def test_a_request_with_a_nan_fails_and_others_in_its_batch_do_not(small: ServerProcess) -> None:
    good = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True, "ignore_eos": True}
    bad = good | {"prompt": [3, BAD_TOKEN, 4]}
    with clients_of(small) as clients:
        (alone,) = (response.result() for response in clients.ask([good]))

        responses = [response.result() for response in clients.ask([good, bad, good, bad | {"stream": False}])]

    assert responses[0] == responses[2] == alone
    for status, error in (responses[1], responses[3]):
        assert status == 500
        assert error["message"].startswith("numerical error")
        assert error["code"] == "not_computable"
    wait_until(lambda: small.metrics()["request_numerical_error_total"] == 2)


def counted(first: int, tokens: int = 100) -> dict[str, Any]:
    """A null worker counts up from the last token of the prompt."""
    return {"prompt": [5, first], "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server") / "log", *NULL, program=POISONED) as server:
        yield server


def test_a_request_that_crashes_workers_fails_and_others_continue(poisoned: ServerProcess) -> None:
    deaths = deaths_of(poisoned)
    with clients_of(poisoned) as clients:
        others = [counted(first) for first in range(100, 108)]
        whole = [response.result() for response in clients.ask(others)]
        before = clients.events

        responses = clients.ask(others)
        wait_until(lambda: clients.events > before + 20)
        (killer,) = clients.ask([counted(0) | {"prompt": [1, POISON, 2]}])
        status, error = killer.result()
        again = [response.result() for response in responses]

    assert (status, error["code"]) == (500, "not_computable")
    assert "died twice" in error["message"]
    assert again == whole
    assert deaths_of(poisoned) == deaths + 2
    assert not poisoned.has_ended


def test_a_worker_that_dies_while_idle_is_replaced(poisoned: ServerProcess) -> None:
    wait_until(lambda: health(poisoned) == 200)
    deaths = deaths_of(poisoned)
    with clients_of(poisoned) as clients:
        kill_worker(poisoned)

        wait_until(lambda: health(poisoned) == 503 or restarted(poisoned, deaths + 1)())
        (late,) = clients.ask([counted(90, tokens=5)])  # waits for the new one
        assert [choice["finish_reason"] for choice in late.result()] == ["length"]

    wait_until(lambda: health(poisoned) == 200)
    wait_until(lambda: poisoned.metrics()["worker_restarts_total"] == deaths + 1)
    assert poisoned.stop() == 0


@pytest.mark.long
@pytest.mark.tp
def test_two_ranks_are_replaced_together(tmp_path: Path) -> None:
    folder = save_spoilt_model(tmp_path)
    flags = ("--model_dir", folder, "--device", "cpu", "--max_total_token_num", "4096", "--tp", "2")
    with running_server(tmp_path / "log", *flags) as server, clients_of(server) as clients:
        whole = [response.result() for response in clients.ask(sixteen())]
        before = clients.events

        responses = clients.ask(sixteen())
        wait_until(lambda: clients.events > before + 100)
        kill_worker(server, "ls-worker-1")

        assert [response.result() for response in responses] == whole
        server.wait_for_log("model worker 1 died (signal 9); restarting the workers")
        assert server.stop() == 0


@pytest.mark.long
def test_streams_complete_although_the_worker_dies_twice(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *NULL) as server, clients_of(server) as clients:
        asks = [counted(first, tokens=200) for first in range(100, 116)]
        whole = [response.result() for response in clients.ask(asks)]

        responses = clients.ask(asks)
        for times in (1, 2):
            seen = clients.events
            wait_until(lambda: clients.events > seen + 200)  # noqa: B023  awaited at once
            kill_worker(server)
            wait_until(restarted(server, times))

        assert [response.result() for response in responses] == whole
        assert server.metrics()["request_failed_total"] == 0
        assert server.stop() == 0


@pytest.mark.long
def test_streams_complete_although_the_worker_dies_during_prefill(tmp_path: Path) -> None:
    flags = ("--null_worker", "--null_step_ms", "1000")  # a prompt of 6000 tokens takes three steps
    with running_server(tmp_path / "log", *flags) as server, clients_of(server) as clients:
        (response,) = clients.ask([counted(7, tokens=2) | {"prompt": list(range(1, 6001))}])
        wait_until(lambda: server.metrics()["num_requests_running"] == 1)

        kill_worker(server)

        assert response.result()[0]["finish_reason"] == "length"


@pytest.mark.long
def test_a_worker_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", *NULL, "--step_timeout", "4") as server, clients_of(server) as clients:
        responses = clients.ask([counted(first) for first in range(100, 108)])
        wait_until(lambda: clients.events > 50)

        server.processes()["ls-worker"][0].suspend()
        wait_until(lambda: health(server) == 503)
        ends = [response.result() for response in responses]

        assert [end[0]["finish_reason"] for end in ends] == ["length"] * 8
        server.wait_for_log("it was killed: a step has been running for")


@pytest.mark.long
@pytest.mark.parametrize("role", ["ls-router", "ls-detokenizer"])
def test_a_stopped_process_makes_health_fail_and_ends_the_server(tmp_path: Path, role: str) -> None:
    with running_server(tmp_path / "log", *NULL, "--process_timeout", "10") as server, clients_of(server) as clients:
        responses = clients.ask([counted(first, tokens=5000) for first in range(100, 104)])
        wait_until(lambda: clients.events > 20)

        server.processes()[role][0].suspend()
        wait_until(lambda: health(server) == 503, 9)

        ends = [response.result() for response in responses]
        assert all(end[0]["type"] == "service_unavailable" for end in ends)
        assert server.process.wait(30) == 1
        assert "it was killed: it did not answer for 10 s" in server.log
