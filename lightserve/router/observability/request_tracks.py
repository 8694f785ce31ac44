"""Requests as tracks of a profile: one track a request, from its timeline."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.messages.output import RequestTimeline
from lightserve.router.observability.timeline import END_KINDS
from lightserve.utils.trace_recorder import TraceRecorder

# what a request does after an event, until the next one of these
PHASES = {
    "queued": "queue",
    "admitted": "prefill",
    "first_token": "decode",
    "preempted": "preempted",
    "workers_lost": "workers lost",
}


def add_request_tracks(
    recorder: TraceRecorder, timelines: Sequence[RequestTimeline], begin_s: float, end_s: float
) -> None:
    """Add the requests that ran between ``begin_s`` and ``end_s``."""
    for timeline in timelines:
        if _end_s(timeline, end_s) >= begin_s:
            _add_track(recorder, timeline, end_s)


def _add_track(recorder: TraceRecorder, timeline: RequestTimeline, end_s: float) -> None:
    track = f"request {timeline.request_id} ({timeline.req_id})"
    changes = [event for event in timeline.events if event.kind in PHASES]
    ends = [event.at_s for event in changes[1:]] + [_end_s(timeline, end_s)]
    has_token = False
    for event, until_s in zip(changes, ends, strict=True):
        has_token = has_token or event.kind == "first_token"
        is_resumed = event.kind == "admitted" and has_token
        name = "decode, resumed" if is_resumed else PHASES[event.kind]
        recorder.add_on(track, name, event.at_s, until_s, tokens=event.tokens)
    for event in timeline.events:
        if event.kind == "prefill":
            recorder.add_on(track, f"chunk of {event.tokens}", event.at_s, event.at_s + event.duration_s)


def _end_s(timeline: RequestTimeline, now_s: float) -> float:
    """``now_s`` if it still runs."""
    last = timeline.events[-1]
    return last.at_s if last.kind in END_KINDS else now_s
