"""Sleep and wake up over a real server with a tiny model: the workers stop, the router keeps the requests."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmark.models import TINY, save_model
from lightserve.utils.drivers import may_have_gpu
from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = 1500  # runs until it is aborted
MOVES_WEIGHTS = may_have_gpu("cuda")  # to the host: the workers stay
KV_METHOD = "kv_unmapped" if may_have_gpu("cuda") else "kv_freed"  # GPUs keep its addresses
KEPT = 250  # tokens: more than come before a sleep that follows the first one


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("sleep")
    model = root / "model"
    model.mkdir()
    save_model(model, None, TINY)
    flags = ("--load_format", "dummy", "--max_total_token_num", "4096", "--max_req_total_len", "2048", "--enable_rl")
    with running_server(root / "log", "--model_dir", str(model), *flags) as server:
        yield server


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def generate(server: ServerProcess, tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    status, response = server.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    assert status == 200, response
    assert isinstance(response, dict)
    return response


def start(server: ServerProcess, clients: ThreadPoolExecutor) -> Future[dict[str, Any]]:
    before = server.metrics()["generation_tokens_total"]
    running = clients.submit(generate, server, LONG)
    wait_until(lambda: server.metrics()["generation_tokens_total"] > before or running.done())
    return running


def workers(server: ServerProcess) -> int:
    return sum(len(found) for name, found in server.processes().items() if "worker" in name)


class Stream:
    """A request whose first token has come."""

    def __init__(self, server: ServerProcess, tokens: int) -> None:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": PROMPT, "sampling_params": sampling, "stream": True}).encode()
        request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
        self._response = urllib.request.urlopen(request, timeout=RESPONSE_S)
        self.first = json.loads(self._response.readline().removeprefix(b"data: "))

    def output_ids(self) -> list[int]:
        """Wait for its end. An event has all tokens so far."""
        events = [line for line in self._response if line.startswith(b"data: {")]
        ids: list[int] = json.loads(events[-1].removeprefix(b"data: "))["output_ids"]
        return ids


def test_a_kept_request_goes_on_after_a_sleep_with_the_same_text(
    server: ServerProcess, clients: ThreadPoolExecutor
) -> None:
    whole = generate(server, KEPT)["output_ids"]
    restarts = server.metrics()["worker_restarts_total"]
    running = Stream(server, KEPT)

    status, slept = server.post("/sleep?level=2&mode=keep", {})

    assert (status, slept) == (200, {"status": "sleeping", "level": 2, "method": "workers_stopped"})
    assert workers(server) == 0
    assert 0 < len(running.first["output_ids"]) < KEPT
    waiting = clients.submit(generate, server, 3)
    wait_until(lambda: not server.is_healthy())
    status, woken = server.post("/wake_up", {})
    assert server.is_healthy()  # at once: trainers look at it
    assert (status, woken["status"], woken["method"]) == (200, "awake", "workers_stopped")
    assert woken["seconds"] > 0
    assert running.output_ids() == whole
    assert waiting.result()["output_ids"] == whole[:3]
    assert server.metrics()["worker_restarts_total"] == restarts
    server.wait_for_log("awake: the workers are ready after")


def test_tags_are_released_and_resumed_one_after_the_other(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    running = start(server, clients)

    assert server.post("/release_memory_occupation", {}) == (200, None)

    assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert bool(workers(server)) is MOVES_WEIGHTS
    waiting = clients.submit(generate, server, 3)
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}) == (200, None)
    assert workers(server) > 0
    assert not waiting.done()
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}) == (200, None)
    assert len(waiting.result()["output_ids"]) == 3


def test_the_kv_cache_alone_is_freed_and_taken_again(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    whole = generate(server, KEPT)["output_ids"]
    running = Stream(server, KEPT)
    before = server.processes()["ls-worker"]

    assert server.post("/release_kv_cache_memory?mode=keep", {}) == (200, {"status": "kv_cache_released"})

    waiting = clients.submit(generate, server, 3)
    wait_until(lambda: server.metrics()["num_requests_waiting"] == 2)
    status, woken = server.post("/wake_up?tags=kv_cache", {})
    assert (status, woken["status"], woken["method"]) == (200, "awake", KV_METHOD)
    assert server.processes()["ls-worker"] == before
    assert running.output_ids() == whole
    assert waiting.result()["output_ids"] == whole[:3]


def test_workers_that_die_without_their_kv_cache_come_back_with_it(
    server: ServerProcess, clients: ThreadPoolExecutor
) -> None:
    whole = generate(server, 3)["output_ids"]
    assert server.post("/release_memory_occupation", {"tags": ["kv_cache"]}) == (200, None)
    restarts = server.metrics()["worker_restarts_total"]

    server.processes()["ls-worker"][0].send_signal(signal.SIGKILL)

    wait_until(lambda: server.metrics()["worker_restarts_total"] > restarts)
    waiting = clients.submit(generate, server, 3)
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
    assert waiting.result()["output_ids"] == whole


def test_an_unknown_tag_is_named(server: ServerProcess) -> None:
    status, response = server.post("/release_memory_occupation", {"tags": ["graphs"]})

    assert status == 400
    assert "'graphs' is unknown; known are weights, kv_cache, cuda_graph" in response["error"]["message"]


def test_a_worker_that_dies_while_it_wakes_up_is_replaced(server: ServerProcess, clients: ThreadPoolExecutor) -> None:
    whole = generate(server, 3)["output_ids"]
    assert server.post("/sleep?level=2", {})[0] == 200
    waking = clients.submit(server.post, "/wake_up", {})
    wait_until(lambda: workers(server) > 0)

    for name, found in server.processes().items():
        if "worker" in name:
            for process in found:
                process.send_signal(signal.SIGKILL)

    assert waking.result()[0] == 200
    assert generate(server, 3)["output_ids"] == whole


def test_a_server_that_sleeps_shuts_down(server: ServerProcess) -> None:
    """The last test of this server."""
    assert server.post("/sleep", {})[0] == 200

    assert server.stop() == 0
