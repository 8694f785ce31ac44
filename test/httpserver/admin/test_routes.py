"""Routes about the server itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import lightserve
from lightserve.config import HttpConfig
from lightserve.httpserver.engine_client import HEARTBEAT_TIMEOUT_S, EngineState, HttpServerManager
from lightserve.messages.output import RouterStats
from lightserve.router.observability.stats import RouterMetrics
from test.httpserver.app_client import Served, served
from test.httpserver.fake_engine import LIMITS

HEALTH = ("/health", "/healthz", "/readiness")


def with_server(run_dir: Path, check: Callable[[Served], Awaitable[None]], config: HttpConfig | None = None) -> None:
    async def run() -> None:
        async with served(run_dir, config) as server:
            await check(server)

    asyncio.run(run())


def still_loading(manager: HttpServerManager) -> None:
    manager.state = EngineState.LOADING
    manager._limits = None


def silent(manager: HttpServerManager) -> None:
    manager._last_heartbeat_s = time.monotonic() - HEARTBEAT_TIMEOUT_S - 1


def stuck(manager: HttpServerManager) -> None:
    manager.stats = RouterStats(61.0, RouterMetrics().snapshot())


def without_worker(manager: HttpServerManager) -> None:
    manager.stats = RouterStats(0.0, RouterMetrics().snapshot(), has_workers=False)


TROUBLES = [
    (still_loading, "the model is loading"),
    (HttpServerManager.drain, "the server is shutting down"),
    (lambda manager: manager.engine_died("a worker died"), "a worker died"),
    (silent, "the engine does not answer"),
    (stuck, "a step has been running for 61 s"),
    (without_worker, "the model worker died; another one is starting, and requests wait for it"),
]


def test_a_warm_engine_is_healthy(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        for path in HEALTH:
            response = await server.get(path)
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        for path in ("/health", "/healthz"):
            assert (await server.http.head(path)).status_code == 200
        assert (await server.post("/readiness")).status_code == 200

    with_server(tmp_path, check)


@pytest.mark.parametrize(("befall", "reason"), TROUBLES, ids=[reason for _, reason in TROUBLES])
def test_health_gives_the_reason_why_it_is_not_ready(
    tmp_path: Path, befall: Callable[[HttpServerManager], None], reason: str
) -> None:
    async def check(server: Served) -> None:
        befall(server.context.manager)

        for path in HEALTH:
            response = await server.get(path)
            assert (response.status_code, response.json()["error"]["message"]) == (503, reason)
        assert (await server.http.head("/health")).status_code == 503

    with_server(tmp_path, check)


@pytest.mark.parametrize(("befall", "reason"), TROUBLES, ids=[reason for _, reason in TROUBLES])
def test_liveness_and_metrics_work_whatever_the_state_of_the_engine(
    tmp_path: Path, befall: Callable[[HttpServerManager], None], reason: str
) -> None:
    async def check(server: Served) -> None:
        befall(server.context.manager)

        for response in (await server.get("/liveness"), await server.post("/liveness"), await server.get("/ping")):
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        metrics = await server.get("/metrics")
        assert metrics.status_code == 200
        assert 'lightserve_engine_up{model_name="tiny"} 0.0' in metrics.text

    with_server(tmp_path, check)


def test_the_models_are_listed_with_the_longest_request(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        listed = (await server.get("/v1/models")).json()

        (card,) = listed["data"]
        assert listed["object"] == "list"
        assert card == {
            "id": "tiny",
            "object": "model",
            "created": server.context.created,
            "owned_by": "lightserve",
            "root": "tiny",
            "parent": None,
            "max_model_len": LIMITS.max_req_total_len,
            "permission": [],
        }
        assert (await server.get("/v1/models/tiny")).json() == card

    with_server(tmp_path, check)


def test_a_draining_server_still_lists_its_model_and_a_loading_one_does_not(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        server.context.manager.drain()
        assert (await server.get("/v1/models")).status_code == 200

        still_loading(server.context.manager)
        response = await server.get("/v1/models")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"

    with_server(tmp_path, check)


@pytest.mark.parametrize("name", ["gpt-4", "org/model", "tiny/", "a/b/c/d", "x" * 5000])
def test_an_unknown_model_is_not_found(tmp_path: Path, name: str) -> None:
    async def check(server: Served) -> None:
        response = await server.get(f"/v1/models/{name}")

        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert response.json()["error"]["type"] == "not_found_error"
        assert len(response.content) < 1000

    with_server(tmp_path, check)


def test_small_endpoints_return_their_values(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        assert (await server.get("/version")).json() == {"version": lightserve.__version__}
        assert (await server.get("/get_model_name")).json() == {"model_name": "tiny"}
        assert (await server.post("/get_model_name")).json() == {"model_name": "tiny"}
        assert (await server.get("/load")).json() == {"server_load": 0}

    with_server(tmp_path, check)


def test_the_load_is_the_share_of_the_kv_pool(tmp_path: Path) -> None:
    def load(share: float) -> dict[str, float]:
        return {"current_load": share, "logical_max_load": share, "dynamic_max_load": share}

    async def check(server: Served) -> None:
        assert (await server.get("/token_load")).json() == load(0.0)

        metrics = RouterMetrics()
        metrics.set_load(running=2, waiting=0, used_tokens=1024, total_tokens=4096)
        server.context.manager.stats = RouterStats(0.0, metrics.snapshot())

        assert (await server.get("/token_load")).json() == load(0.25)

    with_server(tmp_path, check)


def test_metrics_show_the_last_snapshot_of_the_router(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        metrics = RouterMetrics()
        metrics.next_tokens(0.01, count=7)
        server.context.manager.stats = RouterStats(0.0, metrics.snapshot())

        after = await server.get("/metrics")

        assert after.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'lightserve_engine_up{model_name="tiny"} 1.0' in after.text
        assert 'lightserve_generation_tokens_total{model_name="tiny"} 7.0' in after.text
        assert 'vllm:generation_tokens_total{model_name="tiny",engine="0"} 7.0' in after.text

    with_server(tmp_path, check, HttpConfig(metrics_compat="vllm"))


def families(page: str) -> list[str]:
    return [family.name for family in text_string_to_metric_families(page)]


def test_a_process_that_is_ready_has_every_metric_although_the_router_sends_later(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        server.context.manager.stats = None
        paths = ("/metrics", "/token_load", "/get_server_info")
        async with asyncio.TaskGroup() as tasks:
            scrapes = [tasks.create_task(server.get(path)) for path in paths]
            done, _ = await asyncio.wait(scrapes, timeout=0.1)
            assert not done
            metrics = RouterMetrics()
            metrics.set_load(running=2, waiting=0, used_tokens=1024, total_tokens=4096)
            server.fake.send(RouterStats(0.0, metrics.snapshot()))

        page, load, info = (scrape.result() for scrape in scrapes)
        assert 'lightserve_num_requests_running{model_name="tiny"} 2' in page.text
        assert "lightserve_kv_pinned_tokens" in families(page.text)
        assert load.json()["current_load"] == info.json()["load"]["kv_usage"] == 0.25

    with_server(tmp_path, check)


@pytest.mark.parametrize("befall", [still_loading, silent])
def test_no_scrape_waits_for_an_engine_that_is_not_healthy(
    tmp_path: Path, befall: Callable[[HttpServerManager], None]
) -> None:
    async def check(server: Served) -> None:
        server.context.manager.stats = None
        befall(server.context.manager)

        page = await server.get("/metrics")

        assert families(page.text) == ["lightserve_engine_up"]

    with_server(tmp_path, check)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"request_id": "a"}, "a"),
        ({"rid": "b"}, "b"),
        ({"rid": None, "request_id": "c", "abort_all": False}, "c"),
        ({"abort_all": True}, None),
        ({"abort_all": True, "rid": "d"}, None),
        ({"request_id": 3, "abort_all": False}, "3"),
        ({"rid": 0}, "0"),
        ({"request_id": None, "abort_all": True}, None),
        ({"rid": "e", "abort_all": None}, "e"),
    ],
)
def test_requests_are_aborted_by_id_or_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, object], name: str | None
) -> None:
    aborted: list[str | None] = []

    async def check(server: Served) -> None:
        monkeypatch.setattr(server.context.manager, "abort_requests", lambda name, owner: aborted.append(name))

        response = await server.post("/abort_request", json=body)

        assert (response.status_code, response.json()) == (200, {"status": "ok"})

    with_server(tmp_path, check)
    assert aborted == [name]


def test_several_requests_are_aborted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str | None] = []

    async def check(server: Served) -> None:
        monkeypatch.setattr(server.context.manager, "abort_requests", lambda name, owner: aborted.append(name))
        assert (await server.post("/abort_request", json={"rid": ["a", 7, "a"]})).status_code == 200

    with_server(tmp_path, check)
    assert aborted == ["a", "7"]


@pytest.mark.parametrize(
    ("key", "aborts_all"), [("one", False), ("two", False), ("boss", True)], ids=["one", "two", "admin"]
)
def test_an_api_key_sees_and_aborts_only_its_own_requests(tmp_path: Path, key: str, aborts_all: bool) -> None:
    """Where no admin key is set; else these routes need it."""
    admin_keys = ["boss"] if aborts_all else []
    config = HttpConfig(api_key=["one", "two"], admin_key=admin_keys)

    async def check(server: Served) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        aborted: list[str | None] = []
        server.context.manager.abort_requests = lambda request_id, owner=None: aborted.append(owner)  # type: ignore[method-assign]
        for one in ("one", "two", key):
            body = {"prompt": [1], "request_id": f"of-{one}"}
            made = await server.post("/v1/completions", json=body, headers={"x-api-key": one})
            assert made.status_code == 200
        await server.post("/abort_request", json={"abort_all": True}, headers=headers)
        await server.get("/debug/requests", headers=headers)
        await server.get("/debug/requests/of-one", headers=headers)

        owners = [request.owner for request in server.fake.received]
        assert len({*owners[:2]}) == 2
        wanted = None if aborts_all else owners[2]
        assert [*aborted, *(query.owner for query in server.fake.queries)] == [wanted] * 3

    with_server(tmp_path, check, config)


BAD_ABORTS: tuple[Any, ...] = (
    {},
    {"rid": ""},
    {"rid": []},
    {"rid": True},
    {"rid": 1.5},
    {"abort_all": "yes"},
    {"abort_all": 1},
    [],
    None,
)


@pytest.mark.parametrize("body", BAD_ABORTS)
def test_an_abort_without_a_request_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: object
) -> None:
    aborted: list[str | None] = []

    async def check(server: Served) -> None:
        monkeypatch.setattr(server.context.manager, "abort_requests", lambda name, owner: aborted.append(name))

        response = await server.post("/abort_request", json=body)

        assert response.status_code in (400, 415)
        assert response.json()["error"]["type"] == "invalid_request_error"

    with_server(tmp_path, check)
    assert not aborted
