"""GET /debug/requests: what happened to the last requests in the router."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import JSONResponse

from lightserve.errors import RequestNotFoundError
from lightserve.httpserver.context import ServerContext
from lightserve.messages.output import RequestTimeline, TimelineEvent, Timelines
from lightserve.messages.request import GetTimelines
from lightserve.utils.clock import unix_s

MAX_LISTED = 1000
MAX_SEQUENCES = 1000  # of one HTTP request: prompts times n
DEFAULT_LISTED = 100
MAX_ID_LENGTH = 256

# the state of a request after its last event
STATES = {
    "queued": "waiting",
    "preempted": "waiting",
    "workers_lost": "waiting",
    "moved": "waiting",
    "kv_wanted": "waiting",
    "kv_received": "waiting",
    "refused": "failed",
    "failed": "failed",
    "finished": "finished",
}


def add_debug_requests(router: APIRouter, context: ServerContext) -> None:
    queries = context.manager.queries

    @router.get("/debug/requests")
    async def list_requests(
        request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = DEFAULT_LISTED
    ) -> JSONResponse:
        """The last requests, newest first, without their events. An API key gets those that it has made."""
        owner = context.visible_owner(request)
        reply = await queries.ask(lambda query_id: GetTimelines(query_id, None, limit, owner), Timelines)
        return JSONResponse({"requests": [summary(timeline) for timeline in reply.timelines]})

    @router.get("/debug/requests/{request_id}")
    async def get_request(
        request: Request, request_id: Annotated[str, Path(min_length=1, max_length=MAX_ID_LENGTH)]
    ) -> JSONResponse:
        """What happened to the sequences of one request, oldest first. The id is X-Request-Id or a response's id."""
        owner = context.visible_owner(request)
        reply = await queries.ask(lambda query_id: GetTimelines(query_id, request_id, MAX_SEQUENCES, owner), Timelines)
        if not reply.timelines:
            raise RequestNotFoundError(
                f"there is no recorded request {request_id[:100]!r}; --debug_requests sets how many are recorded",
                "request_id",
            )
        return JSONResponse({"sequences": [details(timeline) for timeline in reversed(reply.timelines)]})


def summary(timeline: RequestTimeline) -> dict[str, Any]:
    """Times are milliseconds since the request arrived."""
    events = timeline.events
    first_token, last = _first(events, "first_token"), events[-1]
    state = STATES.get(last.kind, "running")
    is_ended = state in ("finished", "failed")
    admitted = _first(events, "admitted")
    return {
        "request_id": timeline.request_id,
        "sequence": timeline.req_id,
        "state": state,
        "arrived": round(unix_s(timeline.arrived_s), 6),
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": None if admitted is None else admitted.tokens,
        "output_tokens": last.tokens if is_ended else None,
        "max_new_tokens": timeline.max_new_tokens,
        "preemptions": sum(event.kind == "preempted" for event in events),
        "queue_ms": None if admitted is None else _since_arrival_ms(timeline, admitted.at_s),
        "first_token_ms": None if first_token is None else _since_arrival_ms(timeline, first_token.at_s),
        "total_ms": _since_arrival_ms(timeline, last.at_s if is_ended else time.monotonic()),
        "end": last.detail if is_ended else None,
    }


def details(timeline: RequestTimeline) -> dict[str, Any]:
    events = [_event(timeline, event) for event in timeline.events]
    return summary(timeline) | {"events": events, "events_left_out": timeline.events_left_out}


def _event(timeline: RequestTimeline, event: TimelineEvent) -> dict[str, Any]:
    shown: dict[str, Any] = {"event": event.kind, "at_ms": _since_arrival_ms(timeline, event.at_s)}
    if event.kind == "prefill":
        shown["duration_ms"] = _ms(event.duration_s)
    if event.kind == "admitted":
        shown["cached_tokens"] = event.tokens
    elif event.kind not in ("queued", "refused"):
        shown["tokens"] = event.tokens
    if event.detail:
        shown["detail"] = event.detail
    return shown


def _first(events: list[TimelineEvent], kind: str) -> TimelineEvent | None:
    return next((event for event in events if event.kind == kind), None)


def _since_arrival_ms(timeline: RequestTimeline, at_s: float) -> float:
    return _ms(at_s - timeline.arrived_s)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
