"""The control calls of trainers with several engines: every engine follows them, one that is replaced too."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from test.api.server import ServerProcess, running_server
from test.waiting import wait_until

pytestmark = pytest.mark.slow

BODY = {"prompt": [3, 1, 4], "max_tokens": 1500, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--null_worker", "--null_step_ms", "2", "--dp", "2", "--enable_rl", "--max_total_token_num", "8192")
    with running_server(tmp_path_factory.mktemp("dp") / "log", *flags, "--max_req_total_len", "2048") as server:
        yield server


def get(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(server.url + path) as response:
        return json.load(response)


def test_both_engines_are_ranks(server: ServerProcess) -> None:
    assert get(server, "/get_world_size") == {"world_size": 2}
    assert get(server, "/get_world_size?include_dp=false") == {"world_size": 1}


def test_requests_of_all_engines_stay_and_go_on_or_end_with_their_tokens(server: ServerProcess) -> None:
    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(server.post, "/v1/completions", BODY) for _ in range(4)]
        wait_until(lambda: server.metrics()["num_requests_running"] == 4)

        assert server.post("/pause?mode=keep", {}) == (200, {"status": "paused"})
        assert get(server, "/is_paused") == {"is_paused": True}
        assert not any(request.done() for request in running)
        assert server.post("/resume", {})[0] == 200
        assert server.post("/abort_requests", {}) == (200, {"status": "aborted", "aborted": 4})

        choices = [request.result()[1]["choices"][0] for request in running]
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 4
    assert all(0 < len(choice["token_ids"]) < 1500 for choice in choices)


def test_an_engine_that_is_replaced_during_a_pause_is_paused(server: ServerProcess) -> None:
    assert server.post("/pause?mode=keep", {})[0] == 200
    server.processes()["ls-router-0" if "ls-router-0" in server.processes() else "ls-router"][0].send_signal(
        signal.SIGKILL
    )
    server.wait_for_log("is back")
    with ThreadPoolExecutor(4) as clients:
        waiting = [clients.submit(server.post, "/v1/completions", BODY | {"max_tokens": 2}) for _ in range(4)]
        wait_until(lambda: server.metrics()["num_requests_waiting"] == 4)

        assert not any(request.done() for request in waiting)
        assert server.post("/resume", {})[0] == 200

        assert [len(request.result()[1]["choices"][0]["token_ids"]) for request in waiting] == [2] * 4


def test_all_engines_sleep_and_wake_up(server: ServerProcess) -> None:
    assert server.post("/sleep", {})[1]["method"] == "workers_stopped"
    assert not any("worker" in name for name in server.processes())
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(server.post, "/v1/completions", BODY | {"max_tokens": 2})

        assert server.post("/wake_up", {})[1]["status"] == "awake"

        assert waiting.result()[0] == 200
