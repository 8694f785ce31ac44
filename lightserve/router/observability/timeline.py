"""What happened to each of the last requests, for GET /debug/requests.

A request that is recorded has a Timeline (``Req.timeline``). Nothing is recorded for single output tokens, so a request
costs a few microseconds, however many tokens it generates.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from lightserve.messages.output import RequestTimeline, TimelineEvent, TimelineEventKind, Timelines
from lightserve.messages.params import FinishReason
from lightserve.messages.request import GenerateReq, GetTimelines
from lightserve.messages.step import ReqFailed

MAX_EVENTS = 512  # of one request: 131,072 prompt tokens in chunks of 256
END_KINDS = frozenset({"refused", "moved", "finished", "failed"})
# of ids that responses have in place of X-Request-Id
RESPONSE_ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_")


class Timeline:
    """The events of one request. It holds numbers only, so it may outlive the request."""

    __slots__ = (
        "_arrived_s",
        "_events",
        "_max_new_tokens",
        "_num_left_out",
        "_prompt_tokens",
        "_req_id",
        "is_for_other_engine",
        "owner",
        "request_id",
    )

    def __init__(self, message: GenerateReq) -> None:
        self.request_id = message.request_id
        self.owner = message.owner
        self._req_id = message.req_id
        self._arrived_s = message.arrived_s
        self._prompt_tokens = len(message.prompt_ids)
        self._max_new_tokens = message.params.stopping.max_new_tokens
        self._events: list[TimelineEvent] = []
        self._num_left_out = 0
        self.is_for_other_engine = False  # which has the rest of the request's events

    @property
    def is_shown(self) -> bool:
        """Not before the first chunk of a prompt for another engine: then it has no events."""
        return bool(self._events) or not self.is_for_other_engine

    def queued(self) -> None:
        self._add(TimelineEvent("queued", time.monotonic()))

    def refused(self, message: str) -> None:
        self._add(TimelineEvent("refused", time.monotonic(), detail=message))

    def admitted(self, now_s: float, cached_tokens: int) -> None:
        self._add(TimelineEvent("admitted", now_s, tokens=cached_tokens))

    def prefill(self, sent_s: float, now_s: float, tokens: int) -> None:
        """A chunk of the prompt is computed. After a preemption, a chunk may have output tokens too."""
        self._add(TimelineEvent("prefill", sent_s, now_s - sent_s, tokens))

    def kv(self, kind: TimelineEventKind, tokens: int) -> None:
        """KV of so many prompt tokens is wanted from a prefill engine, or has come."""
        self._add(TimelineEvent(kind, time.monotonic(), tokens=tokens))

    def first_token(self, now_s: float) -> None:
        self._add(TimelineEvent("first_token", now_s, tokens=1))

    def paused(self, kind: TimelineEventKind, output_tokens: int) -> None:
        """The request waits again: it was preempted, the workers were lost, or it was moved to another engine."""
        self._add(TimelineEvent(kind, time.monotonic(), tokens=output_tokens))

    def finished(self, reason: FinishReason, now_s: float, output_tokens: int) -> None:
        self._add(TimelineEvent("finished", now_s, tokens=output_tokens, detail=reason.value))

    def failed(self, failure: ReqFailed, output_tokens: int) -> None:
        detail = f"{failure.status}: {failure.message}"
        self._add(TimelineEvent("failed", time.monotonic(), tokens=output_tokens, detail=detail))

    def snapshot(self) -> RequestTimeline:
        return RequestTimeline(
            self.request_id,
            self._req_id,
            self._arrived_s,
            self._prompt_tokens,
            self._max_new_tokens,
            self._events.copy(),
            self._num_left_out,
        )

    def _add(self, event: TimelineEvent) -> None:
        if self.is_for_other_engine and event.kind != "prefill":
            return
        if self._events and self._events[-1].kind in END_KINDS:
            return  # a step in flight has computed a chunk of a request that was aborted
        if len(self._events) >= MAX_EVENTS:
            self._events.pop()  # the latest one makes room: the end of a request is always shown
            self._num_left_out += 1
        self._events.append(event)


class NoTimeline(Timeline):
    """Of a request that is not recorded."""

    __slots__ = ()

    def __init__(self) -> None:
        self.is_for_other_engine = False

    def _add(self, event: TimelineEvent) -> None:
        """It is forgotten."""


NO_TIMELINE = NoTimeline()


class TimelineRing:
    """The timelines of the last ``size`` requests, running ones included. Size 0: none is recorded."""

    def __init__(self, size: int) -> None:
        self._timelines: deque[Timeline] = deque(maxlen=size)

    def start(self, message: GenerateReq, is_for_other_engine: bool = False) -> Timeline:
        """Record a new request. The oldest one is forgotten if there are too many."""
        if self._timelines.maxlen == 0:
            return NO_TIMELINE
        timeline = Timeline(message)
        timeline.is_for_other_engine = is_for_other_engine
        self._timelines.append(timeline)
        return timeline

    def answer(self, query: GetTimelines) -> Timelines:
        matches: Iterable[Timeline] = (timeline for timeline in reversed(self._timelines) if timeline.is_shown)
        if query.request_id is not None:
            names = _names(query.request_id)
            matches = (timeline for timeline in matches if timeline.request_id in names)
        if query.owner is not None:
            matches = (timeline for timeline in matches if timeline.owner == query.owner)
        return Timelines(query.query_id, [timeline.snapshot() for timeline in islice(matches, query.limit)])

    def snapshots(self) -> list[RequestTimeline]:
        return [timeline.snapshot() for timeline in self._timelines if timeline.is_shown]


def _names(given: str) -> set[str]:
    """The request ids that a client may mean: its own, or the one in the id of a response."""
    return {given, *(given.removeprefix(prefix) for prefix in RESPONSE_ID_PREFIXES)}
