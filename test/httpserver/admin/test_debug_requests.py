"""GET /debug/requests in the HTTP process, with a router that replies what the test says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightserve.httpserver import router_queries
from lightserve.messages.output import RequestTimeline, TimelineEvent
from test.httpserver.admin.test_routes import with_server
from test.httpserver.app_client import Served

NOW_S = time.monotonic()
QUEUED = TimelineEvent("queued", NOW_S + 0.001)
ADMITTED = TimelineEvent("admitted", NOW_S + 0.002, tokens=64)
CHUNK = TimelineEvent("prefill", NOW_S + 0.003, 0.005, 36)
FIRST = TimelineEvent("first_token", NOW_S + 0.01, tokens=1)
PREEMPTED = TimelineEvent("preempted", NOW_S + 0.02, tokens=5)
FINISHED = TimelineEvent("finished", NOW_S + 0.5, tokens=20, detail="stop")


def timeline(*events: TimelineEvent, req_id: int = 7) -> RequestTimeline:
    return RequestTimeline("mine", req_id, NOW_S, 100, 32, list(events))


def test_a_request_shows_its_events_in_milliseconds_since_it_arrived(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        server.fake.timelines = [timeline(QUEUED, ADMITTED, CHUNK, FIRST, PREEMPTED, ADMITTED, FINISHED)]

        response = await server.get("/debug/requests/mine")

        (found,) = response.json()["sequences"]
        assert found["events"][1:4] == [
            {"event": "admitted", "at_ms": 2.0, "cached_tokens": 64},
            {"event": "prefill", "at_ms": 3.0, "duration_ms": 5.0, "tokens": 36},
            {"event": "first_token", "at_ms": 10.0, "tokens": 1},
        ]
        assert found["events"][-1] == {"event": "finished", "at_ms": 500.0, "tokens": 20, "detail": "stop"}
        assert (found["state"], found["end"], found["preemptions"]) == ("finished", "stop", 1)
        assert (found["queue_ms"], found["first_token_ms"], found["total_ms"]) == (2.0, 10.0, 500.0)
        assert (found["prompt_tokens"], found["cached_tokens"], found["output_tokens"]) == (100, 64, 20)
        assert server.fake.queries[0].request_id == "mine"

    with_server(tmp_path, check)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((QUEUED,), "waiting"),
        ((QUEUED, ADMITTED), "running"),
        ((QUEUED, ADMITTED, PREEMPTED), "waiting"),
        ((QUEUED, ADMITTED, FINISHED), "finished"),
        ((TimelineEvent("refused", NOW_S, detail="the queue is full"),), "failed"),
    ],
)
def test_the_list_shows_the_state_of_each_request(
    tmp_path: Path, events: tuple[TimelineEvent, ...], state: str
) -> None:
    async def check(server: Served) -> None:
        server.fake.timelines = [timeline(*events)]

        response = await server.get("/debug/requests?limit=5")

        (found,) = response.json()["requests"]
        assert found["state"] == state
        assert "events" not in found
        assert server.fake.queries[0].limit == 5

    with_server(tmp_path, check)


def test_an_unknown_request_is_404(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        response = await server.get("/debug/requests/nobody")

        assert response.status_code == 404
        assert response.json()["error"]["code"] == "request_not_found"
        assert "--debug_requests" in response.json()["error"]["message"]

    with_server(tmp_path, check)


@pytest.mark.parametrize("path", ["/debug/requests?limit=0", "/debug/requests?limit=x", "/debug/requests/" + "x" * 300])
def test_wrong_arguments_are_refused(tmp_path: Path, path: str) -> None:
    async def check(server: Served) -> None:
        assert (await server.get(path)).status_code == 400

    with_server(tmp_path, check)


def test_a_router_that_does_not_reply_gives_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(server: Served) -> None:
        server.context.manager.queries.resolve = lambda reply: None  # type: ignore[method-assign]

        response = await server.get("/debug/requests")

        assert response.status_code == 503
        assert "did not reply" in response.json()["error"]["message"]
        assert not server.context.manager.queries._open

    monkeypatch.setattr(router_queries.RouterQueries.ask, "__defaults__", (0.05,))
    with_server(tmp_path, check)
