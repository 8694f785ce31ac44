"""Several engines behind one port: the same text as one engine, whatever dies."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.api.test_restart import KINDS, Clients, clients_of
from test.waiting import wait_until

pytestmark = pytest.mark.slow

COMPLETE = "/v1/completions"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KV_TOKENS = "8192"
BACK_S = 120.0  # for an engine to come back on a loaded machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose context has room for responses that can be interrupted."""
    from test.small_text import save_small_model  # here, because it imports transformers

    return Path(save_small_model(tmp_path_factory.mktemp("model"), context_len=2048))


def serve(folder: Path, log: Path, *flags: str) -> Any:
    return running_server(
        log, "--model_dir", str(folder), "--deterministic", "--max_total_token_num", KV_TOKENS, *flags
    )


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(model, tmp_path_factory.mktemp("one") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(model, tmp_path_factory.mktemp("two") / "log", "--dp", "2", "--profile_dir", str(model / "p")) as server:
        yield server


def bodies() -> list[dict[str, Any]]:
    """Every kind of sampling."""
    return [{"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True, "stream": True} | kind for kind in KINDS]


@pytest.fixture(scope="module")
def expected(one: ServerProcess) -> list[Any]:
    with clients_of(one) as clients:
        return [answer.result() for answer in clients.ask(bodies())]


def ask_while(server: ServerProcess, break_it: Any) -> list[Any]:
    """The responses to all kinds of requests. Something breaks in the middle of them."""
    with clients_of(server) as clients:
        asked = clients.ask(bodies())
        wait_until(lambda: clients.events > 40)
        break_it(clients)
        return [answer.result() for answer in asked]


def moved(server: ServerProcess) -> float:
    return server.metrics()["dp_requests_moved_total"]


def kill(server: ServerProcess, name: str) -> None:
    server.processes()[name][0].send_signal(signal.SIGKILL)


def test_two_engines_give_the_same_text_as_one(two: ServerProcess, expected: list[Any]) -> None:
    with clients_of(two) as clients:
        found = [answer.result() for answer in clients.ask(bodies())]

    assert found == expected
    names = set(two.processes())
    assert {"ls-dispatcher", "ls-router", "ls-router-1", "ls-worker", "ls-worker-1"} <= names
    wait_until(lambda: all(f": engine {engine}: " in two.log for engine in (0, 1)))  # lines say which one logs them
    metrics = two.settled_metrics()
    assert metrics["num_requests_running"] == 0
    assert metrics["request_failed_total"] == 0
    assert moved(two) == 0


def test_an_engine_whose_router_is_killed_loses_no_request(two: ServerProcess, expected: list[Any]) -> None:
    before = moved(two)

    found = ask_while(two, lambda _: kill(two, "ls-router-1"))

    assert found == expected
    two.wait_for_log("router of engine 1 died (signal 9); restarting engine 1")
    wait_until(lambda: moved(two) > before)
    wait_until(lambda: "engine 1 is back" in two.log, BACK_S)
    wait_until(lambda: two.metrics()["dp_engine_restarts_total"] == 1)


def test_an_engine_whose_worker_is_killed_loses_no_request(two: ServerProcess, expected: list[Any]) -> None:
    before = moved(two)

    def kill_worker(clients: Clients) -> None:
        kill(two, "ls-worker")
        seen = clients.events
        wait_until(lambda: clients.events > seen)  # tokens come from the other engine at once
        assert two.is_healthy()

    found = ask_while(two, kill_worker)

    assert found == expected
    wait_until(lambda: moved(two) > before)
    wait_until(lambda: "a new model worker is ready" in two.log, BACK_S)


def test_prompts_with_a_common_beginning_are_found_in_the_cache_as_often_as_with_one_engine(
    one: ServerProcess, two: ServerProcess
) -> None:
    prompts = [[7 + number % 3] * 320 + [10 + number, 5, 6] for number in range(60)]

    def hits(server: ServerProcess) -> float:
        before = server.settled_metrics()["prefix_cache_hits_total"]
        with ThreadPoolExecutor(6) as pool:
            for status, response in pool.map(lambda ids: ask(server, prompt=ids, max_tokens=2), prompts):
                assert status == 200, response
        return server.settled_metrics()["prefix_cache_hits_total"] - before

    assert hits(two) >= 0.9 * hits(one)


def ask(server: ServerProcess, **body: Any) -> tuple[int, Any]:
    return server.post(COMPLETE, {"temperature": 0, "ignore_eos": True} | body)


def get(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=RESPONSE_S) as response:
        return json.load(response)


def test_the_other_endpoints_answer_for_all_engines(two: ServerProcess) -> None:
    for number in range(4):
        status, _ = server_post_with_id(two, number)
        assert status == 200

    listed = {one["request_id"] for one in get(two, "/debug/requests")["requests"]}
    details = get(two, "/debug/requests/dp-2")["sequences"]
    info = get(two, "/get_server_info")
    started, stopped = two.post("/start_profile", {}), two.post("/stop_profile", {})

    assert {f"dp-{number}" for number in range(4)} <= listed
    assert details[0]["events"][-1]["event"] == "finished"
    assert info["limits"]["max_total_token_num"] == 2 * int(KV_TOKENS)
    assert info["unhealthy_reason"] is None
    assert started[0] == 200
    paths = stopped[1]["path"].split(", ")
    assert [Path(path).parent.name for path in paths] == ["engine-0", "engine-1"]
    assert all(Path(path).is_file() for path in paths)


def server_post_with_id(server: ServerProcess, number: int) -> tuple[int, Any]:
    return server.post(COMPLETE, {"prompt": PROMPT, "max_tokens": 2}, **{"X-Request-Id": f"dp-{number}"})


def test_a_stopped_server_finishes_its_requests_first(two: ServerProcess, expected: list[Any]) -> None:
    def stop(_: Clients) -> None:
        two.process.send_signal(signal.SIGTERM)

    assert ask_while(two, stop) == expected
    assert two.process.wait(BACK_S) == 0
