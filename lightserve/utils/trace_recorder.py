"""Spans of one process for a profile, in the JSON format of Chrome's tracing, which Perfetto opens."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightserve.utils.clock import unix_offset_ns

MAX_EVENTS = 500_000  # some 150 MB; a profile of a minute has 100,000
FIRST_TRACK = 2**30  # in place of the id of a thread, which is smaller


def of_node(node: int) -> str:
    """The end of the name of a part. That of another node says which: its processes have ids as those here."""
    return f".node-{node}.part"


class _Span(NamedTuple):
    thread: int
    name: str
    begin_s: float
    end_s: float
    args: dict[str, Any]


class TraceRecorder:
    """Times are those of time.monotonic(), the same clock in all processes. Any thread may add a span."""

    def __init__(self, process_name: str, max_events: int = MAX_EVENTS) -> None:
        self.num_dropped = 0
        self._process_name = process_name
        self._max_events = max_events
        self._spans: list[_Span] = []
        self._tracks: dict[str, int] = {}  # name -> id in place of a thread's

    def add(self, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """What this thread did."""
        self._append(_Span(threading.get_native_id(), name, begin_s, end_s, args))

    def add_on(self, track: str, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """What no thread did, such as waiting. Of two spans that overlap, one must contain the other."""
        thread = self._tracks.setdefault(track, FIRST_TRACK + len(self._tracks))
        self._append(_Span(thread, name, begin_s, end_s, args))

    def _append(self, span: _Span) -> None:
        if len(self._spans) >= self._max_events:
            self.num_dropped += 1
        else:
            self._spans.append(span)

    def write(self, path: str) -> None:
        """A part of a profile: tools/merge_profile.py joins the parts."""
        base_ns = unix_offset_ns()
        pid = os.getpid()
        names = [_metadata("process_name", pid, 0, self._process_name)]
        names += [_metadata("thread_name", pid, thread, track) for track, thread in self._tracks.items()]
        spans = [_event(pid, span) for span in self._spans]
        trace = {
            "process": {"pid": pid, "name": self._process_name},
            "baseTimeNanoseconds": base_ns,
            "traceEvents": [*names, *spans],
        }
        Path(path).write_bytes(msgspec.json.encode(trace))


def _event(pid: int, span: _Span) -> dict[str, Any]:
    """Times of the format are microseconds, here since the begin of the monotonic clock."""
    return {
        "ph": "X",
        "pid": pid,
        "tid": span.thread,
        "name": span.name,
        "ts": round(span.begin_s * 1e6, 3),
        "dur": round(max(span.end_s - span.begin_s, 0.0) * 1e6, 3),
        "args": span.args,
    }


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
